//! A guest's serial line, to write to and to read from.

use crate::monitor;
use anyhow::{Context, Result, bail};
use husk_proto::shim::v1::console_output::Output;
use husk_proto::shim::v1::{ConsoleInput, ConsoleOutput};
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Builder;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use xtask::serial::Serial;

/// Time after which a question is repeated: a guest that is not restored yet loses it.
const AGAIN: Duration = Duration::from_millis(10);
/// Maximum time until a monitor opens its console.
const OPENS: Duration = Duration::from_secs(10);

/// The serial line of a guest that runs `husk-answers`.
#[derive(Debug)]
pub struct Line {
    stream: UnixStream,
    serial: Serial,
}

impl Line {
    /// The line behind a socket of QEMU.
    pub fn socket(path: &Path) -> Result<Self> {
        Self::over(UnixStream::connect(path).with_context(|| format!("cannot reach {}", path.display()))?)
    }

    /// The line behind Husk's monitor.
    pub fn monitor(path: &Path) -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (to_guest, inputs) = mpsc::channel(1);
        let opening = async {
            let mut client = monitor::connect(path).await?;
            let opened = client.console(ReceiverStream::new(inputs)).await;
            anyhow::Ok(opened.context("Console")?.into_inner())
        };
        let from_guest = runtime
            .block_on(async { tokio::time::timeout(OPENS, opening).await })
            .context("the monitor does not open the console")??;
        let (ours, theirs) = UnixStream::pair()?;
        theirs.set_nonblocking(true)?;
        std::thread::spawn(move || runtime.block_on(carry(theirs, to_guest, from_guest)));
        Self::over(ours)
    }

    fn over(stream: UnixStream) -> Result<Self> {
        let serial = Serial::watch(stream.try_clone()?);
        Ok(Self { stream, serial })
    }

    /// Waits until the guest prints `words`.
    pub fn until(&mut self, words: &str, deadline: Instant) -> Result<Instant> {
        self.serial.wait_for(words, deadline)
    }

    /// Asks the guest until it answers; returns the time of the first answer.
    pub fn answered(&mut self, deadline: Instant) -> Result<Instant> {
        loop {
            self.stream.write_all(b"?").context("the serial line is closed")?;
            let pause = (Instant::now() + AGAIN).min(deadline);
            if let Some((_, when)) = self.serial.poll(&["!"], pause)? {
                return Ok(when);
            }
            if Instant::now() >= deadline {
                bail!("the guest did not answer in time");
            }
        }
    }

    /// Makes the guest write to more memory, and waits for it.
    pub fn touched(&mut self, deadline: Instant) -> Result<Instant> {
        self.stream.write_all(b"+").context("the serial line is closed")?;
        self.serial.wait_for("=", deadline)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        // The thread that reads has a descriptor of its own.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Copies between a stream and a session of a monitor's console until either ends.
async fn carry(
    stream: UnixStream,
    to_guest: mpsc::Sender<ConsoleInput>,
    mut from_guest: Streaming<ConsoleOutput>,
) {
    let Ok(mut stream) = tokio::net::UnixStream::from_std(stream) else {
        return;
    };
    let mut buffer = [0; 64];
    loop {
        let carried = tokio::select! {
            read = stream.read(&mut buffer) => match read {
                Ok(count @ 1..) => to_guest.send(ConsoleInput { data: buffer[..count].to_vec() }).await.is_ok(),
                _ => false,
            },
            message = from_guest.message() => match message {
                Ok(Some(ConsoleOutput { output: Some(Output::Data(data)) })) => stream.write_all(&data).await.is_ok(),
                Ok(Some(ConsoleOutput { output: Some(Output::SkippedBytes(_)) })) => true,
                _ => false,
            },
        };
        if !carried {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn questions_are_repeated_until_an_answer_comes() {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        let guest = std::thread::spawn(move || {
            let mut questions = [0; 3];
            theirs.read_exact(&mut questions).expect("three questions");
            theirs.write_all(b"noise!").expect("answered");
            let mut all = Vec::new();
            theirs.read_to_end(&mut all).expect("the end");
            (questions, all)
        });
        let mut line = Line::over(ours).expect("a line");
        let began = Instant::now();
        let when = line.answered(soon()).expect("answered");
        assert!(when - began >= 2 * AGAIN);
        drop(line);
        let (questions, rest) = guest.join().expect("a guest");
        assert_eq!(&questions, b"???");
        assert!(rest.iter().all(|byte| *byte == b'?'));
    }

    #[test]
    fn a_guest_that_ends_is_an_error() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let mut line = Line::over(ours).expect("a line");
        assert!(line.until("ready;", Instant::now()).is_err());
        drop(theirs);
        assert!(line.answered(soon()).is_err());
        assert!(line.touched(soon()).is_err());
    }
}
