//! Errors of a pull: each is one line that says what to do.

use husk_images::StoreError;
use oci_client::errors::{OciDistributionError, OciErrorCode};

/// Longest text of a registry that is shown, in characters.
const SHOWN: usize = 200;

/// Why an image was not pulled.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    #[error("{0}")]
    Name(#[from] husk_images::InvalidName),
    #[error("{0}")]
    Store(#[from] StoreError),
    #[error("it is not in the store, and imagePullPolicy is Never: `husk images pull` pulls it")]
    NotPresent,
    #[error(
        "{registry} does not let you read it: log in with `podman login {registry}` or `docker login {registry}`, or name an imagePullSecret"
    )]
    Unauthorized { registry: String },
    #[error("{registry} has no such image")]
    NotFound { registry: String },
    #[error(
        "{registry} limits the number of pulls: try again later, or log in with `podman login {registry}`"
    )]
    RateLimited { registry: String },
    #[error(
        "the certificate of {registry} is not trusted: put its CA's certificate into /etc/containers/certs.d/{registry}/ca.crt ({reason})"
    )]
    Certificate { registry: String, reason: String },
    #[error(
        "the certificate of {registry} is that of a CA, not of a server: make one with `CA:FALSE`, or sign one with that CA"
    )]
    CaCertificate { registry: String },
    #[error("cannot resolve {registry}: check the name of the image, or the name servers")]
    UnknownHost { registry: String },
    #[error("{registry} cannot be reached: {reason}")]
    Unreachable { registry: String, reason: String },
    #[error("unexpected answer from {registry}: {reason}")]
    Registry { registry: String, reason: String },
    #[error("the content that {registry} sent does not match the digest {digest}")]
    Digest { registry: String, digest: String },
    #[error("the connection to {registry} failed repeatedly: {reason}; try again")]
    ConnectionLost { registry: String, reason: String },
    #[error("it has no image for linux/amd64")]
    Platform,
    #[error("the credentials for {registry} cannot be read: {reason}")]
    Credentials { registry: String, reason: String },
    #[error("{path}: {reason}")]
    Configuration { path: String, reason: String },
}

impl PullError {
    /// An error of the client.
    pub fn of(registry: &str, error: &OciDistributionError) -> PullError {
        let registry = registry.to_owned();
        match error {
            OciDistributionError::UnauthorizedError { .. }
            | OciDistributionError::AuthenticationFailure(_) => PullError::Unauthorized { registry },
            OciDistributionError::ImageManifestNotFoundError(_)
            | OciDistributionError::ServerError { code: 404, .. } => PullError::NotFound { registry },
            OciDistributionError::ServerError { code: 403, .. } => PullError::Unauthorized { registry },
            OciDistributionError::ServerError { code: 429, .. } => PullError::RateLimited { registry },
            OciDistributionError::ServerError { code, message, .. } => PullError::Registry {
                registry,
                reason: shown(&format!("HTTP status {code} {message}")),
            },
            OciDistributionError::RegistryError { envelope, .. } => {
                let code = envelope.errors.first().map(|error| &error.code);
                match code {
                    Some(
                        OciErrorCode::ManifestUnknown
                        | OciErrorCode::NameUnknown
                        | OciErrorCode::NotFound
                        | OciErrorCode::BlobUnknown
                        | OciErrorCode::ManifestBlobUnknown,
                    ) => PullError::NotFound { registry },
                    Some(OciErrorCode::Unauthorized | OciErrorCode::Denied) => {
                        PullError::Unauthorized { registry }
                    }
                    Some(OciErrorCode::Toomanyrequests) => PullError::RateLimited { registry },
                    _ => PullError::Registry {
                        registry,
                        reason: shown(&envelope.to_string()),
                    },
                }
            }
            OciDistributionError::DigestError(error) => PullError::Digest {
                registry,
                digest: shown(&error.to_string()),
            },
            OciDistributionError::RequestError(request) => {
                let reason = innermost(request);
                // The texts are those of rustls and hickory, whose errors reqwest does not let through as types.
                match () {
                    () if reason.contains("CaUsedAsEndEntity") => PullError::CaCertificate { registry },
                    () if reason.contains("certificate") => PullError::Certificate { registry, reason },
                    () if reason.contains("no records found") => PullError::UnknownHost { registry },
                    () => PullError::Unreachable { registry, reason },
                }
            }
            other => PullError::Registry {
                registry,
                reason: shown(&other.to_string()),
            },
        }
    }

    /// True if the registry refuses access.
    pub fn is_of_access(&self) -> bool {
        matches!(self, PullError::Unauthorized { .. })
    }

    /// True if another attempt may succeed.
    pub fn is_temporary(&self) -> bool {
        match self {
            PullError::RateLimited { .. }
            | PullError::Unreachable { .. }
            | PullError::ConnectionLost { .. } => true,
            PullError::Registry { reason, .. } => reason.starts_with("HTTP status 5"),
            _ => false,
        }
    }
}

/// Text of the innermost cause, which says most.
pub fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(cause) = error.source() {
        error = cause;
    }
    shown(&error.to_string())
}

/// A text of a registry in one line of bounded length.
pub fn shown(text: &str) -> String {
    let plain: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(SHOWN)
        .collect();
    plain.trim().to_owned()
}
