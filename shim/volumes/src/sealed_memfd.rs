//! Small read-only disks in memory.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// Creates a sealed memfd, whose content cannot change any more.
pub(super) fn create(name: &str, content: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create(
        name,
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?);
    file.write_all(content)?;
    fcntl_add_seals(
        &file,
        SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL,
    )?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn sealed_content_cannot_be_changed() {
        let file = File::from(create("test", b"content").unwrap());
        let mut read = [0; 7];
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(&read, b"content");
        assert!(file.write_all_at(b"x", 0).is_err());
        assert!(file.set_len(0).is_err());
    }
}
