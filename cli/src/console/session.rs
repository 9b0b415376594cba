//! One attachment to a guest's serial console: bytes both ways until someone has had enough.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

/// `^]`, virtctl's and telnet's escape.
pub(crate) const ESCAPE: u8 = 0x1d;

/// After the end of a piped input, output is still shown until the guest is silent for this long.
const LINGER: Duration = Duration::from_secs(1);

/// How long typed bytes are still offered to the guest once the escape has been typed.
const LAST_WORDS: Duration = Duration::from_millis(100);

const BUFFER: usize = 8 * 1024;

/// Bytes taken from the input beyond what the guest has accepted.
const READ_AHEAD: usize = 64 * 1024;

/// How a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The escape was typed, or a piped input ended.
    Detached,
    /// The other side closed the connection: the VM ended, or someone else attached.
    Closed,
}

/// What the end of the input means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtInputEnd {
    /// Show what the guest still says, then detach.
    Detach,
    /// Go on showing output until the other side closes.
    Watch,
}

/// Carries bytes from `input` to `guest` and from `guest` to `output`.
///
/// # Errors
/// Writing to `output` failed. An error of `guest` is its end, not an error.
pub(crate) async fn run<G, O>(
    guest: G,
    mut input: mpsc::Receiver<Vec<u8>>,
    mut output: O,
    at_input_end: AtInputEnd,
) -> io::Result<End>
where
    G: AsyncRead + AsyncWrite,
    O: AsyncWrite + Unpin,
{
    let (mut from_guest, mut to_guest) = tokio::io::split(guest);
    let mut typed_out = false;
    // What the guest has not taken yet: input is read ahead of it, or its escape could not be seen.
    let mut pending = Vec::new();
    let mut buffer = vec![0; BUFFER];
    loop {
        let lingering = typed_out && pending.is_empty() && at_input_end == AtInputEnd::Detach;
        tokio::select! {
            read = from_guest.read(&mut buffer) => match read {
                Ok(0) | Err(_) => return Ok(End::Closed),
                Ok(count) => {
                    output.write_all(&buffer[..count]).await?;
                    output.flush().await?;
                }
            },
            bytes = input.recv(), if !typed_out && pending.len() < READ_AHEAD => match bytes {
                None => typed_out = true,
                Some(bytes) => {
                    let (bytes, escaped) = until_escape(&bytes);
                    pending.extend_from_slice(bytes);
                    if escaped {
                        let _ = tokio::time::timeout(LAST_WORDS, to_guest.write_all(&pending)).await;
                        return Ok(End::Detached);
                    }
                }
            },
            written = to_guest.write(&pending), if !pending.is_empty() => match written {
                Ok(count) => drop(pending.drain(..count)),
                // A guest that has gone shows as the end of its output.
                Err(_) => pending.clear(),
            },
            () = tokio::time::sleep(LINGER), if lingering => return Ok(End::Detached),
        }
    }
}

fn until_escape(bytes: &[u8]) -> (&[u8], bool) {
    match bytes.iter().position(|byte| *byte == ESCAPE) {
        Some(position) => (&bytes[..position], true),
        None => (bytes, false),
    }
}

/// Reads stdin in a thread of its own, which a read that never returns cannot keep from ending with the process.
pub(crate) fn stdin() -> io::Result<mpsc::Receiver<Vec<u8>>> {
    let (sender, receiver) = mpsc::channel(4);
    std::thread::Builder::new().name("stdin".into()).spawn(move || {
        let mut buffer = vec![0; BUFFER];
        loop {
            match rustix::io::read(rustix::stdio::stdin(), &mut buffer) {
                Ok(0) => break,
                Ok(count) => {
                    if sender.blocking_send(buffer[..count].to_vec()).is_err() {
                        break;
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => break,
            }
        }
    })?;
    Ok(receiver)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(parts: &[&[u8]]) -> mpsc::Receiver<Vec<u8>> {
        let (sender, receiver) = mpsc::channel(8);
        for part in parts {
            sender.try_send(part.to_vec()).unwrap();
        }
        receiver
    }

    #[tokio::test]
    async fn the_escape_detaches_and_is_not_sent() {
        let (guest, mut far) = tokio::io::duplex(64);
        let mut shown = Vec::new();
        let end = run(guest, typed(&[b"ls\n", b"x\x1dy"]), &mut shown, AtInputEnd::Watch).await.unwrap();
        assert_eq!(end, End::Detached);
        let mut received = Vec::new();
        far.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, b"ls\nx");
    }

    #[tokio::test(start_paused = true)]
    async fn a_piped_input_that_ends_still_shows_the_answer() {
        let (guest, mut far) = tokio::io::duplex(64);
        let answer = tokio::spawn(async move {
            let mut line = [0; 3];
            far.read_exact(&mut line).await.unwrap();
            tokio::time::sleep(Duration::from_millis(900)).await;
            far.write_all(b"answer").await.unwrap();
            std::future::pending::<()>().await;
        });
        let mut shown = Vec::new();
        let end = run(guest, typed(&[b"ls\n"]), &mut shown, AtInputEnd::Detach).await.unwrap();
        assert_eq!((end, shown.as_slice()), (End::Detached, b"answer".as_slice()));
        answer.abort();
    }

    #[tokio::test]
    async fn a_watcher_outlives_its_input() {
        let (guest, mut far) = tokio::io::duplex(64);
        far.write_all(b"bye").await.unwrap();
        drop(far);
        let mut shown = Vec::new();
        let end = run(guest, typed(&[]), &mut shown, AtInputEnd::Watch).await.unwrap();
        assert_eq!((end, shown.as_slice()), (End::Closed, b"bye".as_slice()));
    }

    #[tokio::test]
    async fn a_guest_that_does_not_read_can_still_be_left() {
        let (guest, _far) = tokio::io::duplex(1);
        let (sender, input) = mpsc::channel(8);
        sender.try_send(vec![b'a'; 100]).unwrap();
        sender.try_send(vec![ESCAPE]).unwrap();
        let session = run(guest, input, Vec::new(), AtInputEnd::Watch);
        let end = tokio::time::timeout(Duration::from_secs(5), session).await;
        assert_eq!(end.expect("the escape works").unwrap(), End::Detached);
    }
}
