//! The KVM device that VMs use.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// Default path of the KVM device.
pub const DEVICE: &str = "/dev/kvm";

/// `HUSK_KVM`: the device to use instead of [`DEVICE`]. It is not checked.
#[must_use]
pub fn chosen() -> Option<PathBuf> {
    std::env::var_os("HUSK_KVM")
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
}

/// Opens the [`chosen`] device, or else [`DEVICE`].
///
/// # Errors
/// The device does not exist, or this user may not open it.
pub fn open() -> Result<OwnedFd, KvmError> {
    let path = chosen().unwrap_or_else(|| DEVICE.into());
    let opened = File::options().read(true).write(true).open(&path);
    opened
        .map(OwnedFd::from)
        .map_err(|cause| KvmError { path, cause })
}

/// An error of opening the KVM device.
#[derive(Debug, thiserror::Error)]
#[error("no access to KVM: {}{}: {cause}: {}", self.variable(), path.display(), self.hint())]
pub struct KvmError {
    /// Path of the device.
    pub path: PathBuf,
    /// The cause. It is part of the text, before the hint.
    pub cause: io::Error,
}

impl KvmError {
    fn variable(&self) -> &'static str {
        if chosen().is_some() { "HUSK_KVM=" } else { "" }
    }

    fn hint(&self) -> &'static str {
        match self.cause.kind() {
            io::ErrorKind::PermissionDenied => "add this user to the group that owns it and log in again",
            _ if chosen().is_some() => "set it to a KVM device, or leave it out",
            _ => "run `husk doctor` to see what is missing",
        }
    }
}
