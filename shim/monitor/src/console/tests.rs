use std::time::Duration;

use husk_proto::shim::v1::console_output::Output;
use tokio::time::timeout;

use super::*;

struct Fixture {
    guest: UnixStream,
    console: Console,
    home: tempfile::TempDir,
}

fn fixture() -> Fixture {
    let (guest, ours) = UnixStream::pair().unwrap();
    let home = tempfile::tempdir().unwrap();
    let console = Console::start(ours, home.path().join("console.log"));
    Fixture { guest, console, home }
}

fn on_runtime(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async { timeout(Duration::from_secs(20), test).await.expect("stalled") });
}

async fn next(session: &mut Session) -> Output {
    session.output.recv().await.unwrap().output.unwrap()
}

/// Reads until `until` bytes have come. Returns them and the count of skipped bytes.
async fn collect(session: &mut Session, until: u64) -> (Vec<u8>, u64) {
    let (mut bytes, mut skipped) = (Vec::new(), 0);
    while (bytes.len() as u64) + skipped < until {
        match next(session).await {
            Output::Data(data) => bytes.extend(data),
            Output::SkippedBytes(n) => skipped += n,
            Output::Ended(_) => break,
        }
    }
    (bytes, skipped)
}

#[test]
fn both_directions_work_and_the_log_has_it() {
    on_runtime(async {
        let mut f = fixture();
        f.guest.write_all(b"login: ").await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        let mut session = f.console.attach().await.unwrap();
        assert_eq!(collect(&mut session, 7).await, (b"login: ".to_vec(), 0));
        session.input.send(b"root\r".to_vec()).await.unwrap();
        let mut read = [0; 5];
        f.guest.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"root\r");
        f.guest.write_all(b"# ").await.unwrap();
        assert_eq!(collect(&mut session, 2).await.0, b"# ");
        assert_eq!(
            std::fs::read(f.home.path().join("console.log")).unwrap(),
            b"login: # "
        );
    });
}

#[test]
fn stalled_session_does_not_block_the_guest() {
    on_runtime(async {
        let mut f = fixture();
        let mut session = f.console.attach().await.unwrap();
        let (chunk, chunks) = ([b'x'; 4096], 1000);
        for _ in 0..chunks {
            timeout(Duration::from_secs(2), f.guest.write_all(&chunk))
                .await
                .expect("the guest waits")
                .unwrap();
        }
        let total = chunks * chunk.len() as u64;
        while std::fs::metadata(f.home.path().join("console.log")).map_or(0, |log| log.len()) < total {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // The session reads again: old output, the count of skipped bytes, then new output.
        let (held, skipped) = collect(&mut session, total).await;
        assert_eq!(held.len() as u64 + skipped, total);
        let most = SESSION_BYTES + listener::MESSAGES * listener::MESSAGE_BYTES;
        assert!((SESSION_BYTES..=most).contains(&held.len()), "{}", held.len());
        f.guest.write_all(b"!").await.unwrap();
        assert_eq!(collect(&mut session, 1).await, (b"!".to_vec(), 0));
    });
}

#[test]
fn stalled_mirror_keeps_single_bytes() {
    on_runtime(async {
        let mut f = fixture();
        let mut mirror = f.console.mirror().await.unwrap();
        let log = f.home.path().join("console.log");
        let total = 1000;
        for n in 1..=total {
            f.guest.write_all(b"x").await.unwrap();
            // The actor has read it alone.
            while std::fs::metadata(&log).map_or(0, |log| log.len()) < n {
                tokio::task::yield_now().await;
            }
        }
        assert_eq!(collect(&mut mirror, total).await.1, 0);
    });
}

#[test]
fn guest_that_does_not_read_blocks_only_input() {
    on_runtime(async {
        let mut f = fixture();
        let session = f.console.attach().await.unwrap();
        let typing = async {
            loop {
                session.input.send(vec![b'x'; 60 << 10]).await.unwrap();
            }
        };
        assert!(timeout(Duration::from_millis(200), typing).await.is_err());
        let mut other = timeout(Duration::from_secs(1), f.console.attach())
            .await
            .unwrap()
            .unwrap();
        f.guest.write_all(b"still here").await.unwrap();
        assert_eq!(collect(&mut other, 10).await.0, b"still here");
    });
}

#[test]
fn new_session_takes_over_and_old_input_is_dropped() {
    on_runtime(async {
        let mut f = fixture();
        let mut older = f.console.attach().await.unwrap();
        let newer = f.console.attach().await.unwrap();
        assert_eq!(next(&mut older).await, Output::Ended(Ended::TakenOver.into()));
        assert!(older.output.recv().await.is_none());
        older.input.send(b"old".to_vec()).await.unwrap();
        newer.input.send(b"new".to_vec()).await.unwrap();
        let mut read = [0; 3];
        f.guest.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"new");
    });
}

#[test]
fn end_reaches_full_and_late_sessions() {
    on_runtime(async {
        let mut f = fixture();
        let mut session = f.console.attach().await.unwrap();
        for _ in 0..200 {
            f.guest.write_all(&[b'x'; 4096]).await.unwrap();
        }
        drop(f.guest);
        let mut last = None;
        while let Some(output) = session.output.recv().await {
            last = output.output;
        }
        assert_eq!(last, Some(Output::Ended(Ended::VmEnded.into())));

        let mut late = f.console.attach().await.unwrap();
        assert!(matches!(next(&mut late).await, Output::Data(data) if data.len() == scrollback::SCROLLBACK));
        assert_eq!(next(&mut late).await, Output::Ended(Ended::VmEnded.into()));
    });
}

#[test]
fn mirror_and_session_are_independent() {
    on_runtime(async {
        let mut f = fixture();
        let mut mirror = f.console.mirror().await.unwrap();
        let _stalled = f.console.attach().await.unwrap();
        let mut session = f.console.attach().await.unwrap();
        f.guest.write_all(b"login: ").await.unwrap();
        assert_eq!(collect(&mut mirror, 7).await, (b"login: ".to_vec(), 0));
        assert_eq!(collect(&mut session, 7).await, (b"login: ".to_vec(), 0));
        mirror.input.send(b"ro".to_vec()).await.unwrap();
        let mut read = [0; 2];
        f.guest.read_exact(&mut read).await.unwrap();
        session.input.send(b"ot".to_vec()).await.unwrap();
        let mut rest = [0; 2];
        f.guest.read_exact(&mut rest).await.unwrap();
        assert_eq!([read, rest].concat(), b"root");
        drop(f.guest);
        assert_eq!(next(&mut mirror).await, Output::Ended(Ended::VmEnded.into()));
        assert_eq!(next(&mut session).await, Output::Ended(Ended::VmEnded.into()));
    });
}
