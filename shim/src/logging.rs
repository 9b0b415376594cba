//! The log of the shim, which containerd reads.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// A second destination of the log.
static COPY: Mutex<Option<File>> = Mutex::new(None);

/// Starts to log to the FIFO `log` of the bundle, or else to /dev/null.
pub(crate) fn begin(bundle: &Path, debug: bool) {
    let level = if debug { "debug" } else { "info" };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let log = open(&bundle.join("log")).or_else(|_| File::options().write(true).open("/dev/null"));
    let Ok(log) = log else { return };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(Log(Arc::new(log)))
        .init();
    // Standard error is /dev/null.
    std::panic::set_hook(Box::new(|panic| tracing::error!(%panic, "the shim failed")));
}

/// Also writes the log to `stdout`, the standard output of a launcher container. It shows what happens to the VM,
/// since the console is printed elsewhere.
pub(crate) fn copy_to(stdout: &Path) {
    let copy = open(stdout).or_else(|_| File::options().append(true).open(stdout));
    if let Ok(mut current) = COPY.lock() {
        *current = copy.ok();
    }
}

/// Ends what [`copy_to`] began.
pub(crate) fn end_copy() {
    if let Ok(mut current) = COPY.lock() {
        *current = None;
    }
}

/// Opened for reading too: a write to a FIFO without a reader fails, and containerd may be restarted.
fn open(path: &Path) -> io::Result<File> {
    let log = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    match log.metadata()?.file_type().is_fifo() {
        true => Ok(log),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
}

#[derive(Debug, Clone)]
struct Log(Arc<File>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Ok(mut copy) = COPY.lock()
            && let Some(copy) = &mut *copy
        {
            let _ = copy.write(bytes);
        }
        match (&*self.0).write(bytes) {
            // Lines are lost while nobody reads them.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(bytes.len()),
            other => other,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Log;

    fn make_writer(&'a self) -> Log {
        self.clone()
    }
}
