//! The monitor's standard streams: configuration in, report out, log.

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};
use rustix::stdio::{dup2_stderr, dup2_stdin, stderr};
use serde::Serialize;

use crate::launch::MonitorConfig;

/// A manifest with its cloud-init data; more than any API server takes.
const CONFIG_BYTES: u64 = 64 << 20;
/// A log of this many bytes becomes `monitor.log.1`, and a new one is begun.
const LOG_BYTES: i64 = 4 << 20;
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// Reads all of standard input, which is empty from then on.
pub(super) fn read_config() -> io::Result<MonitorConfig> {
    let mut text = Vec::new();
    io::stdin().lock().take(CONFIG_BYTES).read_to_end(&mut text)?;
    dup2_stdin(File::open("/dev/null")?)?;
    serde_json::from_slice(&text).map_err(io::Error::from)
}

/// A VM may have a thousand disks, each a descriptor.
pub(super) fn raise_file_limit() {
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    // Fewer files is an error of its own when they run out.
    let _ = setrlimit(Resource::Nofile, files);
}

/// Standard error, and so the log, goes to this file from now on.
pub(super) fn log_to(path: &Path) -> io::Result<()> {
    Ok(dup2_stderr(private(path, true)?)?)
}

/// Begins a new log whenever the present one has grown large.
pub(super) async fn keep_bounded(path: &Path) -> Infallible {
    let mut before = OsString::from(path);
    before.push(".1");
    loop {
        tokio::time::sleep(CHECK_EVERY).await;
        if rustix::fs::fstat(stderr()).is_ok_and(|log| log.st_size > LOG_BYTES) {
            // Where this fails the log grows on, which is better than losing it.
            let _ = std::fs::rename(path, &before).and_then(|()| log_to(path));
        }
    }
}

/// Writes a file for the VM's other commands to read.
pub(super) fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let mut file = BufWriter::new(private(path, false)?);
    serde_json::to_writer(&mut file, value)?;
    file.flush()
}

/// The same in place of a file that may be read meanwhile.
pub(super) fn replace_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let mut new = OsString::from(path);
    new.push(".new");
    write_json(Path::new(&new), value)?;
    std::fs::rename(new, path)
}

fn private(path: &Path, append: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    if append {
        options.append(true);
    } else {
        options.write(true).truncate(true);
    }
    options.open(path)
}
