//! The guest's console output in a file of bounded size.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use tracing::{info, warn};

/// Maximum size of a log, in bytes. A full log becomes the previous one, and a new one is started.
const LOG_BYTES: u64 = 4 << 20;

/// The log, and the previous one with `.1` appended to its name.
#[derive(Debug)]
pub(super) struct Log {
    path: PathBuf,
    limit: u64,
    /// The open file and its length.
    file: Option<(File, u64)>,
    failing: bool,
}

impl Log {
    pub(super) fn new(path: PathBuf) -> Log {
        Log {
            path,
            limit: LOG_BYTES,
            file: None,
            failing: false,
        }
    }

    /// Appends `data`. On an error the rest is lost. A warning is logged once until a write succeeds.
    pub(super) fn append(&mut self, data: &[u8]) {
        match self.try_append(data) {
            Ok(()) if self.failing => {
                self.failing = false;
                info!(log = %self.path.display(), "console output is kept again");
            }
            Err(error) if !self.failing => {
                self.failing = true;
                warn!(log = %self.path.display(), %error, "console output is not kept");
            }
            _ => {}
        }
    }

    fn try_append(&mut self, data: &[u8]) -> io::Result<()> {
        let (mut file, length) = match self.file.take() {
            Some((_, length)) if length >= self.limit => {
                std::fs::rename(&self.path, before(&self.path))?;
                (open(&self.path)?, 0)
            }
            Some(open) => open,
            None => (open(&self.path)?, 0),
        };
        let written = file.write_all(data);
        self.file = Some((file, length + data.len() as u64));
        written
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
}

fn before(path: &Path) -> PathBuf {
    let mut before = OsString::from(path);
    before.push(".1");
    before.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_rotates_within_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut log = Log {
            limit: 100,
            ..Log::new(path.clone())
        };
        for n in 0..100u8 {
            log.append(&[b'a' + n / 10; 30]);
        }
        let (now, before) = (
            std::fs::read(&path).unwrap(),
            std::fs::read(before(&path)).unwrap(),
        );
        assert!(now.len() <= 120 && before.len() == 120);
        assert_eq!(now.last(), Some(&(b'a' + 9)));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn full_disk_is_tolerated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let mut log = Log::new(path.clone());
        log.append(b"lost");
        assert!(log.failing);
        // O_NOFOLLOW refuses the link. A full device behaves the same.
        log.file = Some((OpenOptions::new().write(true).open("/dev/full").unwrap(), 0));
        log.append(b"lost too");
        assert!(log.failing);
        std::fs::remove_file(&path).unwrap();
        log.file = None;
        log.append(b"kept");
        assert!(!log.failing);
        assert_eq!(std::fs::read(&path).unwrap(), b"kept");
    }
}
