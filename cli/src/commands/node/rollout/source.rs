//! The programs beside this one, which are to be installed. They stay open when the root directory changes.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use sha2::{Digest, Sha256};

use super::super::PROGRAMS;
use crate::failure::Failure;

/// Bytes of the hash in a version.
const HASH_BYTES: usize = 6;

/// The directory of the programs.
#[derive(Debug)]
pub(super) struct Source {
    path: PathBuf,
    dir: OwnedFd,
}

impl Source {
    /// The directory of this program.
    pub(super) fn own() -> Result<Source, Failure> {
        let own = std::env::current_exe().map_err(Failure::at("find this program"))?;
        Source::open_at(own.parent().unwrap_or(Path::new("/")))
    }

    /// The directory at `path`, which has all programs.
    pub(super) fn open_at(path: &Path) -> Result<Source, Failure> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(path, flags, Mode::empty());
        let source = Source {
            path: path.to_owned(),
            dir: dir.map_err(Failure::at(path.display().to_string()))?,
        };
        for program in PROGRAMS {
            source.open(program)?;
        }
        Ok(source)
    }

    /// Opens a program.
    pub(super) fn open(&self, program: &str) -> Result<File, Failure> {
        let opened = rustix::fs::openat(
            &self.dir,
            program,
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        );
        opened.map(File::from).map_err(|error| {
            let path = self.path.join(program);
            Failure::Runtime(format!(
                "{}: {}: {program} must be in the same directory as husk",
                path.display(),
                crate::failure::chain(&error)
            ))
        })
    }

    /// The version of the programs: that of the source, and a hash, so that two builds never share a directory.
    pub(super) fn version(&self) -> Result<String, Failure> {
        let mut hash = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        for program in PROGRAMS {
            let mut file = self.open(program)?;
            let length = file.metadata().map_err(Failure::at(program))?.len();
            hash.update(length.to_le_bytes());
            loop {
                match file.read(&mut buffer).map_err(Failure::at(program))? {
                    0 => break,
                    read => hash.update(&buffer[..read]),
                }
            }
        }
        let hash = hash.finalize();
        let digits: String = hash[..HASH_BYTES]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        Ok(format!("{}-{digits}", env!("CARGO_PKG_VERSION")))
    }
}
