//! The monitor's standard streams: configuration, report and log.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};
use rustix::stdio::{dup2_stderr, dup2_stdin, stderr};
use serde::Serialize;

use crate::launch::MonitorConfig;

/// Maximum size of the configuration, in bytes. No API server accepts a manifest as large.
const CONFIG_BYTES: u64 = 64 << 20;
/// Maximum size of a log, in bytes. A full log becomes `monitor.log.1`, and a new one is started.
const LOG_BYTES: i64 = 4 << 20;
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// Reads the configuration from standard input, and replaces that with /dev/null.
pub(super) fn read_config() -> io::Result<MonitorConfig> {
    let mut text = Vec::new();
    io::stdin().lock().take(CONFIG_BYTES).read_to_end(&mut text)?;
    dup2_stdin(File::open("/dev/null")?)?;
    serde_json::from_slice(&text).map_err(io::Error::from)
}

/// Raises the limit of open files. A VM may have a thousand disks.
pub(super) fn raise_file_limit() {
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    // With fewer, opening a file fails later.
    let _ = setrlimit(Resource::Nofile, files);
}

/// Redirects standard error, and so the log, to a file.
pub(super) fn log_to(path: &Path) -> io::Result<()> {
    Ok(dup2_stderr(private(path, true)?)?)
}

/// Starts a new log whenever the present one is full.
pub(super) async fn keep_bounded(path: &Path) -> Infallible {
    let mut before = OsString::from(path);
    before.push(".1");
    loop {
        tokio::time::sleep(CHECK_EVERY).await;
        if rustix::fs::fstat(stderr()).is_ok_and(|log| log.st_size > LOG_BYTES) {
            // If this fails the log keeps growing, which is better than losing it.
            let _ = rotate(path, &before, log_to);
        }
    }
}

/// Renames a log and starts a new one by `start`.
fn rotate(path: &Path, before: &OsStr, start: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    match std::fs::rename(path, before) {
        // It was renamed earlier, but the new one could not be started.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        renamed => renamed?,
    }
    start(path)
}

/// Writes a file that other commands read.
pub(super) fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let mut file = BufWriter::new(private(path, false)?);
    serde_json::to_writer(&mut file, value)?;
    file.flush()
}

/// Replaces such a file atomically.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_was_renamed_only_is_started_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("monitor.log");
        let before = folder.path().join("monitor.log.1");
        std::fs::write(&path, "old").unwrap();
        let full = |_: &Path| Err(io::Error::other("too many open files"));
        rotate(&path, before.as_os_str(), full).unwrap_err();
        rotate(&path, before.as_os_str(), |path| std::fs::write(path, "new")).unwrap();
        let read = |path| std::fs::read_to_string(path).unwrap();
        assert_eq!((read(&path), read(&before)), ("new".to_owned(), "old".to_owned()));
    }
}
