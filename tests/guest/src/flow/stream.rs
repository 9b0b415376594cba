//! One connection, which carries one stream in one direction and then the receiver's result in the other.

use crate::content::Content;
use anyhow::{Context, Result, bail, ensure};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bytes per call; a multiple of eight.
const PIECE: usize = 256 << 10;

/// Direction of a stream, seen from the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Out,
    In,
}

/// Length of a stream.
#[derive(Debug, Clone, Copy)]
pub enum Amount {
    Bytes(u64),
    /// Until this flag is set.
    Until(&'static AtomicBool),
}

/// Length that means "until the client closes" in a request.
const ENDLESS: u64 = u64::MAX;

/// Result of a complete stream.
#[derive(Debug)]
pub struct Moved {
    /// Length in bytes.
    pub bytes: u64,
    /// Longest time without progress.
    pub longest_pause: Duration,
}

/// Requests a stream from the server at `address`.
pub fn request(
    address: SocketAddr,
    direction: Direction,
    amount: Amount,
    seed: u64,
    timeout: Duration,
) -> Result<Moved> {
    let peer = TcpStream::connect_timeout(&address, timeout).context("cannot connect")?;
    let mut peer = limited(peer, timeout)?;
    let (bytes, stop) = match amount {
        Amount::Bytes(bytes) => (bytes, None),
        Amount::Until(stop) => (ENDLESS, Some(stop)),
    };
    let mut order = [0; 17];
    order[0] = u8::from(direction == Direction::In);
    order[1..9].copy_from_slice(&bytes.to_le_bytes());
    order[9..].copy_from_slice(&seed.to_le_bytes());
    peer.write_all(&order).context("asking")?;
    let content = Content::new(seed);
    match direction {
        Direction::Out => send(&mut peer, bytes, content, || stop.is_some_and(is_set)),
        Direction::In => {
            if let Some(stop) = stop {
                let other = peer.try_clone()?;
                std::thread::spawn(move || {
                    while !is_set(stop) {
                        std::thread::sleep(POLL);
                    }
                    // It fails only if the stream has failed.
                    let _ = other.shutdown(Shutdown::Write);
                });
            }
            receive(&mut peer, bytes, content)
        }
    }
}

/// Serves the request of the client `peer`.
pub fn answer(peer: TcpStream, timeout: Duration) -> Result<Moved> {
    let mut peer = limited(peer, timeout)?;
    let mut order = [0; 17];
    peer.read_exact(&mut order).context("no order")?;
    let number = |at: usize| {
        order[at..at + 8]
            .iter()
            .rev()
            .fold(0, |n, &byte| (n << 8) | u64::from(byte))
    };
    let (bytes, content) = (number(1), Content::new(number(9)));
    if order[0] == 0 {
        return receive(&mut peer, bytes, content);
    }
    let closed = Arc::new(AtomicBool::new(false));
    if bytes == ENDLESS {
        let (mut other, closed) = (peer.try_clone()?, closed.clone());
        std::thread::spawn(move || {
            // Only the end of the stream or an error can arrive.
            let _ = other.read(&mut [0]);
            closed.store(true, Ordering::Relaxed);
        });
    }
    send(&mut peer, bytes, content, || is_set(&closed))
}

/// Interval of the checks for the end of a stream.
const POLL: Duration = Duration::from_millis(50);

fn is_set(flag: &AtomicBool) -> bool {
    flag.load(Ordering::Relaxed)
}

fn limited(peer: TcpStream, timeout: Duration) -> Result<TcpStream> {
    peer.set_read_timeout(Some(timeout))?;
    peer.set_write_timeout(Some(timeout))?;
    Ok(peer)
}

/// Sends the requested number of bytes, or until `stop`.
fn send(peer: &mut TcpStream, bytes: u64, content: Content, stop: impl Fn() -> bool) -> Result<Moved> {
    let mut piece = vec![0; PIECE];
    let mut clock = Clock::start();
    let mut done = 0;
    while done < bytes && !stop() {
        let size = PIECE.min(usize::try_from(bytes - done).unwrap_or(PIECE));
        content.fill(done, &mut piece[..size]);
        let mut rest = &piece[..size];
        while !rest.is_empty() {
            let written = peer.write(rest).map_err(|error| stopped(error, "sent", done))?;
            ensure!(written > 0, "closed after {done} bytes");
            rest = &rest[written..];
            clock.tick();
        }
        done += size as u64;
    }
    if bytes == ENDLESS {
        peer.shutdown(Shutdown::Write)?;
    }
    let mut verdict = String::new();
    peer.read_to_string(&mut verdict)
        .map_err(|error| stopped(error, "sent", done))?;
    clock.tick();
    ensure!(
        verdict == "good" || verdict.is_empty() && stop(),
        "the receiver says: {verdict:?}"
    );
    Ok(clock.moved(done))
}

fn receive(peer: &mut TcpStream, bytes: u64, content: Content) -> Result<Moved> {
    let (mut piece, mut scratch) = (vec![0; PIECE], vec![0; PIECE]);
    let mut clock = Clock::start();
    let mut done = 0;
    while done < bytes {
        let size = PIECE.min(usize::try_from(bytes - done).unwrap_or(PIECE));
        let mut full = 0;
        while full < size {
            let read = peer
                .read(&mut piece[full..size])
                .map_err(|error| stopped(error, "received", done + full as u64))?;
            if read == 0 {
                break;
            }
            full += read;
            clock.tick();
        }
        if let Some(place) = content.difference(done, &piece[..full], &mut scratch) {
            // The reader may be gone.
            let _ = write!(peer, "byte {place} differs");
            bail!("byte {place} differs");
        }
        done += full as u64;
        if full < size {
            ensure!(bytes == ENDLESS, "closed after {done} bytes");
            break;
        }
    }
    // The client of an endless stream has closed this direction already.
    match peer.write_all(b"good") {
        Err(error) if bytes != ENDLESS => Err(error).context("the verdict"),
        _ => Ok(clock.moved(done)),
    }
}

/// Describes `error` after `done` bytes.
fn stopped(error: std::io::Error, what: &str, done: u64) -> anyhow::Error {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => anyhow::anyhow!("stands still, {done} bytes {what}"),
        _ => anyhow::Error::new(error).context(format!("{done} bytes {what}")),
    }
}

struct Clock {
    last: Instant,
    longest: Duration,
}

impl Clock {
    fn start() -> Self {
        Self {
            last: Instant::now(),
            longest: Duration::ZERO,
        }
    }

    /// Records progress.
    fn tick(&mut self) {
        let now = Instant::now();
        self.longest = self.longest.max(now - self.last);
        self.last = now;
    }

    fn moved(&self, bytes: u64) -> Moved {
        Moved {
            bytes,
            longest_pause: self.longest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    const TIMEOUT: Duration = Duration::from_secs(20);

    /// An address at which `serve` has one client.
    fn server(serve: impl FnOnce(TcpStream) + Send + 'static) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        std::thread::spawn(move || serve(listener.accept().expect("a client").0));
        address
    }

    #[test]
    fn streams_arrive_either_way() {
        for direction in [Direction::Out, Direction::In] {
            let address = server(|peer| {
                answer(peer, TIMEOUT).expect("arrives");
            });
            request(
                address,
                direction,
                Amount::Bytes(3 * PIECE as u64 + 5),
                9,
                TIMEOUT,
            )
            .expect("arrives");
        }
    }

    #[test]
    fn a_stream_continues_until_it_is_stopped() {
        static STOP: AtomicBool = AtomicBool::new(false);
        let threads = [Direction::Out, Direction::In].map(|direction| {
            let address = server(|peer| {
                answer(peer, TIMEOUT).expect("arrives");
            });
            std::thread::spawn(move || request(address, direction, Amount::Until(&STOP), 9, TIMEOUT))
        });
        std::thread::sleep(Duration::from_millis(100));
        STOP.store(true, Ordering::Relaxed);
        for thread in threads {
            let moved = thread.join().expect("no panic").expect("arrives");
            assert!(moved.bytes > 0);
        }
    }

    #[test]
    fn a_changed_byte_is_reported_to_the_sender() {
        let address = server(|mut peer| {
            let mut order = [0; 17];
            peer.read_exact(&mut order).expect("an order");
            // The content of another stream.
            let _ = receive(&mut peer, 1000, Content::new(1));
        });
        let error = request(address, Direction::Out, Amount::Bytes(1000), 2, TIMEOUT).expect_err("differs");
        assert!(error.to_string().contains("byte 0 differs"), "{error}");
    }

    #[test]
    fn a_stream_that_stands_still_has_failed() {
        let address = server(|peer| {
            std::thread::sleep(Duration::from_secs(5));
            drop(peer);
        });
        let timeout = Duration::from_millis(100);
        let error = request(address, Direction::In, Amount::Bytes(1000), 2, timeout).expect_err("stalls");
        assert!(error.to_string().contains("stands still"), "{error}");
    }
}
