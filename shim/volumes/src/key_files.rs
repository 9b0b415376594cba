//! Directories with one file per key of a ConfigMap, Secret or similar, as the kubelet mounts them: each key is a
//! symbolic link into a hidden directory. No link may lead out of the directory.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, OFlags};

use super::error::VolumeFault;
use super::path_handle::PathHandle;

/// Limit for all files of a directory, in bytes. The API server accepts objects of 1 MiB.
const MAX_BYTES: u64 = 4 << 20;
/// Limit for the number of files and directories.
const MAX_FILES: usize = 1024;
/// Limit for nested directories.
const MAX_DEPTH: usize = 8;

/// Reads all files of a directory: relative paths, sorted, and content.
pub(super) fn read_all(dir: &Path) -> Result<Vec<(String, Vec<u8>)>, VolumeFault> {
    let mut reading = KeyReader {
        files: Vec::new(),
        entries: 0,
        bytes: 0,
        top: dir,
    };
    let found = directory(dir)?;
    reading.folder(&found, "", MAX_DEPTH)?;
    reading.files.sort();
    Ok(reading.files)
}

/// Reads the file of the first key that exists.
pub(super) fn read_key(dir: &Path, keys: &[&str]) -> Result<Vec<u8>, VolumeFault> {
    let folder = directory(dir)?;
    for key in keys {
        match folder.within(Path::new(key)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            found => return read(&found.map_err(VolumeFault::io(dir.join(key)))?, MAX_BYTES, dir),
        }
    }
    Err(VolumeFault::NoKey {
        path: dir.to_owned(),
        keys: keys.join(" or "),
    })
}

/// Reads the first of `files` that is a regular file: a value of one of `keys`.
pub(super) fn read_first(files: &[PathBuf], keys: &[&str]) -> Result<Vec<u8>, VolumeFault> {
    for path in files {
        let found = PathHandle::on_host(path).map_err(VolumeFault::io(path))?;
        if !found.is_directory() {
            return read(&found, MAX_BYTES, path);
        }
    }
    Err(VolumeFault::NoKey {
        path: files.first().cloned().unwrap_or_default(),
        keys: keys.join(" or "),
    })
}

fn directory(dir: &Path) -> Result<PathHandle, VolumeFault> {
    let found = PathHandle::on_host(dir).map_err(VolumeFault::io(dir))?;
    if found.is_directory() {
        return Ok(found);
    }
    Err(VolumeFault::WrongFileType {
        path: found.path,
        kind: found.kind,
        wanted: "a directory with a file for each key",
    })
}

struct KeyReader<'a> {
    files: Vec<(String, Vec<u8>)>,
    entries: usize,
    bytes: u64,
    top: &'a Path,
}

impl KeyReader<'_> {
    fn folder(&mut self, folder: &PathHandle, prefix: &str, depth: usize) -> Result<(), VolumeFault> {
        let too_much = || VolumeFault::TooManyFiles(self.top.to_owned());
        let depth = depth.checked_sub(1).ok_or_else(too_much)?;
        for name in folder.names().map_err(VolumeFault::io(&folder.path))? {
            let path = folder.path.join(&name);
            let Some(name) = name.to_str() else {
                return Err(VolumeFault::io(path)(std::io::Error::other(
                    "its name is not UTF-8",
                )));
            };
            // `..data` and the kubelet's hidden directories.
            if name.starts_with("..") {
                continue;
            }
            self.entries += 1;
            if self.entries > MAX_FILES {
                return Err(VolumeFault::TooManyFiles(self.top.to_owned()));
            }
            let found = folder.within(Path::new(name)).map_err(VolumeFault::io(&path))?;
            let key = format!("{prefix}{name}");
            if found.is_directory() {
                self.folder(&found, &format!("{key}/"), depth)?;
            } else {
                let content = read(&found, MAX_BYTES - self.bytes, self.top)?;
                self.bytes += content.len() as u64;
                self.files.push((key, content));
            }
        }
        Ok(())
    }
}

fn read(found: &PathHandle, most: u64, top: &Path) -> Result<Vec<u8>, VolumeFault> {
    if found.kind != FileType::RegularFile {
        return Err(VolumeFault::WrongFileType {
            path: found.path.clone(),
            kind: found.kind,
            wanted: "a regular file",
        });
    }
    let file = File::from(found.open(OFlags::RDONLY).map_err(VolumeFault::io(&found.path))?);
    let mut content = Vec::new();
    file.take(most + 1)
        .read_to_end(&mut content)
        .map_err(VolumeFault::io(&found.path))?;
    if content.len() as u64 > most {
        return Err(VolumeFault::TooManyFiles(PathBuf::from(top)));
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, Mode, mkfifoat};

    use super::*;

    /// A directory as the kubelet mounts it.
    fn mounted() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("..2026_01_01/sub")).unwrap();
        symlink("..2026_01_01", dir.path().join("..data")).unwrap();
        for (key, content) in [("token", "t"), ("userData", "#cloud-config\n"), ("sub/deep", "d")] {
            fs::write(dir.path().join("..2026_01_01").join(key), content).unwrap();
        }
        for key in ["token", "userData", "sub"] {
            symlink(format!("..data/{key}"), dir.path().join(key)).unwrap();
        }
        dir
    }

    #[test]
    fn keys_are_read_through_the_kubelets_links() {
        let dir = mounted();
        let text = |(key, content): (String, Vec<u8>)| (key, String::from_utf8(content).unwrap());
        let files: Vec<_> = read_all(dir.path()).unwrap().into_iter().map(text).collect();
        let wanted = [("sub/deep", "d"), ("token", "t"), ("userData", "#cloud-config\n")];
        assert_eq!(files, wanted.map(|(k, c)| (k.to_owned(), c.to_owned())));
        let data = read_key(dir.path(), &["userdata", "userData"]).unwrap();
        assert_eq!(data, b"#cloud-config\n");
        let error = read_key(dir.path(), &["networkdata", "networkData"])
            .unwrap_err()
            .to_string();
        let wanted = format!("{} has no file networkdata or networkData", dir.path().display());
        assert_eq!(error, wanted);
    }

    #[test]
    fn first_regular_file_has_the_value() {
        let dir = tempfile::tempdir().unwrap();
        let (missing, value) = (dir.path().join("0"), dir.path().join("1"));
        fs::create_dir(&missing).unwrap();
        fs::write(&value, "v").unwrap();
        let keys = ["userdata", "userData"];
        assert_eq!(read_first(&[missing.clone(), value], &keys).unwrap(), b"v");
        let error = read_first(&[missing], &keys).unwrap_err().to_string();
        assert!(error.ends_with("has no file userdata or userData"), "{error}");
    }

    #[test]
    fn hostile_directories_are_refused() {
        let refused = |make: &dyn Fn(&Path)| {
            let dir = mounted();
            make(dir.path());
            let error = read_all(dir.path()).unwrap_err().to_string();
            assert!(error.contains(dir.path().to_str().unwrap()), "{error}");
            error
        };
        let outside = |dir: &Path| symlink("/etc/hostname", dir.join("a")).unwrap();
        refused(&outside);
        let up = |dir: &Path| symlink("../../../../../../etc/passwd", dir.join("a")).unwrap();
        refused(&up);
        let magic = |dir: &Path| symlink("/proc/self/root/etc/passwd", dir.join("a")).unwrap();
        refused(&magic);
        let around = |dir: &Path| symlink(".", dir.join("a")).unwrap();
        assert!(refused(&around).contains("too large"));
        let fifo = |dir: &Path| mkfifoat(CWD, dir.join("a"), Mode::RUSR | Mode::WUSR).unwrap();
        assert!(refused(&fifo).contains("is a FIFO, not a regular file"));
        let huge = |dir: &Path| {
            let file = File::create(dir.join("a")).unwrap();
            file.set_len(1 << 40).unwrap();
        };
        assert!(refused(&huge).contains("too large"));
        let many = |dir: &Path| (0..=MAX_FILES).for_each(|n| fs::write(dir.join(n.to_string()), "").unwrap());
        assert!(refused(&many).contains("too large"));
    }
}
