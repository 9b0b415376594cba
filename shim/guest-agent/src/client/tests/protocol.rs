use std::future::Future;
use std::task::Poll;

use super::*;

#[tokio::test]
async fn the_stream_is_synchronised_once() {
    let (mut client, agent) = scripted(|_| Reaction::Honest);
    client.ping(SECOND).await.unwrap();
    assert_eq!(client.time(SECOND).await.unwrap(), 1_795_575_069_204_508_000);
    client.sync(SECOND).await.unwrap();
    assert_eq!(names(client, agent).await, ["sync-delimited", "ping", "get-time"]);
}

#[tokio::test]
async fn errors_of_the_agent_leave_the_stream_in_step() {
    let (mut client, agent) = answering(|name, _| match name {
        "guest-get-load" => {
            Reaction::Send(b"{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"no\"}}\n".to_vec())
        }
        "guest-get-osinfo" => {
            Reaction::Send(b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"odd\"}}\n".to_vec())
        }
        _ => Reaction::Honest,
    });
    let missing = client.load(SECOND).await.unwrap_err();
    assert!(matches!(&missing, AgentError::CommandNotFound { desc, .. } if desc == "no"));
    let failed = client.os_info(SECOND).await.unwrap_err();
    assert_eq!(
        failed.to_string(),
        "guest-get-osinfo failed in the guest: odd (GenericError)"
    );
    assert!(!failed.may_take_effect());
    client.ping(SECOND).await.unwrap();
    assert_eq!(
        names(client, agent).await,
        ["sync-delimited", "get-load", "get-osinfo", "ping"]
    );
}

#[tokio::test(start_paused = true)]
async fn a_late_reply_is_not_taken_for_another_commands() {
    let mut late = Vec::new();
    let (mut client, agent) = scripted(move |request| match request["execute"].as_str() {
        Some("guest-get-host-name") => {
            late = b"{\"return\": {\"host-name\": \"late\"}}\n{\"return\": 7}\n".to_vec();
            silence()
        }
        _ => {
            let mut bytes = std::mem::take(&mut late);
            bytes.extend(honest(request));
            Reaction::Send(bytes)
        }
    });
    let error = client.host_name(SECOND).await.unwrap_err();
    assert!(
        matches!(error, AgentError::Timeout { limit: SECOND, .. }),
        "{error}"
    );
    assert!(error.may_take_effect());
    assert_eq!(client.time(SECOND).await.unwrap(), 1_795_575_069_204_508_000);
    assert_eq!(
        names(client, agent).await,
        ["sync-delimited", "get-host-name", "sync-delimited", "get-time"]
    );
}

#[tokio::test(start_paused = true)]
async fn replies_to_other_synchronisations_are_skipped() {
    let mut earlier = Vec::new();
    let (mut client, _agent) = scripted(move |request| {
        let reply = honest(request);
        if earlier.len() < 2 {
            earlier.push(reply);
            return silence();
        }
        let mut bytes = earlier.concat();
        bytes.extend(b"\xff{\"return\": \"x\"}\n\xff\xff{\"return\": {}}\n\xffgarbage\n");
        bytes.extend(b"{}\n".repeat(MAX_STALE_REPLIES));
        bytes.extend(reply);
        earlier = vec![Vec::new(), Vec::new()];
        Reaction::Send(bytes)
    });
    for _ in 0..2 {
        let error = client.ping(SECOND).await.unwrap_err();
        assert!(
            matches!(
                error,
                AgentError::Unresponsive {
                    command: "guest-ping",
                    ..
                }
            ),
            "{error}"
        );
        assert!(!error.may_take_effect());
    }
    client.ping(SECOND).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_synchronisation_that_is_lost_is_sent_again() {
    let mut lost = 2;
    let (mut client, agent) = scripted(move |_| {
        if lost == 0 {
            return Reaction::Honest;
        }
        lost -= 1;
        silence()
    });
    let start = Instant::now();
    client.ping(60 * SECOND).await.unwrap();
    assert_eq!(start.elapsed(), SYNC_AGAIN * 3);
    assert_eq!(names(client, agent).await[2..], ["sync-delimited", "ping"]);
}

#[tokio::test]
async fn an_abandoned_command_is_followed_by_a_synchronisation() {
    let (mut client, agent) = scripted(|_| Reaction::Honest);
    client.ping(SECOND).await.unwrap();
    {
        // Polled once: the command is sent, the reply has not come.
        let mut abandoned = std::pin::pin!(client.ping(SECOND));
        std::future::poll_fn(|context| {
            assert!(abandoned.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
    }
    client.time(SECOND).await.unwrap();
    assert_eq!(
        names(client, agent).await,
        ["sync-delimited", "ping", "ping", "sync-delimited", "get-time"]
    );
}

#[tokio::test]
async fn what_comes_unasked_is_no_reply() {
    let (mut client, agent) = answering(|name, _| match name {
        "guest-ping" => Reaction::Send(b"{\"return\": {}}\n{\"return\": 7}\n".to_vec()),
        _ => Reaction::Honest,
    });
    client.ping(SECOND).await.unwrap();
    assert_ne!(client.time(SECOND).await.unwrap(), 7);
    assert_eq!(
        names(client, agent).await,
        ["sync-delimited", "ping", "sync-delimited", "get-time"]
    );
}

#[tokio::test]
async fn an_invalid_reply_fails_one_command() {
    for reply in [
        "nonsense",
        "{}",
        "[]",
        "{\"return\": \"text\"}",
        "{\"return\": 1, \"return\": 2}",
        "\u{0}",
    ] {
        let (mut client, agent) = answering(move |name, _| match name {
            "guest-fsfreeze-thaw" => Reaction::Send(format!("{reply}\n").into_bytes()),
            _ => Reaction::Honest,
        });
        let error = client.fsfreeze_thaw(SECOND).await.unwrap_err();
        assert!(matches!(error, AgentError::Protocol { .. }), "{reply}: {error}");
        client.ping(SECOND).await.unwrap();
        assert_eq!(
            names(client, agent).await[1..],
            ["fsfreeze-thaw", "sync-delimited", "ping"]
        );
    }
}

#[tokio::test]
async fn the_end_of_the_stream_is_final() {
    let (mut client, _agent) = answering(|_, _| Reaction::Close);
    assert!(!client.is_closed());
    for _ in 0..3 {
        let error = client.ping(SECOND).await.unwrap_err();
        assert!(matches!(error, AgentError::Disconnected(_)), "{error}");
        assert!(client.is_closed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_does_not_read_costs_only_time() {
    let (ours, theirs) = tokio::io::duplex(16);
    let mut client = GuestAgent::new(ours);
    for _ in 0..3 {
        let error = client.ping(SECOND).await.unwrap_err();
        assert!(matches!(error, AgentError::Unresponsive { .. }), "{error}");
    }
    // No limit is too long for the clock.
    let forever = timeout(SECOND, client.ping(Duration::MAX)).await;
    assert!(forever.is_err());
    drop(theirs);
    assert!(matches!(
        client.ping(SECOND).await,
        Err(AgentError::Disconnected(Some(_)))
    ));
}
