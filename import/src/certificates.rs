//! How a registry is reached: with TLS and which certificates, or without.
//!
//! As Docker and podman: `certs.d/HOST[:PORT]/*.crt` are further CA certificates for that registry. A registry of this
//! machine without such a directory is asked by plain HTTP, as containerd does; others only if `registries.conf` says
//! `insecure = true`.

use std::fs;
use std::path::{Path, PathBuf};

use oci_client::client::{Certificate, CertificateEncoding, ClientProtocol};
use toml_edit::DocumentMut;

use crate::error::PullError;

/// Directories of certificates below the user's `.config` and `/etc`.
const SYSTEM: [&str; 2] = ["/etc/containers/certs.d", "/etc/docker/certs.d"];
/// The configuration of podman and skopeo.
const REGISTRIES: &str = "/etc/containers/registries.conf";
/// Longest file of a certificate or configuration, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// How to reach one registry.
#[derive(Debug)]
pub struct Transport {
    pub protocol: ClientProtocol,
    /// Further CA certificates.
    pub certificates: Vec<Certificate>,
}

impl Transport {
    /// Reads the configuration for `registry`, which is a host with an optional port. `further` are certificates in PEM
    /// beside those of the configuration.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn find(registry: &str, further: &[String]) -> Result<Transport, PullError> {
        let home = std::env::var_os("HOME").map(PathBuf::from);
        let own = home.map(|home| home.join(".config/containers/certs.d"));
        let directories = own.into_iter().chain(SYSTEM.map(PathBuf::from));
        let mut transport = Transport::within(registry, directories, Path::new(REGISTRIES))?;
        if !further.is_empty() {
            transport.protocol = ClientProtocol::Https;
        }
        let certificates = further.iter().map(|pem| Certificate {
            encoding: CertificateEncoding::Pem,
            data: pem.clone().into_bytes(),
        });
        transport.certificates.extend(certificates);
        Ok(transport)
    }

    fn within(
        registry: &str,
        directories: impl Iterator<Item = PathBuf>,
        registries: &Path,
    ) -> Result<Transport, PullError> {
        let mut certificates = Vec::new();
        for directory in directories {
            certificates.extend(read(&directory.join(registry))?);
        }
        let plain = certificates.is_empty() && (is_local(registry) || is_insecure(registry, registries)?);
        Ok(Transport {
            protocol: match plain {
                true => ClientProtocol::Http,
                false => ClientProtocol::Https,
            },
            certificates,
        })
    }
}

/// The CA certificates in a directory.
fn read(directory: &Path) -> Result<Vec<Certificate>, PullError> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Ok(Vec::new());
    };
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "crt"));
    files.sort();
    files
        .iter()
        .map(|file| {
            Ok(Certificate {
                encoding: CertificateEncoding::Pem,
                data: limited(file)?.into_bytes(),
            })
        })
        .collect()
}

/// True for a registry on this machine.
fn is_local(registry: &str) -> bool {
    let host = registry.rsplit_once(':').map_or(registry, |(host, _)| host);
    host == "localhost" || host.starts_with("127.") || host == "[::1]"
}

fn is_insecure(registry: &str, file: &Path) -> Result<bool, PullError> {
    if !file.exists() {
        return Ok(false);
    }
    let text = limited(file)?;
    let document: DocumentMut = text.parse().map_err(|error| configuration(file, error))?;
    let tables = document
        .get("registry")
        .and_then(|item| item.as_array_of_tables());
    Ok(tables.into_iter().flatten().any(|table| {
        let is_text = |key: &str| table.get(key).and_then(|item| item.as_str()) == Some(registry);
        let insecure = table.get("insecure").and_then(|item| item.as_bool());
        (is_text("location") || is_text("prefix")) && insecure == Some(true)
    }))
}

fn limited(file: &Path) -> Result<String, PullError> {
    let size = fs::metadata(file)
        .map_err(|error| configuration(file, error))?
        .len();
    if size > MAX_FILE {
        return Err(configuration(file, format!("it has {size} bytes")));
    }
    fs::read_to_string(file).map_err(|error| configuration(file, error))
}

fn configuration(file: &Path, reason: impl ToString) -> PullError {
    PullError::Configuration {
        path: file.display().to_string(),
        reason: reason.to_string().replace('\n', " "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocol_and_certificates_are_those_of_other_tools() {
        let dir = tempfile::tempdir().unwrap();
        let certs = dir.path().join("certs.d");
        fs::create_dir_all(certs.join("localhost:5001")).unwrap();
        fs::write(certs.join("localhost:5001/ca.crt"), "A").unwrap();
        fs::write(certs.join("localhost:5001/client.key"), "B").unwrap();
        let registries = dir.path().join("registries.conf");
        fs::write(
            &registries,
            "[[registry]]\nlocation = \"old.example\"\ninsecure = true\n[[registry]]\nlocation = \"new.example\"\n",
        )
        .unwrap();
        for (registry, is_plain, count) in [
            ("localhost:5000", true, 0),
            ("127.0.0.1:5000", true, 0),
            ("localhost:5001", false, 1),
            ("quay.io", false, 0),
            ("old.example", true, 0),
            ("new.example", false, 0),
        ] {
            let found = Transport::within(registry, [certs.clone()].into_iter(), &registries).unwrap();
            assert_eq!(
                matches!(found.protocol, ClientProtocol::Http),
                is_plain,
                "{registry}"
            );
            assert_eq!(found.certificates.len(), count, "{registry}");
        }
        fs::write(&registries, "[[").unwrap();
        let error = Transport::within("quay.io", [certs].into_iter(), &registries).unwrap_err();
        assert!(error.to_string().contains("registries.conf: "), "{error}");
    }
}
