//! Checksums of what a server sends.

use husk_images::{Checksum, ChecksumAlgorithm};
use sha2::digest::DynDigest;

use crate::volume::VolumeError;

/// The checksum of the bytes so far, and what it has to be in the end.
pub struct RunningChecksum {
    state: Box<dyn DynDigest>,
    wanted: Checksum,
}

impl RunningChecksum {
    pub fn new(wanted: &Checksum) -> RunningChecksum {
        let state: Box<dyn DynDigest> = match wanted.algorithm {
            ChecksumAlgorithm::Md5 => Box::new(md5::Md5::default()),
            ChecksumAlgorithm::Sha1 => Box::new(sha1::Sha1::default()),
            ChecksumAlgorithm::Sha256 => Box::new(sha2::Sha256::default()),
            ChecksumAlgorithm::Sha512 => Box::new(sha2::Sha512::default()),
        };
        RunningChecksum {
            state,
            wanted: wanted.clone(),
        }
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.state.update(bytes);
    }

    pub fn restart(&mut self) {
        self.state.reset();
    }

    /// Compares the checksum.
    ///
    /// # Errors
    /// It is another one.
    pub fn check(&self) -> Result<(), VolumeError> {
        let found = hex(&self.state.clone().finalize());
        if found.eq_ignore_ascii_case(&self.wanted.digest) {
            return Ok(());
        }
        Err(VolumeError::Checksum {
            algorithm: self.wanted.algorithm,
            given: self.wanted.digest.clone(),
            found,
        })
    }
}

/// In hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
