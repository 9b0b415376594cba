use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use proptest::prelude::*;
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::pipe::pipe;

use super::super::sender::send_message;
use super::super::{FdSender, SendError, socketpair};
use super::*;

fn on_runtime<T>(paused: bool, test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(paused)
        .build()
        .unwrap()
        .block_on(test)
}

fn token(n: u8) -> Token {
    Token::from([n; Token::LEN])
}

/// A pipe whose writing end is meant to be sent: the reading end tells whether every copy of it was closed.
struct Probe {
    reader: File,
    writer: Option<OwnedFd>,
}

impl Probe {
    fn new() -> Probe {
        let (reader, writer) = pipe().unwrap();
        rustix::io::ioctl_fionbio(&reader, true).unwrap();
        Probe {
            reader: reader.into(),
            writer: Some(writer),
        }
    }

    fn writer(&self) -> BorrowedFd<'_> {
        self.writer.as_ref().unwrap().as_fd()
    }

    /// Drops the test's own copy; true where no other is left.
    fn closed_everywhere(&mut self) -> bool {
        self.writer = None;
        matches!(self.reader.read(&mut [0; 8]), Ok(0))
    }
}

async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(Duration::from_millis(1)).await;
}

#[test]
fn a_descriptor_arrives_under_its_token_close_on_exec_and_once() {
    on_runtime(true, async {
        let (tx, rx) = socketpair().unwrap();
        let (sender, receiver) = (FdSender::new(tx).unwrap(), FdReceiver::new(rx).unwrap());
        let mut probe = Probe::new();
        let sent = sender.send_one(probe.writer()).await.unwrap();
        let taken = receiver.take(sent).await.unwrap();
        assert!(fcntl_getfd(&taken).unwrap().contains(FdFlags::CLOEXEC));
        File::from(taken).write_all(b"x").unwrap();
        assert_eq!(probe.reader.read(&mut [0; 8]).unwrap(), 1);
        assert_eq!(receiver.take(sent).await.unwrap_err(), TakeError::Missing(sent));
        assert!(probe.closed_everywhere());
    });
}

#[test]
fn a_full_message_keeps_its_order() {
    on_runtime(true, async {
        let (tx, rx) = socketpair().unwrap();
        let (sender, receiver) = (FdSender::new(tx).unwrap(), FdReceiver::new(rx).unwrap());
        let (null, zero) = (File::open("/dev/null").unwrap(), File::open("/dev/zero").unwrap());
        let fds: Vec<_> = (0..=255u8)
            .take(MAX_FDS_PER_MESSAGE)
            .map(|n| (token(n), if n % 2 == 0 { null.as_fd() } else { zero.as_fd() }))
            .collect();
        sender.send(&fds).await.unwrap();
        for (token, fd) in fds {
            let got = rustix::fs::fstat(receiver.take(token).await.unwrap())
                .unwrap()
                .st_rdev;
            assert_eq!(got, rustix::fs::fstat(fd).unwrap().st_rdev);
        }
        let too_many: Vec<_> = (0..=MAX_FDS_PER_MESSAGE)
            .map(|_| (Token::random(), null.as_fd()))
            .collect();
        assert!(matches!(sender.send(&too_many).await, Err(SendError::Count(254))));
        assert!(matches!(sender.send(&[]).await, Err(SendError::Count(0))));
    });
}

#[test]
fn a_request_waits_for_its_descriptor_for_five_seconds() {
    on_runtime(true, async {
        let (tx, rx) = socketpair().unwrap();
        let (sender, receiver) = (FdSender::new(tx).unwrap(), FdReceiver::new(rx).unwrap());
        let null = File::open("/dev/null").unwrap();
        let early = tokio::spawn({
            let receiver = receiver.clone();
            async move { receiver.take(token(1)).await }
        });
        settle().await;
        assert_eq!(
            receiver.take(token(1)).await.unwrap_err(),
            TakeError::Awaited(token(1))
        );
        sender.send(&[(token(1), null.as_fd())]).await.unwrap();
        early.await.unwrap().unwrap();

        let start = Instant::now();
        assert_eq!(
            receiver.take(token(2)).await.unwrap_err(),
            TakeError::Missing(token(2))
        );
        assert!(start.elapsed() >= TAKE_TIMEOUT && start.elapsed() < TAKE_TIMEOUT + Duration::from_secs(10));
    });
}

#[test]
fn a_cancelled_request_loses_nothing() {
    on_runtime(true, async {
        let (tx, rx) = socketpair().unwrap();
        let (sender, receiver) = (FdSender::new(tx).unwrap(), FdReceiver::new(rx).unwrap());
        let null = File::open("/dev/null").unwrap();
        let waiting = tokio::time::timeout(Duration::from_millis(5), receiver.take(token(1))).await;
        assert!(waiting.is_err());
        sender.send(&[(token(1), null.as_fd())]).await.unwrap();
        receiver.take(token(1)).await.unwrap();
    });
}

#[test]
fn unclaimed_descriptors_are_closed_in_time() {
    on_runtime(true, async {
        let (tx, rx) = socketpair().unwrap();
        let (sender, receiver) = (FdSender::new(tx).unwrap(), FdReceiver::new(rx).unwrap());
        let mut probe = Probe::new();
        let sent = sender.send_one(probe.writer()).await.unwrap();
        tokio::time::sleep(UNCLAIMED_TIMEOUT - Duration::from_secs(1)).await;
        assert!(!probe.closed_everywhere());
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(probe.closed_everywhere());
        assert_eq!(receiver.take(sent).await.unwrap_err(), TakeError::Missing(sent));
    });
}

#[test]
fn a_closed_channel_fails_at_once_but_keeps_received_descriptors() {
    on_runtime(true, async {
        let (tx, rx) = socketpair().unwrap();
        let (sender, receiver) = (FdSender::new(tx).unwrap(), FdReceiver::new(rx).unwrap());
        let null = File::open("/dev/null").unwrap();
        let waiting = tokio::spawn({
            let receiver = receiver.clone();
            async move { receiver.take(token(9)).await }
        });
        sender.send(&[(token(1), null.as_fd())]).await.unwrap();
        let start = Instant::now();
        drop(sender);
        assert_eq!(waiting.await.unwrap().unwrap_err(), TakeError::Closed(token(9)));
        assert_eq!(
            receiver.take(token(2)).await.unwrap_err(),
            TakeError::Closed(token(2))
        );
        receiver.take(token(1)).await.unwrap();
        assert!(start.elapsed() < Duration::from_secs(1));
    });
}

#[test]
fn dropping_the_receiver_closes_everything_and_the_sender_learns() {
    on_runtime(false, async {
        let (tx, rx) = socketpair().unwrap();
        let (sender, receiver) = (FdSender::new(tx).unwrap(), FdReceiver::new(rx).unwrap());
        let mut probe = Probe::new();
        sender.send_one(probe.writer()).await.unwrap();
        settle().await;
        drop(receiver);
        settle().await;
        assert!(matches!(
            sender.send_one(probe.writer()).await,
            Err(SendError::Closed)
        ));
        assert!(probe.closed_everywhere());
    });
}

#[test]
fn held_descriptors_are_bounded() {
    let null = || OwnedFd::from(File::open("/dev/null").unwrap());
    let message = |names: &[u8]| FdMessage {
        tokens: names.iter().flat_map(|n| [*n; Token::LEN]).collect(),
        fds: names.iter().map(|_| null()).collect(),
        truncated: false,
    };
    let now = Instant::now();
    let mut table = FdTable::new(4);
    table.arrived(message(&[1, 2, 3]), now).unwrap();
    table.arrived(message(&[4, 5]), now).unwrap_err();
    table.arrived(message(&[4]), now).unwrap();
    table.arrived(message(&[5]), now).unwrap_err();
    table.expire(now + UNCLAIMED_TIMEOUT);
    table.arrived(message(&[5]), now).unwrap();

    let ask = |n| {
        let (reply, answer) = oneshot::channel();
        (
            TakeRequest {
                token: token(n),
                reply,
            },
            answer,
        )
    };
    let waiting: Vec<_> = (10..14).map(ask).collect();
    let answers: Vec<_> = waiting
        .into_iter()
        .map(|(take, answer)| (table.take(take, now), answer))
        .collect();
    let (take, mut answer) = ask(14);
    table.take(take, now);
    assert_eq!(answer.try_recv().unwrap().unwrap_err(), TakeError::Busy);
    drop(answers);
}

#[test]
fn a_stream_socket_is_refused() {
    on_runtime(true, async {
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(
            FdReceiver::new(a.into()).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever one message holds, either all of it is taken or nothing stays open, and the next message is served.
    #[test]
    fn hostile_messages_leak_nothing(payload in prop::collection::vec(0u8..3, 0..5000), copies in 0usize..6) {
        on_runtime(false, async {
            let (tx, rx) = socketpair().unwrap();
            let receiver = FdReceiver::new(rx).unwrap();
            let mut probe = Probe::new();
            let fds = vec![probe.writer(); copies];
            prop_assume!(!payload.is_empty() || copies > 0);
            send_message(&tx, &payload, &fds).unwrap();
            settle().await;

            let (tokens, rest) = payload.as_chunks::<16>();
            let distinct: HashSet<_> = tokens.iter().collect();
            let good = rest.is_empty() && tokens.len() == copies && distinct.len() == copies;
            prop_assert_eq!(probe.closed_everywhere(), !good);

            let null = File::open("/dev/null").unwrap();
            send_message(&tx, token(7).as_bytes(), &[null.as_fd()]).unwrap();
            prop_assert!(receiver.take(token(7)).await.is_ok());
            Ok(())
        })?;
    }

    /// The same with well-formed lengths and tokens that may repeat, within a message and across messages.
    #[test]
    fn a_repeated_token_refuses_its_message(
        messages in prop::collection::vec(prop::collection::vec(0u8..6, 1..4), 1..6),
    ) {
        on_runtime(false, async {
            let (tx, rx) = socketpair().unwrap();
            let receiver = FdReceiver::new(rx).unwrap();
            let mut held = HashSet::new();
            for names in &messages {
                let mut probe = Probe::new();
                let payload: Vec<u8> = names.iter().flat_map(|n| [*n; 16]).collect();
                send_message(&tx, &payload, &vec![probe.writer(); names.len()]).unwrap();
                settle().await;
                let distinct: HashSet<_> = names.iter().copied().collect();
                let good = distinct.len() == names.len() && distinct.is_disjoint(&held);
                prop_assert_eq!(probe.closed_everywhere(), !good);
                if good {
                    held.extend(distinct);
                }
            }
            for n in held {
                prop_assert!(receiver.take(token(n)).await.is_ok());
            }
            Ok(())
        })?;
    }
}
