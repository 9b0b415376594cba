//! Credentials for a registry: an imagePullSecret, or what `podman login` and `docker login` have stored.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;

use docker_credential::{CredentialRetrievalError, DockerCredential};
use oci_client::secrets::RegistryAuth;
use serde_json::{Value, json};

use crate::error::PullError;

/// Name of Docker's registry in credential files.
const DOCKER: &str = "https://index.docker.io/v1/";

/// Finds the credentials for `registry`; anonymous if there are none.
///
/// # Errors
/// There are some, but they cannot be read.
pub fn find(registry: &str, pull_secret: Option<&str>) -> Result<RegistryAuth, PullError> {
    // Docker stores its own registry by the first name, Podman by the second.
    let servers = match registry {
        "docker.io" => vec![DOCKER, registry],
        other => vec![other],
    };
    let unreadable = |reason: String| PullError::Credentials {
        registry: registry.to_owned(),
        reason: reason.replace('\n', " "),
    };
    let found = servers.into_iter().flat_map(|server| match pull_secret {
        Some(secret) => vec![of_secret(secret, server)],
        None => of_user(server),
    });
    for credential in found {
        match credential {
            Ok(DockerCredential::UsernamePassword(user, password)) => {
                return Ok(RegistryAuth::Basic(user, password));
            }
            Ok(DockerCredential::IdentityToken(_)) => {
                let reason = "they are an identity token, which is not supported: log in with a user name and password";
                return Err(unreadable(reason.into()));
            }
            Err(error) if is_absent(&error) => {}
            Err(error) => return Err(unreadable(error.to_string())),
        }
    }
    Ok(RegistryAuth::Anonymous)
}

/// True if the error says that there are no credentials.
fn is_absent(error: &CredentialRetrievalError) -> bool {
    match error {
        CredentialRetrievalError::NoCredentialConfigured
        | CredentialRetrievalError::ConfigNotFound
        | CredentialRetrievalError::ConfigReadError => true,
        // The text by which Docker itself tells it from other failures.
        CredentialRetrievalError::HelperFailure { stdout, .. } => stdout.contains("credentials not found"),
        _ => false,
    }
}

/// The credentials that `podman login` and `docker login` stored.
fn of_user(server: &str) -> Vec<Result<DockerCredential, CredentialRetrievalError>> {
    let mut found = Vec::new();
    if std::env::var_os("REGISTRY_AUTH_FILE").is_some() {
        found.push(docker_credential::get_podman_credential(server));
    } else {
        let files = podman_files()
            .into_iter()
            .filter_map(|file| File::open(file).ok());
        found.extend(
            files.map(|file| docker_credential::get_credential_from_reader(BufReader::new(file), server)),
        );
    }
    found.push(docker_credential::get_credential(server));
    found
}

/// Files that `podman login` may have written: with a login session, without one, and those to keep. The processes of
/// VMs have no session.
fn podman_files() -> Vec<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let session = std::env::var_os("XDG_RUNTIME_DIR")
        .map_or_else(|| PathBuf::from(format!("/run/user/{user}")), PathBuf::from);
    let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let config = config.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".config")));
    let directories = [
        Some(session.join("containers")),
        Some(PathBuf::from(format!("/run/containers/{user}"))),
        config.map(|config| config.join("containers")),
    ];
    directories
        .into_iter()
        .flatten()
        .map(|directory| directory.join("auth.json"))
        .collect()
}

/// Credentials of a Secret. It may name programs as credential helpers: those of a manifest are not run.
fn of_secret(secret: &str, server: &str) -> Result<DockerCredential, CredentialRetrievalError> {
    let secret: Value =
        serde_json::from_str(secret).map_err(|_| CredentialRetrievalError::CredentialDecodingError)?;
    let auths = json!({"auths": secret.get("auths").cloned().unwrap_or_default()}).to_string();
    docker_credential::get_credential_from_reader(auths.as_bytes(), server)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_gives_its_own_registry_only_and_runs_no_helper() {
        // user:pass
        let secret = r#"{"auths": {"a.example:5000": {"auth": "dXNlcjpwYXNz"}}, "credsStore": "missing",
            "credHelpers": {"b.example": "missing"}}"#;
        assert_eq!(
            find("a.example:5000", Some(secret)).unwrap(),
            RegistryAuth::Basic("user".into(), "pass".into())
        );
        assert_eq!(find("b.example", Some(secret)).unwrap(), RegistryAuth::Anonymous);
        for name in ["https://index.docker.io/v1/", "docker.io", "index.docker.io"] {
            let secret = format!(r#"{{"auths": {{"{name}": {{"auth": "dXNlcjpwYXNz"}}}}}}"#);
            assert_eq!(
                find("docker.io", Some(&secret)).unwrap(),
                RegistryAuth::Basic("user".into(), "pass".into()),
                "{name}"
            );
        }
        for bad in ["", "[", r#"{"auths": {"a": {"auth": "%"}}}"#] {
            let error = find("a", Some(bad)).unwrap_err().to_string();
            assert!(
                error.starts_with("the credentials for a cannot be read"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_helper_without_credentials_is_no_error() {
        let failure = |stdout: &str| CredentialRetrievalError::HelperFailure {
            helper: "docker-credential-pass".into(),
            stdout: stdout.into(),
            stderr: String::new(),
        };
        assert!(is_absent(&failure("credentials not found in native keychain\n")));
        assert!(!is_absent(&failure("exit status 2: gpg: decryption failed\n")));
    }

    #[test]
    fn identity_tokens_are_refused_by_name() {
        let secret = r#"{"auths": {"a.example": {"identitytoken": "token"}}}"#;
        let error = find("a.example", Some(secret)).unwrap_err().to_string();
        assert!(
            error.contains("identity token, which is not supported"),
            "{error}"
        );
    }
}
