use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::freeze::FreezeGuard;

const TIMEOUT: Option<Duration> = Some(FreezeGuard::DEFAULT_TIMEOUT);

/// An agent that freezes and thaws, and whether its file systems are frozen. `late`: it does not answer a freeze.
fn freezable(late: bool) -> (GuestAgent<DuplexStream>, JoinHandle<Vec<Value>>, Arc<AtomicBool>) {
    let frozen = Arc::new(AtomicBool::new(false));
    let state = frozen.clone();
    let (client, agent) = answering(move |name, _| match name {
        "guest-fsfreeze-status" if state.load(Ordering::Relaxed) => result("\"frozen\""),
        "guest-fsfreeze-status" => result("\"thawed\""),
        "guest-fsfreeze-freeze" => {
            state.store(true, Ordering::Relaxed);
            if late { silence() } else { result("1") }
        }
        "guest-fsfreeze-thaw" => {
            state.store(false, Ordering::Relaxed);
            result("1")
        }
        _ => Reaction::Honest,
    });
    (client, agent, frozen)
}

#[tokio::test(start_paused = true)]
async fn both_are_idempotent_and_the_timer_is_that_of_the_first_freeze() {
    let (mut client, agent, frozen) = freezable(false);
    let mut guard = FreezeGuard::default();
    assert!(client.freeze(&mut guard, TIMEOUT, SECOND).await.unwrap());
    let thaw_at = guard.thaw_at();
    assert!(thaw_at.is_some() && frozen.load(Ordering::Relaxed));
    tokio::time::advance(SECOND).await;
    assert!(!client.freeze(&mut guard, None, SECOND).await.unwrap());
    assert_eq!(guard.thaw_at(), thaw_at);
    assert!(client.thaw(&mut guard, SECOND).await.unwrap());
    assert_eq!(guard.thaw_at(), None);
    assert!(!client.thaw(&mut guard, SECOND).await.unwrap());
    let mut seen = names(client, agent).await;
    seen.retain(|name| name != "fsfreeze-status");
    assert_eq!(seen, ["sync-delimited", "fsfreeze-freeze", "fsfreeze-thaw"]);
}

#[tokio::test(start_paused = true)]
async fn a_freeze_that_took_effect_late_is_thawed() {
    for timeout in [TIMEOUT, None] {
        let (mut client, _agent, frozen) = freezable(true);
        let mut guard = FreezeGuard::default();
        let error = client.freeze(&mut guard, timeout, SECOND).await.unwrap_err();
        assert!(matches!(error, AgentError::Timeout { .. }), "{error}");
        tokio::time::advance(FreezeGuard::DEFAULT_TIMEOUT).await;
        assert!(guard.is_due(Instant::now().into_std()), "{timeout:?}");
        client.thaw(&mut guard, SECOND).await.unwrap();
        assert!(!frozen.load(Ordering::Relaxed));
        assert_eq!(guard.thaw_at(), None);
    }
}

#[tokio::test]
async fn a_freeze_that_is_refused_leaves_nothing_to_thaw() {
    let (mut client, _agent) = answering(|name, _| match name {
        "guest-fsfreeze-status" => result("\"thawed\""),
        _ => Reaction::Send(b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"hook\"}}\n".to_vec()),
    });
    let mut guard = FreezeGuard::default();
    assert!(
        client
            .freeze(&mut guard, TIMEOUT, SECOND)
            .await
            .unwrap_err()
            .is_from_agent()
    );
    assert_eq!(guard, FreezeGuard::default());
}

#[tokio::test(start_paused = true)]
async fn a_thaw_that_fails_is_repeated() {
    let (mut client, _agent) = answering(|_, _| {
        Reaction::Send(b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"busy\"}}\n".to_vec())
    });
    let mut guard = FreezeGuard::default();
    guard.freezing(Instant::now().into_std(), Some(Duration::ZERO));
    client.thaw(&mut guard, SECOND).await.unwrap_err();
    let now = Instant::now().into_std();
    assert!(!guard.is_due(now) && guard.is_due(now + 5 * SECOND));
}
