//! The KVM device: whoever starts VMs and whoever checks beforehand mean the same one.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// Where it is by default.
pub const DEVICE: &str = "/dev/kvm";

/// `HUSK_KVM`: a device to use instead of [`DEVICE`], whatever it can do.
#[must_use]
pub fn chosen() -> Option<PathBuf> {
    std::env::var_os("HUSK_KVM")
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
}

/// Opens the device, [`chosen`] or not.
///
/// # Errors
/// It is not there, or not for this user.
pub fn open() -> Result<OwnedFd, KvmError> {
    let path = chosen().unwrap_or_else(|| DEVICE.into());
    let opened = File::options().read(true).write(true).open(&path);
    opened
        .map(OwnedFd::from)
        .map_err(|cause| KvmError { path, cause })
}

/// KVM cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("no access to KVM: {}{}: {cause}: {}", self.variable(), path.display(), self.hint())]
pub struct KvmError {
    /// The device.
    pub path: PathBuf,
    /// Why; in the text already, before the way out.
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
