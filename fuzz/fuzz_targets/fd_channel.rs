//! Messages of a hostile sender on the descriptor channel: tokens of any number, bytes in between, any number of
//! descriptors, with requests and the passing of time among them. Asserts that a descriptor arrives under its token if
//! its message is right, and that none stays open otherwise, or in the end.
#![no_main]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Once;
use std::time::Duration;

use arbitrary::Arbitrary;
use husk_fuzz::host::{open_descriptors, settle, with_clock};
use husk_proto::fds::{FdReceiver, Token, UNCLAIMED_TIMEOUT, socketpair};
use libfuzzer_sys::fuzz_target;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::pipe::pipe;

#[derive(Arbitrary, Debug)]
struct Program {
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    /// Tokens, bytes after them, and how many descriptors more or fewer than tokens there are.
    Send(Vec<u8>, Vec<u8>, i8),
    Take(u8),
    /// A request whose caller does not wait.
    Abandon(u8),
    Wait(u8),
    EndChannel,
}

/// A token of few.
fn token(n: u8) -> [u8; Token::LEN] {
    [n % 8; Token::LEN]
}

/// The pipe whose writing end is sent: its reading end tells whether all copies are closed.
struct Probe(File);

impl Probe {
    fn new() -> (Probe, OwnedFd) {
        let (reader, writer) = pipe().expect("a pipe");
        rustix::io::ioctl_fionbio(&reader, true).expect("nonblocking");
        (Probe(reader.into()), writer)
    }

    fn is_closed(&mut self) -> bool {
        matches!(self.0.read(&mut [0; 8]), Ok(0))
    }
}

fn send(socket: &OwnedFd, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(payload)], &mut control, flags).is_ok()
}

/// Distance from the end of a time within which the order of events is not known.
const EDGE: Duration = Duration::from_millis(100);

fuzz_target!(|program: Program| {
    // The first runtime opens descriptors that stay.
    static FIRST: Once = Once::new();
    FIRST.call_once(|| with_clock(async {}));
    let before = open_descriptors();
    with_clock(run(&program));
    assert_eq!(open_descriptors(), before, "a descriptor is leaked");
});

async fn run(program: &Program) {
    let (sender, receiver) = socketpair().expect("a channel");
    let mut sender = Some(sender);
    let receiver = FdReceiver::new(receiver).expect("a receiver");
    // When the receiver's descriptors arrived.
    let mut held: BTreeMap<u8, Duration> = BTreeMap::new();
    let mut probes = Vec::new();
    let mut ended = false;
    let start = tokio::time::Instant::now();
    for step in program.steps.iter().take(32) {
        match step {
            Step::Send(names, more, extra) => {
                let Some(socket) = &sender else { continue };
                let names = &names[..names.len().min(253)];
                // Fewer than a token has.
                let more = &more[..more.len().min(Token::LEN - 1)];
                let count = (names.len() as i64 + i64::from(*extra)).clamp(0, 253) as usize;
                let mut payload: Vec<u8> = names.iter().flat_map(|name| token(*name)).collect();
                payload.extend(more);
                let (probe, writer) = Probe::new();
                probes.push(probe);
                if !send(socket, &payload, &vec![writer.as_fd(); count]) {
                    continue;
                }
                drop(writer);
                settle().await;
                let mut distinct: Vec<u8> = names.iter().map(|name| name % 8).collect();
                distinct.sort_unstable();
                distinct.dedup();
                let now = start.elapsed();
                held.retain(|_, arrived| now < *arrived + UNCLAIMED_TIMEOUT + EDGE);
                let clashes = |name: &u8| held.get(name).is_some_and(|at| now < *at + UNCLAIMED_TIMEOUT);
                let unclear = |name: &u8| {
                    held.get(name)
                        .is_some_and(|at| now + EDGE > *at + UNCLAIMED_TIMEOUT)
                };
                let right = more.is_empty()
                    && count == names.len()
                    && distinct.len() == count
                    && !distinct.iter().any(clashes);
                if payload.is_empty() && count == 0 {
                    ended = true;
                }
                if ended {
                    continue;
                }
                let accepted = !probes.last_mut().is_some_and(Probe::is_closed);
                if !distinct.iter().any(unclear) {
                    assert_eq!(accepted, right, "{names:?} with {count} descriptors");
                }
                if accepted {
                    held.extend(distinct.into_iter().map(|name| (name, now)));
                }
            }
            Step::Take(name) => {
                let taken = receiver.take(Token::from(token(*name))).await;
                let found = held.remove(&(name % 8));
                let passed = start.elapsed();
                match found {
                    Some(arrived) if passed + EDGE < arrived + UNCLAIMED_TIMEOUT => {
                        assert!(taken.is_ok(), "{taken:?}");
                    }
                    Some(_) => {}
                    None => assert!(taken.is_err()),
                }
            }
            Step::Abandon(name) if !held.contains_key(&(name % 8)) => {
                let taken =
                    tokio::time::timeout(Duration::from_millis(5), receiver.take(Token::from(token(*name))));
                assert!(!matches!(taken.await, Ok(Ok(_))));
            }
            Step::Abandon(_) => {}
            Step::Wait(seconds) => tokio::time::sleep(Duration::from_secs(u64::from(*seconds % 40))).await,
            Step::EndChannel => {
                sender = None;
                ended = true;
                settle().await;
            }
        }
    }
    drop(receiver);
    settle().await;
    // What the receiver has not read is closed with its socket.
    drop(sender);
    assert!(probes.iter_mut().all(Probe::is_closed), "a descriptor stays open");
}
