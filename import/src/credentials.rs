//! Credentials for a registry: an imagePullSecret, or what `podman login` and `docker login` have stored.

use std::cmp::Reverse;
use std::fs;
use std::path::PathBuf;

use docker_credential::{CredentialRetrievalError, DockerCredential, get_credential_from_reader};
use oci_client::secrets::RegistryAuth;
use serde_json::{Value, json};

use crate::error::PullError;

/// Name of Docker's registry in credential files.
const DOCKER: &str = "https://index.docker.io/v1/";
/// Hosts of Docker's registry.
const DOCKER_HOSTS: [&str; 3] = ["docker.io", "index.docker.io", "registry-1.docker.io"];

/// Finds the credentials for a repository of `registry`; anonymous if there are none.
///
/// # Errors
/// There are some, but they cannot be read.
pub fn find(registry: &str, repository: &str, pull_secret: Option<&str>) -> Result<RegistryAuth, PullError> {
    // Docker stores its own registry by the first name, Podman by the second.
    let servers = match registry {
        "docker.io" => vec![DOCKER, registry],
        other => vec![other],
    };
    let unreadable = |reason: String| PullError::Credentials {
        registry: registry.to_owned(),
        reason: reason.replace('\n', " "),
    };
    let configs = match pull_secret {
        Some(secret) => vec![of_secret(secret).map_err(|error| unreadable(error.to_string()))?],
        None => of_user(),
    };
    let found = configs.iter().flat_map(|config| {
        let entry = entry_for(config, registry, repository);
        servers.iter().map(move |server| of_config(config, entry, server))
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

/// The entry of `auths` for the repository: the one with the longest path, as Podman and the kubelet choose it.
fn entry_for<'a>(config: &'a Value, registry: &str, repository: &str) -> Option<&'a Value> {
    let entries = config.get("auths")?.as_object()?.iter();
    let matching = entries.filter_map(|(key, entry)| Some((rank(key, registry, repository)?, key, entry)));
    let chosen = matching.max_by_key(|(rank, key, _)| (*rank, Reverse(*key)));
    chosen.map(|(_, _, entry)| entry)
}

/// Counts the names at the begin of a key, host included, that the repository has too: the key with most is chosen.
/// `None` if the key is for another repository.
fn rank(key: &str, registry: &str, repository: &str) -> Option<usize> {
    let url = key
        .strip_prefix("https://")
        .or_else(|| key.strip_prefix("http://"));
    let mut names = url.unwrap_or(key).split('/').filter(|name| !name.is_empty());
    let host = names.next()?;
    if host != registry && !(DOCKER_HOSTS.contains(&host) && DOCKER_HOSTS.contains(&registry)) {
        return None;
    }
    let mut path: Vec<_> = names.collect();
    // The version of the registry's API in Docker's keys.
    if url.is_some() && matches!(path.first(), Some(&("v1" | "v2"))) {
        path.remove(0);
    }
    match repository.split('/').take(path.len()).eq(path.iter().copied()) {
        true => Some(1 + path.len()),
        // Docker takes a URL for its host, whatever its path.
        false => url.map(|_| 0),
    }
}

/// The credentials of a configuration whose only entry is this one.
fn of_config(
    config: &Value,
    entry: Option<&Value>,
    server: &str,
) -> Result<DockerCredential, CredentialRetrievalError> {
    let mut config = config.clone();
    config["auths"] = entry.map_or_else(|| json!({}), |entry| json!({server: entry}));
    get_credential_from_reader(config.to_string().as_bytes(), server)
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

/// The configurations in which `podman login` and `docker login` store credentials.
fn of_user() -> Vec<Value> {
    let mut files = match std::env::var_os("REGISTRY_AUTH_FILE") {
        Some(file) => vec![PathBuf::from(file)],
        None => podman_files(),
    };
    let docker = std::env::var_os("DOCKER_CONFIG").map(PathBuf::from);
    let docker = docker.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".docker")));
    files.extend(docker.map(|directory| directory.join("config.json")));
    let contents = files.iter().filter_map(|file| fs::read(file).ok());
    let configs = contents.filter_map(|content| serde_json::from_slice(&content).ok());
    configs.filter(Value::is_object).collect()
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

/// The configuration of a Secret. It may name programs as credential helpers: those of a manifest are not run.
fn of_secret(secret: &str) -> Result<Value, CredentialRetrievalError> {
    let secret: Value =
        serde_json::from_str(secret).map_err(|_| CredentialRetrievalError::CredentialDecodingError)?;
    Ok(json!({"auths": secret.get("auths").cloned().unwrap_or_default()}))
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
            find("a.example:5000", "team/disk", Some(secret)).unwrap(),
            RegistryAuth::Basic("user".into(), "pass".into())
        );
        assert_eq!(
            find("b.example", "team/disk", Some(secret)).unwrap(),
            RegistryAuth::Anonymous
        );
        for name in ["https://index.docker.io/v1/", "docker.io", "index.docker.io"] {
            let secret = format!(r#"{{"auths": {{"{name}": {{"auth": "dXNlcjpwYXNz"}}}}}}"#);
            assert_eq!(
                find("docker.io", "team/disk", Some(&secret)).unwrap(),
                RegistryAuth::Basic("user".into(), "pass".into()),
                "{name}"
            );
        }
        for bad in ["", "[", r#"{"auths": {"a": {"auth": "%"}}}"#] {
            let error = find("a", "team/disk", Some(bad)).unwrap_err().to_string();
            assert!(
                error.starts_with("the credentials for a cannot be read"),
                "{error}"
            );
        }
    }

    #[test]
    fn the_longest_path_that_has_the_repository_is_chosen() {
        let entry = |key: &str, user: &str| (key.to_owned(), json!({"username": user, "password": "p"}));
        let find = |keys: &[(&str, &str)], repository: &str| {
            let auths: serde_json::Map<_, _> = keys.iter().map(|(key, user)| entry(key, user)).collect();
            match find(
                "a.example",
                repository,
                Some(&json!({ "auths": auths }).to_string()),
            )
            .unwrap()
            {
                RegistryAuth::Basic(user, _) => user,
                _ => "anonymous".to_owned(),
            }
        };
        let keys = [
            ("a.example", "host"),
            ("a.example/team", "team"),
            ("https://a.example/team/disks/", "disks"),
            ("http://a.example/v2/other", "other"),
            ("b.example/team/disks/a", "foreign"),
        ];
        for (repository, user) in [
            ("team/disks/a", "disks"),
            ("team/disks", "disks"),
            ("team/disks2", "team"),
            ("teams/disks", "host"),
            ("other/a", "other"),
        ] {
            assert_eq!(find(&keys, repository), user, "{repository}");
        }
        assert_eq!(find(&keys[1..2], "teams/a"), "anonymous");
        // Docker's own way for URLs.
        assert_eq!(
            find(
                &[("https://a.example/y", "y"), ("https://a.example/x", "x")],
                "team/a"
            ),
            "x"
        );
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
        let error = find("a.example", "team/disk", Some(secret))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("identity token, which is not supported"),
            "{error}"
        );
    }
}
