//! One session on a guest's serial console.

use std::io;
use std::time::Duration;

use husk_proto::shim::v1::console_output::{Ended, Output};
use husk_proto::shim::v1::{ConsoleInput, ConsoleOutput};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

/// `^]`, the escape character of virtctl and telnet.
const ESCAPE: u8 = 0x1d;

/// After the end of a piped input, the session ends once the guest has been silent for this long.
const OUTPUT_IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum time for sending pending input after the escape was typed.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(100);

/// Maximum number of input bytes buffered for the guest.
const MAX_PENDING_INPUT: usize = 1024 * 1024;

/// Maximum number of bytes in one message.
const MAX_MESSAGE: usize = 64 * 1024;

/// Reason for the end of a session.
#[derive(Debug)]
pub(crate) enum SessionEnd {
    /// The escape was typed, or a piped input ended.
    Detached,
    /// Another session took over.
    TakenOver,
    /// The VM ended.
    VmEnded,
    /// The connection to the monitor broke.
    Lost(Option<Status>),
}

/// Behaviour at the end of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnInputEof {
    /// Show remaining output, then detach.
    Detach,
    /// Keep showing output until the VM ends.
    Watch,
}

/// Copies bytes from `input` to the guest and from the guest to `output`.
///
/// # Errors
/// Writing to `output` failed.
pub(crate) async fn run<S, O>(
    to_guest: mpsc::Sender<ConsoleInput>,
    mut from_guest: S,
    mut input: mpsc::Receiver<Vec<u8>>,
    mut output: O,
    at_input_end: OnInputEof,
) -> io::Result<SessionEnd>
where
    S: Stream<Item = Result<ConsoleOutput, Status>> + Unpin,
    O: AsyncWrite + Unpin,
{
    let mut input_open = true;
    // Input the guest has not accepted yet. It is read ahead, so that the escape is found even if the guest hangs.
    let mut pending = Vec::new();
    loop {
        let lingering = !input_open && pending.is_empty() && at_input_end == OnInputEof::Detach;
        tokio::select! {
            message = from_guest.next() => {
                let output_of = match message {
                    Some(Ok(message)) => message.output,
                    Some(Err(status)) => return Ok(SessionEnd::Lost(Some(status))),
                    None => return Ok(SessionEnd::Lost(None)),
                };
                match output_of {
                    Some(Output::Data(bytes)) => output.write_all(&bytes).await?,
                    Some(Output::SkippedBytes(count)) => {
                        let note = format!("\r\n[{count} bytes skipped: the terminal is too slow]\r\n");
                        output.write_all(note.as_bytes()).await?;
                    }
                    Some(Output::Ended(reason)) => {
                        return Ok(match Ended::try_from(reason) {
                            Ok(Ended::TakenOver) => SessionEnd::TakenOver,
                            Ok(Ended::VmEnded) => SessionEnd::VmEnded,
                            _ => SessionEnd::Lost(None),
                        });
                    }
                    None => {}
                }
                output.flush().await?;
            }
            bytes = input.recv(), if input_open && pending.len() < MAX_PENDING_INPUT => match bytes {
                None => input_open = false,
                Some(bytes) => {
                    let (bytes, escaped) = until_escape(&bytes);
                    pending.extend_from_slice(bytes);
                    if escaped {
                        let _ = tokio::time::timeout(FLUSH_TIMEOUT, send(&to_guest, &mut pending)).await;
                        return Ok(SessionEnd::Detached);
                    }
                }
            },
            // If the guest is gone, its output stream ends.
            () = send(&to_guest, &mut pending), if !pending.is_empty() => {}
            () = tokio::time::sleep(OUTPUT_IDLE_TIMEOUT), if lingering => return Ok(SessionEnd::Detached),
        }
    }
}

/// Sends the first part of `pending` and removes it. Cancellation-safe.
async fn send(to_guest: &mpsc::Sender<ConsoleInput>, pending: &mut Vec<u8>) {
    match to_guest.reserve().await {
        Ok(permit) => {
            let count = pending.len().min(MAX_MESSAGE);
            permit.send(ConsoleInput {
                data: pending.drain(..count).collect(),
            });
        }
        Err(_) => pending.clear(),
    }
}

fn until_escape(bytes: &[u8]) -> (&[u8], bool) {
    match bytes.iter().position(|byte| *byte == ESCAPE) {
        Some(position) => (&bytes[..position], true),
        None => (bytes, false),
    }
}

/// Reads stdin in a separate thread, so that a blocked read does not delay the exit of the process.
pub(crate) fn stdin() -> io::Result<mpsc::Receiver<Vec<u8>>> {
    let (sender, receiver) = mpsc::channel(4);
    std::thread::Builder::new().name("stdin".into()).spawn(move || {
        let mut buffer = vec![0; 8 * 1024];
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
    use tokio_stream::wrappers::ReceiverStream;

    type Answers = mpsc::Sender<Result<ConsoleOutput, Status>>;

    struct Far {
        typed: mpsc::Receiver<ConsoleInput>,
        answers: Answers,
    }

    impl Far {
        async fn say(&self, output: Output) {
            self.answers
                .send(Ok(ConsoleOutput { output: Some(output) }))
                .await
                .unwrap();
        }
    }

    fn guest() -> (
        mpsc::Sender<ConsoleInput>,
        ReceiverStream<Result<ConsoleOutput, Status>>,
        Far,
    ) {
        let (to_guest, typed) = mpsc::channel(1);
        let (answers, from_guest) = mpsc::channel(8);
        (to_guest, ReceiverStream::new(from_guest), Far { typed, answers })
    }

    fn typed(parts: &[&[u8]]) -> mpsc::Receiver<Vec<u8>> {
        let (sender, receiver) = mpsc::channel(8);
        for part in parts {
            sender.try_send(part.to_vec()).unwrap();
        }
        receiver
    }

    #[tokio::test]
    async fn the_escape_detaches_and_is_not_sent() {
        let (to_guest, from_guest, mut far) = guest();
        let received = tokio::spawn(async move {
            let mut all = Vec::new();
            while let Some(message) = far.typed.recv().await {
                all.extend(message.data);
            }
            all
        });
        let input = typed(&[b"ls\n", b"x\x1dy"]);
        let end = run(to_guest, from_guest, input, Vec::new(), OnInputEof::Watch)
            .await
            .unwrap();
        assert!(matches!(end, SessionEnd::Detached), "{end:?}");
        assert_eq!(received.await.unwrap(), b"ls\nx");
    }

    #[tokio::test(start_paused = true)]
    async fn a_piped_input_that_ends_still_shows_the_answer() {
        let (to_guest, from_guest, mut far) = guest();
        let answer = tokio::spawn(async move {
            far.typed.recv().await.unwrap();
            tokio::time::sleep(Duration::from_millis(900)).await;
            far.say(Output::Data(b"answer".to_vec())).await;
            far
        });
        let mut shown = Vec::new();
        let end = run(
            to_guest,
            from_guest,
            typed(&[b"ls\n"]),
            &mut shown,
            OnInputEof::Detach,
        )
        .await
        .unwrap();
        assert!(matches!(end, SessionEnd::Detached), "{end:?}");
        assert_eq!(shown, b"answer");
        drop(answer.await);
    }

    #[tokio::test]
    async fn a_watcher_outlives_its_input_and_learns_the_end() {
        let (to_guest, from_guest, far) = guest();
        far.say(Output::Data(b"bye".to_vec())).await;
        far.say(Output::SkippedBytes(7)).await;
        far.say(Output::Ended(Ended::VmEnded.into())).await;
        let mut shown = Vec::new();
        let end = run(to_guest, from_guest, typed(&[]), &mut shown, OnInputEof::Watch)
            .await
            .unwrap();
        assert!(matches!(end, SessionEnd::VmEnded), "{end:?}");
        assert_eq!(shown, b"bye\r\n[7 bytes skipped: the terminal is too slow]\r\n");
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_does_not_read_can_still_be_left() {
        let (to_guest, from_guest, _far) = guest();
        let (sender, input) = mpsc::channel(8);
        sender.try_send(vec![b'a'; MAX_PENDING_INPUT / 2]).unwrap();
        sender.try_send(vec![b'b'; MAX_MESSAGE]).unwrap();
        let escape = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            sender.send(vec![ESCAPE]).await.unwrap();
        };
        let session = run(to_guest, from_guest, input, Vec::new(), OnInputEof::Watch);
        let (end, ()) = tokio::join!(tokio::time::timeout(Duration::from_secs(60), session), escape);
        assert!(matches!(end, Ok(Ok(SessionEnd::Detached))), "{end:?}");
    }

    #[tokio::test]
    async fn a_broken_connection_is_not_an_end_of_the_vm() {
        let (to_guest, from_guest, far) = guest();
        drop(far);
        let end = run(to_guest, from_guest, typed(&[]), Vec::new(), OnInputEof::Watch)
            .await
            .unwrap();
        assert!(matches!(end, SessionEnd::Lost(None)), "{end:?}");
    }
}
