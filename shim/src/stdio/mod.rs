//! A VM's serial console as the standard streams of its container.
//!
//! FIFOs are opened for reading and writing. So they neither end nor break when the other end closes, as on a restart
//! of containerd.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use husk_monitor::console::{Console, Session, SessionInput};
use husk_proto::shim::v1::console_output::Output;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;
use tracing::{debug, info, warn};

/// Maximum time for the last output to be read after the end of the VM.
const DRAIN: Duration = Duration::from_secs(5);
/// Size of the input buffer.
const TYPED: usize = 4096;

/// Paths of the standard streams. Empty if there is none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Stdio {
    pub(crate) stdin: String,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) terminal: bool,
}

/// The destination of output.
#[derive(Debug)]
enum Sink {
    Pipe(pipe::Sender),
    File(Arc<File>),
    Nowhere,
}

/// Open standard streams.
#[derive(Debug)]
pub(crate) struct OpenStdio {
    stdin: Option<pipe::Receiver>,
    stdout: Sink,
    stderr: Sink,
}

/// The open streams of a running VM.
#[derive(Debug)]
pub(crate) struct Streams {
    /// Copies output. Returns the sink for the last message.
    output: Option<JoinHandle<Sink>>,
    /// Sink for the reason of a failure, if it is not standard output.
    stderr: Sink,
    typing: Option<JoinHandle<()>>,
    /// Ends the copying of input.
    close: Option<oneshot::Sender<()>>,
    /// Ends the copying of output.
    end: Option<oneshot::Sender<()>>,
}

impl Stdio {
    /// Connects the streams to a console. Its earlier output is included.
    pub(crate) async fn connect(&self, console: Option<&Console>) -> io::Result<Streams> {
        let OpenStdio {
            stdin,
            stdout,
            stderr,
        } = self.open()?;
        let session = match console {
            Some(console) => console.mirror().await.ok(),
            None => None,
        };
        let Some(Session { output, input }) = session else {
            return Ok(Streams {
                output: None,
                stderr: stdout.or(stderr),
                typing: None,
                close: None,
                end: None,
            });
        };
        let (close, closed) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        Ok(Streams {
            output: Some(tokio::spawn(copy(output, stdout, ended))),
            typing: stdin.map(|stdin| tokio::spawn(type_in(stdin, input, closed))),
            stderr,
            close: Some(close),
            end: Some(end),
        })
    }
}

impl Stdio {
    /// Opens the streams. The other end of a FIFO waits until then.
    pub(crate) fn open(&self) -> io::Result<OpenStdio> {
        let stdin = match self.stdin.as_str() {
            "" => None,
            path => Some(
                pipe::OpenOptions::new()
                    .read_write(true)
                    .open_receiver(path)
                    .map_err(naming(path))?,
            ),
        };
        Ok(OpenStdio {
            stdin,
            stdout: Sink::open(&self.stdout)?,
            stderr: Sink::open(&self.stderr)?,
        })
    }
}

impl OpenStdio {
    /// Writes the output of a process, and closes its streams. Without a standard error, both go to standard output.
    pub(crate) async fn print(mut self, stdout: &[u8], stderr: &str) {
        let (out, err) = (&mut self.stdout, &mut self.stderr);
        let written = timeout(DRAIN, async {
            out.write(stdout).await?;
            let err = if matches!(err, Sink::Nowhere) { out } else { err };
            err.write(stderr.as_bytes()).await
        });
        let _ = written.await;
    }
}

/// Adds the name of the stream to an error.
fn naming(stream: &str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{stream}: {error}"))
}

impl Streams {
    /// Closes the input. What was written to it before still reaches the guest.
    pub(crate) fn close_stdin(&mut self) {
        self.close = None;
    }

    /// Writes the last output of the VM that has ended, and then the reason of its failure.
    pub(crate) async fn end(mut self, last_words: Option<String>) {
        if let Some(typing) = self.typing.take() {
            typing.abort();
        }
        let mut stdout = Sink::Nowhere;
        if let Some(mut output) = self.output.take() {
            let drained = timeout(DRAIN, &mut output).await;
            if drained.is_err() {
                warn!("nobody reads the container's output; the rest of it is lost");
                output.abort();
            }
            drop(self.end.take());
            stdout = drained.ok().and_then(Result::ok).unwrap_or(Sink::Nowhere);
        }
        if let Some(words) = last_words {
            let line = format!("husk: {words}\r\n");
            let mut sink = self.stderr.or(stdout);
            let _ = timeout(DRAIN, sink.write(line.as_bytes())).await;
        }
    }
}

/// Returns the path of an output stream; empty if there is none.
pub(crate) fn output_path(name: &str) -> io::Result<&Path> {
    match name.split_once("://") {
        None => Ok(Path::new(name)),
        Some(("fifo", path) | ("file", path)) => Ok(Path::new(path)),
        Some((scheme, _)) => {
            let text = format!("output to {scheme}:// is not supported: give a FIFO or file://");
            Err(io::Error::new(io::ErrorKind::Unsupported, text))
        }
    }
}

impl Sink {
    fn open(name: &str) -> io::Result<Sink> {
        let path = output_path(name)?;
        if path.as_os_str().is_empty() {
            return Ok(Sink::Nowhere);
        }
        match is_fifo(path) {
            true => Ok(Sink::Pipe(
                pipe::OpenOptions::new()
                    .read_write(true)
                    .open_sender(path)
                    .map_err(naming(name))?,
            )),
            false => {
                let file = File::options().create(true).append(true).open(path);
                Ok(Sink::File(Arc::new(file.map_err(naming(name))?)))
            }
        }
    }

    fn or(self, other: Sink) -> Sink {
        match self {
            Sink::Nowhere => other,
            sink => sink,
        }
    }

    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Sink::Pipe(pipe) => pipe.write_all(bytes).await,
            Sink::File(file) => {
                // A disk that stalls must not stop the only thread of the runtime.
                let (file, bytes) = (file.clone(), bytes.to_vec());
                let written = spawn_blocking(move || (&*file).write_all(&bytes)).await;
                written.unwrap_or_else(|error| Err(io::Error::other(error)))
            }
            Sink::Nowhere => Ok(()),
        }
    }
}

fn is_fifo(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_fifo())
}

/// Copies output until the console closes. A slow reader makes the console skip output, but not wait. A file that
/// cannot be written, as on a full disk, loses output until it can.
async fn copy(
    mut output: tokio::sync::mpsc::Receiver<husk_proto::shim::v1::ConsoleOutput>,
    mut sink: Sink,
    mut ended: oneshot::Receiver<()>,
) -> Sink {
    let mut lost = 0;
    loop {
        let received = tokio::select! {
            received = output.recv() => received,
            _ = &mut ended => None,
        };
        let bytes = match received.and_then(|received| received.output) {
            Some(Output::Data(data)) => data,
            Some(Output::SkippedBytes(bytes)) => {
                format!("\r\n[husk: {bytes} bytes of console output were not read in time]\r\n").into_bytes()
            }
            Some(Output::Ended(_)) | None => return sink,
        };
        match sink.write(&bytes).await {
            Ok(()) if lost > 0 => {
                info!("the container's output is written again; {lost} bytes of it are lost");
                lost = 0;
            }
            Ok(()) => {}
            Err(error) if matches!(sink, Sink::File(_)) => {
                if lost == 0 {
                    warn!(%error, "the container's output cannot be written");
                }
                lost += bytes.len();
            }
            Err(error) => {
                debug!(%error, "the container's output cannot be written");
                sink = Sink::Nowhere;
            }
        }
    }
}

/// Copies input until it is closed, and then what the FIFO still has.
async fn type_in(mut stdin: pipe::Receiver, guest: SessionInput, mut closed: oneshot::Receiver<()>) {
    let mut typed = vec![0; TYPED];
    loop {
        let read = tokio::select! {
            read = stdin.read(&mut typed) => read,
            _ = &mut closed => break,
        };
        match read {
            Ok(length @ 1..) if guest.send(typed[..length].to_vec()).await.is_ok() => {}
            _ => return,
        }
    }
    // The FIFO is open for writing here too, so it has no end: the input ends when the FIFO is empty.
    while let Ok(length @ 1..) = rustix::io::read(&stdin, &mut typed) {
        if guest.send(typed[..length].to_vec()).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
