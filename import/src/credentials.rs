//! Credentials for a registry: an imagePullSecret, or what `podman login` and `docker login` have stored.

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
    let server = match registry {
        "docker.io" => DOCKER,
        other => other,
    };
    let unreadable = |reason: String| PullError::Credentials {
        registry: registry.to_owned(),
        reason: reason.replace('\n', " "),
    };
    let found = match pull_secret {
        Some(secret) => vec![of_secret(secret, server)],
        None => vec![
            docker_credential::get_podman_credential(server),
            docker_credential::get_credential(server),
        ],
    };
    for credential in found {
        match credential {
            Ok(DockerCredential::UsernamePassword(user, password)) => {
                return Ok(RegistryAuth::Basic(user, password));
            }
            Ok(DockerCredential::IdentityToken(token)) => return Ok(RegistryAuth::Bearer(token)),
            Err(
                CredentialRetrievalError::NoCredentialConfigured
                | CredentialRetrievalError::ConfigNotFound
                | CredentialRetrievalError::ConfigReadError,
            ) => {}
            Err(error) => return Err(unreadable(error.to_string())),
        }
    }
    Ok(RegistryAuth::Anonymous)
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
        for bad in ["", "[", r#"{"auths": {"a": {"auth": "%"}}}"#] {
            let error = find("a", Some(bad)).unwrap_err().to_string();
            assert!(
                error.starts_with("the credentials for a cannot be read"),
                "{error}"
            );
        }
    }
}
