//! Errors of filling a volume: each is one line that says what to do.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use husk_images::ChecksumAlgorithm;

use crate::error::PullError;

/// Why a volume was not filled.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    #[error("the URL {url} cannot be used: {reason}")]
    Url { url: String, reason: String },
    #[error("the header {0:?} is invalid: correct `extraHeaders` or the Secret of `secretExtraHeaders`")]
    Header(String),
    #[error("a certificate is not PEM ({0}): correct the ConfigMap of `certConfigMap`")]
    Pem(String),
    #[error(
        "{url} does not let you read it (HTTP status {status}): name a Secret with accessKeyId and secretKey in `secretRef`, or correct it"
    )]
    Unauthorized { url: String, status: u16 },
    #[error("{url} does not exist (HTTP status {status}): correct the URL")]
    NotFound { url: String, status: u16 },
    #[error("{url} answered with HTTP status {status}")]
    Status { url: String, status: u16 },
    #[error("{url} is not available now (HTTP status {status}): try again later")]
    Unavailable {
        url: String,
        status: u16,
        /// When to ask again, if the server says it.
        after: Option<Duration>,
    },
    #[error("{url} asks to retry after {} s (HTTP status {status}): try again then", after.as_secs())]
    UnavailableForLong {
        url: String,
        status: u16,
        after: Duration,
    },
    #[error("cannot follow the redirect of {url}: {reason}; give the URL of the file itself")]
    Redirect { url: String, reason: String },
    #[error(
        "the certificate of {server} is not trusted: put its CA's certificate into a ConfigMap, and name that in `certConfigMap` ({reason})"
    )]
    Certificate { server: String, reason: String },
    #[error(
        "the certificate of {server} is that of a CA, not of a server: make one with `CA:FALSE`, or sign one with that CA"
    )]
    CaCertificate { server: String },
    #[error("cannot resolve {server}: correct the URL, or check the name servers")]
    UnknownHost { server: String },
    #[error("{server} cannot be reached: {reason}")]
    Unreachable { server: String, reason: String },
    #[error("the download of {url} failed repeatedly: {reason}; try again")]
    ConnectionLost { url: String, reason: String },
    #[error("the file has the {algorithm} checksum {found}, not {given}: correct `checksum` or the URL")]
    Checksum {
        algorithm: ChecksumAlgorithm,
        given: String,
        found: String,
    },
    #[error(
        "the disk has {needed} bytes, more than the {size} of the claim: request at least {needed} bytes"
    )]
    Larger { needed: u64, size: u64 },
    #[error("the disk has more than the {size} bytes of the claim: request more")]
    LargerThanClaim { size: u64 },
    #[error("the import needs {needed} bytes, and {} has {free} to spare: free space, and try again", path.display())]
    NoSpace { path: PathBuf, needed: u64, free: u64 },
    #[error("the file system of {} is full: free space, and try again", path.display())]
    Full { path: PathBuf },
    #[error("{0}")]
    Format(String),
    #[error("the image could not be read: {0}")]
    Unreadable(String),
    #[error("the image could not be converted: {0}")]
    Conversion(String),
    #[error(
        "{registry} does not let you read it: name a Secret with accessKeyId and secretKey in `secretRef`, or log in with `podman login {registry}`"
    )]
    RegistryLogin { registry: String },
    #[error("{0}")]
    Pull(PullError),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl VolumeError {
    pub fn io(path: &Path) -> impl FnOnce(io::Error) -> VolumeError {
        let path = path.to_owned();
        move |source| VolumeError::Io { path, source }
    }

    /// True if the image itself is of no use, so that another attempt has to fetch it again.
    pub fn is_of_the_image(&self) -> bool {
        matches!(self, VolumeError::Format(_) | VolumeError::Unreadable(_))
    }

    /// Why an attempt failed that another one follows.
    pub fn of_attempt(&self) -> String {
        match self {
            VolumeError::Unavailable { status, .. } => {
                format!("the server answered with HTTP status {status}")
            }
            VolumeError::ConnectionLost { reason, .. } => reason.clone(),
            other => other.to_string(),
        }
    }

    /// True if another attempt may succeed.
    pub fn is_temporary(&self) -> bool {
        matches!(
            self,
            VolumeError::Unavailable { .. }
                | VolumeError::Unreachable { .. }
                | VolumeError::ConnectionLost { .. }
        )
    }
}

impl From<PullError> for VolumeError {
    fn from(error: PullError) -> VolumeError {
        match error {
            PullError::Unauthorized { registry } => VolumeError::RegistryLogin { registry },
            PullError::Certificate { registry, reason } => VolumeError::Certificate {
                server: registry,
                reason,
            },
            other => VolumeError::Pull(other),
        }
    }
}
