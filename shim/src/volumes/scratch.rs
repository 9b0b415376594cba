//! Files that live as long as the VM that has them open.
//!
//! They never have a name, so they vanish with the VMM however it ends. They lie in a directory on disk: the runtime
//! directory is usually memory.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ioctl_ficlone, open};
use rustix::io::Errno;

use super::error::Fault;
use super::sparse::SparseWriter;

/// Bytes copied at a time, between two words on how far the copy is.
const CHUNK: u64 = 16 << 20;

/// Where the files of VMs that keep nothing lie.
#[derive(Debug, Clone)]
pub struct Scratch {
    directory: PathBuf,
    /// By `HUSK_SCRATCH_DIR`.
    chosen: bool,
}

impl Scratch {
    /// `HUSK_SCRATCH_DIR`, else `/var/tmp`.
    #[must_use]
    pub fn locate() -> Scratch {
        let set = std::env::var_os("HUSK_SCRATCH_DIR").filter(|value| !value.is_empty());
        Scratch {
            chosen: set.is_some(),
            directory: set.map_or_else(|| "/var/tmp".into(), PathBuf::from),
        }
    }

    /// A given directory.
    pub fn at(directory: impl Into<PathBuf>) -> Scratch {
        Scratch {
            directory: directory.into(),
            chosen: false,
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.directory
    }

    /// An empty file.
    pub(super) fn file(&self) -> Result<File, Fault> {
        self.nameless().map(File::from).map_err(self.fault())
    }

    /// A sparse file of that many zero bytes.
    pub(super) fn sparse(&self, bytes: u64) -> Result<OwnedFd, Fault> {
        let file = self.file()?;
        file.set_len(bytes).map_err(self.fault())?;
        Ok(file.into())
    }

    /// A copy of `image`, sharing its blocks where the file system can, else sparse, which takes time: `tell` is told
    /// the bytes done and all there are.
    pub(super) fn copy(&self, image: &File, tell: &dyn Fn(u64, u64)) -> Result<OwnedFd, Fault> {
        let copy = self.file()?;
        if ioctl_ficlone(&copy, image).is_err() {
            copy_sparse(image, &copy, tell).map_err(self.fault())?;
        }
        Ok(copy.into())
    }

    fn fault(&self) -> impl FnOnce(io::Error) -> Fault {
        let (directory, chosen) = (self.directory.clone(), self.chosen);
        move |cause| Fault::Scratch {
            directory,
            chosen,
            cause,
        }
    }

    fn nameless(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::EXCL | OFlags::CLOEXEC;
        match open(&self.directory, flags, Mode::RUSR | Mode::WUSR) {
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => self.unlinked(),
            other => Ok(other?),
        }
    }

    /// For file systems that have no nameless files.
    fn unlinked(&self) -> io::Result<OwnedFd> {
        let path = self.directory.join(format!(".husk-{}", uuid::Uuid::new_v4()));
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let fd = open(&path, flags, Mode::RUSR | Mode::WUSR)?;
        std::fs::remove_file(&path)?;
        Ok(fd)
    }
}

/// Copies the parts of `from` that hold data.
fn copy_sparse(from: &File, to: &File, tell: &dyn Fn(u64, u64)) -> io::Result<()> {
    use rustix::fs::{SeekFrom, seek};
    let size = seek(from, SeekFrom::End(0))?;
    to.set_len(size)?;
    match seek(from, SeekFrom::Data(0)) {
        // Block devices do not tell where they hold data.
        Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOTTY) => copy_nonzero(from, to, size, tell),
        _ => copy_extents(from, to, size, tell),
    }
}

fn copy_extents(mut from: &File, mut to: &File, size: u64, tell: &dyn Fn(u64, u64)) -> io::Result<()> {
    use rustix::fs::{SeekFrom, seek};
    let mut offset = 0;
    while offset < size {
        let start = match seek(from, SeekFrom::Data(offset)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        };
        tell(start, size);
        offset = seek(from, SeekFrom::Hole(start))?.min(start + CHUNK);
        seek(from, SeekFrom::Start(start))?;
        seek(to, SeekFrom::Start(start))?;
        if io::copy(&mut Read::by_ref(&mut from).take(offset - start), &mut to)? < offset - start {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

fn copy_nonzero(mut from: &File, to: &File, size: u64, tell: &dyn Fn(u64, u64)) -> io::Result<()> {
    rustix::fs::seek(from, rustix::fs::SeekFrom::Start(0))?;
    let mut writer = SparseWriter::new(to, u64::MAX);
    let mut buffer = vec![0; 1 << 20];
    let mut done = 0;
    while done < size {
        if done % CHUNK == 0 {
            tell(done, size);
        }
        let length = buffer
            .len()
            .min(usize::try_from(size - done).unwrap_or(usize::MAX));
        from.read_exact(&mut buffer[..length])?;
        writer.write_all(&buffer[..length])?;
        done += length as u64;
    }
    writer.finish().map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn a_copy_is_equal_sparse_and_leaves_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let scratch = Scratch::at(dir.path());
        let image = File::from(scratch.sparse(64 << 20).unwrap());
        image.write_all_at(b"head", 0).unwrap();
        image.write_all_at(b"middle", 40 << 20).unwrap();
        let copy = dir.path().join("copy");
        let target = File::create_new(&copy).unwrap();
        let told = std::cell::RefCell::new(Vec::new());
        copy_sparse(&image, &target, &|done, size| {
            told.borrow_mut().push((done, size))
        })
        .unwrap();
        assert_eq!(told.into_inner(), [(0, 64 << 20), (40 << 20, 64 << 20)]);
        let copy = File::open(&copy).unwrap();
        let mut bytes = [0; 6];
        copy.read_exact_at(&mut bytes, 40 << 20).unwrap();
        assert_eq!(&bytes, b"middle");
        assert_eq!(copy.metadata().unwrap().len(), 64 << 20);
        assert!(copy.metadata().unwrap().blocks() * 512 < 1 << 20);

        let target = tempfile::tempfile().unwrap();
        copy_nonzero(&image, &target, 64 << 20, &|_, _| {}).unwrap();
        target.read_exact_at(&mut bytes, 40 << 20).unwrap();
        assert_eq!((&bytes, target.metadata().unwrap().len()), (b"middle", 64 << 20));
        assert!(target.metadata().unwrap().blocks() * 512 < 1 << 20);

        let copy = File::from(scratch.copy(&image, &|_, _| {}).unwrap());
        copy.read_exact_at(&mut bytes[..4], 0).unwrap();
        assert_eq!(&bytes[..4], b"head");
        copy.write_all_at(b"HEAD", 0).unwrap();
        image.read_exact_at(&mut bytes[..4], 0).unwrap();
        assert_eq!(&bytes[..4], b"head");
        let unlinked = File::from(scratch.unlinked().unwrap());
        assert_eq!(unlinked.metadata().unwrap().nlink(), 0);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
