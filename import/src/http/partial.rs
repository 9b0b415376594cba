//! A download, which a later attempt or a later process may go on with.
//!
//! Beside the data a small file has what the server said of it: a part is only continued if the server can say that
//! the rest is of the same file (RFC 9110, 13.1.5), or if a checksum will show it.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};

use husk_images::HttpSource;
use reqwest::header::{ETAG, HeaderMap, LAST_MODIFIED};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::checksum::{RunningChecksum, hex};
use crate::volume::{Entry, ImportDirectory, VolumeError};

/// Longest validator that is kept, and longest file of them, in bytes.
const MAX_VALIDATOR: usize = 1 << 10;
const MAX_FILE: u64 = 16 << 10;
/// Read buffer, in bytes.
const BUFFER: usize = 128 << 10;

/// The validators of a file (RFC 9110, section 8.8), and its URL.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Validators {
    /// Hash of the URL, which may have secrets in it.
    url: String,
    /// The running kernel's id: data that a power cut may have lost is not continued.
    boot: String,
    /// A strong entity tag.
    etag: Option<String>,
    modified: Option<String>,
    /// Size of the whole file in bytes.
    pub size: Option<u64>,
}

impl Validators {
    /// Reads the validators of a reply.
    pub fn of(url: &str, headers: &HeaderMap, size: Option<u64>) -> Validators {
        let text = |name| {
            let value = headers.get(name)?.to_str().ok()?;
            (value.len() <= MAX_VALIDATOR).then(|| value.to_owned())
        };
        Validators {
            url: hex(&Sha256::digest(url)),
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default(),
            etag: text(ETAG).filter(|tag| tag.starts_with('"')),
            modified: text(LAST_MODIFIED),
            size,
        }
    }

    /// The value of `If-Range`.
    pub fn if_range(&self) -> Option<&str> {
        self.etag.as_deref().or(self.modified.as_deref())
    }

    /// True if they are of different versions of a file. A reply need not have both validators.
    pub fn conflict_with(&self, other: &Validators) -> bool {
        let differ = |one: &Option<String>, two: &Option<String>| match (one, two) {
            (Some(one), Some(two)) => Some(one != two),
            _ => None,
        };
        let sizes = self.size.zip(other.size).is_some_and(|(one, two)| one != two);
        let tags = differ(&self.etag, &other.etag);
        sizes
            || tags
                .or_else(|| differ(&self.modified, &other.modified))
                .unwrap_or(false)
    }

    /// True if both are of the same version of the same file.
    pub fn matches(&self, other: &Validators) -> bool {
        self.if_range().is_some() && self == other
    }
}

/// The file that is being fetched.
pub struct Partial<'a> {
    directory: &'a ImportDirectory,
    file: File,
    downloaded: u64,
    checksum: Option<RunningChecksum>,
    validators: Validators,
    /// Of an earlier attempt whose rest no validator has confirmed.
    pub is_unconfirmed: bool,
}

impl<'a> Partial<'a> {
    /// Opens what an earlier import left, if it may be continued, or begins a new one.
    ///
    /// # Errors
    /// The directory cannot be read or written.
    pub fn open(source: &HttpSource, directory: &'a ImportDirectory) -> Result<Partial<'a>, VolumeError> {
        let validators = read_validators(directory).unwrap_or_default();
        let mut partial = Partial {
            directory,
            file: directory.file(Entry::Download)?,
            downloaded: 0,
            checksum: source.checksum.as_ref().map(RunningChecksum::new),
            validators,
            is_unconfirmed: false,
        };
        let now = Validators::of(&source.url, &HeaderMap::new(), None);
        let saved = &partial.validators;
        let same = saved.url == now.url && saved.boot == now.boot && !saved.boot.is_empty();
        match same && (saved.if_range().is_some() || partial.checksum.is_some()) {
            true => partial.read_all()?,
            false => partial.restart(Validators::default())?,
        }
        Ok(partial)
    }

    /// Finds the length of what is there, and its checksum.
    fn read_all(&mut self) -> Result<(), VolumeError> {
        let path = self.directory.path(Entry::Download);
        self.downloaded = self.file.seek(SeekFrom::End(0)).map_err(VolumeError::io(&path))?;
        let Some(checksum) = &mut self.checksum else {
            return Ok(());
        };
        self.file.rewind().map_err(VolumeError::io(&path))?;
        let mut buffer = vec![0; BUFFER];
        loop {
            match self.file.read(&mut buffer).map_err(VolumeError::io(&path))? {
                0 => return Ok(()),
                read => checksum.update(&buffer[..read]),
            }
        }
    }

    /// Bytes of the file that were downloaded.
    pub fn downloaded(&self) -> u64 {
        self.downloaded
    }

    pub fn validators(&self) -> &Validators {
        &self.validators
    }

    /// True if the rest alone can be asked for.
    pub fn can_continue(&self) -> bool {
        self.downloaded > 0 && (self.validators.if_range().is_some() || self.checksum.is_some())
    }

    /// Forgets what is there, and keeps what the server says of what comes.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn restart(&mut self, validators: Validators) -> Result<(), VolumeError> {
        let path = self.directory.path(Entry::Download);
        self.file
            .set_len(0)
            .and_then(|()| self.file.rewind())
            .map_err(VolumeError::io(&path))?;
        self.downloaded = 0;
        self.is_unconfirmed = false;
        if let Some(checksum) = &mut self.checksum {
            checksum.restart();
        }
        self.describe(validators)
    }

    /// Keeps the size of the whole file.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn set_size(&mut self, size: Option<u64>) -> Result<(), VolumeError> {
        let validators = self.validators.clone();
        self.describe(Validators { size, ..validators })
    }

    /// Keeps what the server says.
    fn describe(&mut self, validators: Validators) -> Result<(), VolumeError> {
        let path = self.directory.path(Entry::Validators);
        let text = serde_json::to_vec(&validators).map_err(|error| VolumeError::io(&path)(error.into()))?;
        let mut file = self.directory.file(Entry::Validators)?;
        file.set_len(0)
            .and_then(|()| file.write_all(&text))
            .map_err(self.directory.full_or_io(&path))?;
        self.validators = validators;
        Ok(())
    }

    /// Appends what came.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), VolumeError> {
        let path = self.directory.path(Entry::Download);
        self.file
            .write_all(bytes)
            .map_err(self.directory.full_or_io(&path))?;
        self.downloaded += bytes.len() as u64;
        if let Some(checksum) = &mut self.checksum {
            checksum.update(bytes);
        }
        Ok(())
    }

    /// Compares the checksum, if the request has one.
    ///
    /// # Errors
    /// The checksum is another one than the request has.
    pub fn check(&self) -> Result<(), VolumeError> {
        self.checksum.as_ref().map_or(Ok(()), RunningChecksum::check)
    }
}

fn read_validators(directory: &ImportDirectory) -> Option<Validators> {
    let mut text = Vec::new();
    let file = File::open(directory.path(Entry::Validators)).ok()?;
    file.take(MAX_FILE).read_to_end(&mut text).ok()?;
    // Cut off by a kill: as if it were not there.
    serde_json::from_slice(&text).ok()
}
