//! Reader for a log file that its writer rotates to `NAME.1`.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const BUFFER: usize = 64 * 1024;

/// Reads a log, across rotation.
#[derive(Debug)]
pub(crate) struct LogFile {
    path: PathBuf,
    /// Files to read, in order; the last one may still grow.
    files: VecDeque<File>,
    buffer: Vec<u8>,
}

impl LogFile {
    /// Opens the log at `path` for reading from its beginning, or from its last `tail` lines.
    ///
    /// # Errors
    /// A file cannot be read. A log that does not exist yet is empty.
    pub(crate) fn open(path: &Path, tail: Option<u64>) -> io::Result<Self> {
        let mut older = path.as_os_str().to_owned();
        older.push(".1");
        let mut files = VecDeque::new();
        for path in [Path::new(&older), path] {
            files.extend(existing(File::open(path))?);
        }
        if let Some(mut lines) = tail {
            let mut from = files.len();
            while from > 0 {
                from -= 1;
                if seek_to_tail(&mut files[from], &mut lines)? {
                    break;
                }
            }
            files.drain(..from);
        }
        Ok(Self {
            path: path.into(),
            files,
            buffer: vec![0; BUFFER],
        })
    }

    /// The next bytes, or `None` if there are none at present.
    pub(crate) fn read(&mut self) -> io::Result<Option<&[u8]>> {
        loop {
            if let Some(file) = self.files.front_mut() {
                let count = file.read(&mut self.buffer)?;
                if count > 0 {
                    return Ok(Some(&self.buffer[..count]));
                }
            }
            if self.files.len() > 1 {
                self.files.pop_front();
                continue;
            }
            // The file that was read to its end may have been renamed away since.
            let Some(current) = existing(File::open(&self.path))? else {
                return Ok(None);
            };
            let identity = |file: &File| file.metadata().map(|meta| (meta.dev(), meta.ino()));
            if let Some(file) = self.files.front()
                && identity(file)? == identity(&current)?
            {
                return Ok(None);
            }
            // The old file may have grown before it was renamed, so it is read once more first.
            self.files.push_back(current);
        }
    }
}

fn existing(file: io::Result<File>) -> io::Result<Option<File>> {
    match file {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        file => file.map(Some),
    }
}

/// Seeks to the beginning of the last `lines` lines of a file and returns true. If the file has fewer lines, seeks to
/// its beginning, subtracts its lines from `lines` and returns false.
fn seek_to_tail(file: &mut File, lines: &mut u64) -> io::Result<bool> {
    let mut end = file.seek(SeekFrom::End(0))?;
    if *lines == 0 {
        return Ok(true);
    }
    let mut block = vec![0; BUFFER];
    // The line end of the last line does not begin another.
    let mut last = true;
    let empty = end == 0;
    while end > 0 {
        let start = end.saturating_sub(BUFFER as u64);
        file.seek(SeekFrom::Start(start))?;
        // At most BUFFER, which fits.
        let length = (end - start) as usize;
        file.read_exact(&mut block[..length])?;
        for position in (0..length).rev() {
            if block[position] == b'\n' && !std::mem::take(&mut last) {
                *lines -= 1;
                if *lines == 0 {
                    file.seek(SeekFrom::Start(start + position as u64 + 1))?;
                    return Ok(true);
                }
            }
            last = false;
        }
        end = start;
    }
    file.seek(SeekFrom::Start(0))?;
    // The first line has no line end before it.
    *lines -= u64::from(!empty);
    Ok(*lines == 0)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;

    fn all(log: &mut LogFile) -> String {
        let mut text = Vec::new();
        while let Some(bytes) = log.read().unwrap() {
            text.extend_from_slice(bytes);
        }
        String::from_utf8(text).unwrap()
    }

    fn tail(text: &[u8], older: Option<&[u8]>, lines: u64) -> String {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("log");
        fs::write(&path, text).unwrap();
        if let Some(older) = older {
            fs::write(root.path().join("log.1"), older).unwrap();
        }
        all(&mut LogFile::open(&path, Some(lines)).unwrap())
    }

    #[test]
    fn the_last_lines_are_those_people_count() {
        assert_eq!(tail(b"a\nb\nc\n", None, 2), "b\nc\n");
        assert_eq!(tail(b"a\nb\nlogin: ", None, 2), "b\nlogin: ");
        assert_eq!(tail(b"a\nb\n", None, 0), "");
        assert_eq!(tail(b"a\nb\n", None, 99), "a\nb\n");
        assert_eq!(tail(b"", None, 3), "");
        assert_eq!(tail(b"\n\n", None, 1), "\n");
        let long = "x".repeat(3 * BUFFER);
        assert_eq!(
            tail(format!("a\n{long}\nb\n").as_bytes(), None, 2),
            format!("{long}\nb\n")
        );
    }

    #[test]
    fn the_last_lines_may_begin_in_the_older_file() {
        assert_eq!(tail(b"c\n", Some(b"a\nb\n"), 2), "b\nc\n");
        assert_eq!(tail(b"c\n", Some(b"a\nb\n"), 1), "c\n");
        assert_eq!(tail(b"c\n", Some(b"a\nb\n"), 9), "a\nb\nc\n");
    }

    #[test]
    fn a_log_is_followed_across_its_change_of_file() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("log");
        let mut log = LogFile::open(&path, None).unwrap();
        assert_eq!(all(&mut log), "");
        let mut file = File::create(&path).unwrap();
        file.write_all(b"one\n").unwrap();
        assert_eq!(all(&mut log), "one\n");
        file.write_all(b"two\n").unwrap();
        fs::rename(&path, root.path().join("log.1")).unwrap();
        fs::write(&path, b"three\n").unwrap();
        assert_eq!(all(&mut log), "two\nthree\n");
        fs::remove_file(&path).unwrap();
        assert_eq!(all(&mut log), "");
    }
}
