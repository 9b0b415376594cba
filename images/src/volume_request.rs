//! The source of a volume's data: that of a DataVolume, as `husk-import` gets it.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Fill a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRequest {
    /// An existing directory that this import alone uses. A download that was interrupted stays in it, and the next
    /// import into it goes on with that. In the end it holds the file `disk.img`, which replaces an earlier
    /// one, and nothing else of the import.
    pub directory: PathBuf,
    pub source: VolumeSource,
    /// Size of the disk in bytes. Without it the size is the image's, rounded up to a whole MiB.
    pub size: Option<u64>,
}

/// Where the data of a volume comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum VolumeSource {
    /// A file on a web server.
    Http(HttpSource),
    /// A containerDisk in a registry.
    Registry(RegistrySource),
}

/// A file on a web server.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HttpSource {
    /// URL with the scheme `http` or `https`.
    pub url: String,
    /// Checksum of the file as the server sends it.
    #[serde(default)]
    pub checksum: Option<Checksum>,
    /// Certificates of further authorities, in PEM; each text may have several.
    #[serde(default)]
    pub certificates: Vec<String>,
    #[serde(default)]
    pub login: Option<Login>,
    /// Names and values of additional headers, which other servers than that of the URL do not get.
    #[serde(default)]
    pub headers: Vec<(String, String)>,
}

/// A containerDisk in a registry.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegistrySource {
    /// Name of the image, without `docker://`.
    pub image: String,
    /// Content of `.dockerconfigjson` of a Secret.
    #[serde(default)]
    pub pull_secret: Option<String>,
    /// Takes precedence over the pull secret. Without both the user's own credentials are used.
    #[serde(default)]
    pub login: Option<Login>,
    /// Certificates of further authorities, in PEM; each text may have several.
    #[serde(default)]
    pub certificates: Vec<String>,
}

/// A user's name and password: `accessKeyId` and `secretKey` of a Secret.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Login {
    pub user: String,
    pub password: String,
}

/// Checksum of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checksum {
    pub algorithm: ChecksumAlgorithm,
    /// In hexadecimal digits.
    pub digest: String,
}

/// Algorithm of a checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChecksumAlgorithm {
    Md5,
    Sha1,
    Sha256,
    Sha512,
}

impl HttpSource {
    /// The URL without what may be secret in it: user, password, query and fragment.
    #[must_use]
    pub fn shown_url(&self) -> String {
        let (scheme, rest) = self.url.split_once("://").unwrap_or(("", &self.url));
        let rest = rest.split(['?', '#']).next().unwrap_or_default();
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let host = authority.rsplit('@').next().unwrap_or_default();
        format!("{scheme}://{host}{path}")
    }
}

/// Secrets are not shown.
impl fmt::Debug for HttpSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headers: Vec<_> = self.headers.iter().map(|(name, _)| name).collect();
        f.debug_struct("HttpSource")
            .field("url", &self.shown_url())
            .field("checksum", &self.checksum)
            .field("login", &self.login)
            .field("headers", &headers)
            .finish_non_exhaustive()
    }
}

/// The pull secret is not shown.
impl fmt::Debug for RegistrySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegistrySource")
            .field("image", &self.image)
            .field("login", &self.login)
            .finish_non_exhaustive()
    }
}

/// Neither the user's name nor the password is shown: with S3 both are keys.
impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").finish_non_exhaustive()
    }
}

impl fmt::Display for ChecksumAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ChecksumAlgorithm::Md5 => "md5",
            ChecksumAlgorithm::Sha1 => "sha1",
            ChecksumAlgorithm::Sha256 => "sha256",
            ChecksumAlgorithm::Sha512 => "sha512",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_shown() {
        let login = Some(Login {
            user: "SECRET-user".into(),
            password: "SECRET-password".into(),
        });
        let http = VolumeSource::Http(HttpSource {
            url: "https://SECRET:SECRET@a.example:1/b/c.img?token=SECRET#SECRET".into(),
            checksum: None,
            certificates: vec!["SECRET".into()],
            login: login.clone(),
            headers: vec![("x-token".into(), "SECRET".into())],
        });
        let registry = VolumeSource::Registry(RegistrySource {
            image: "a.example/b:1".into(),
            pull_secret: Some("SECRET".into()),
            login,
            certificates: Vec::new(),
        });
        for (source, text) in [
            (http, "https://a.example:1/b/c.img\""),
            (registry, "a.example/b:1"),
        ] {
            let shown = format!("{source:?}");
            assert!(shown.contains(text) && !shown.contains("SECRET"), "{shown}");
            let sent = serde_json::to_string(&source).unwrap();
            assert_eq!(serde_json::from_str::<VolumeSource>(&sent).unwrap(), source);
        }
    }
}
