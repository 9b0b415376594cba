//! Secrets with access credentials: public keys and passwords.

use std::path::{Path, PathBuf};

use husk_vmi::SeedLayout;
use serde_json::{Map, Value};

use super::error::VolumeFault;
use super::key_files::read_all;

/// Adds the public keys of Secrets to the metadata of a seed for cloud-init, numbered from 0.
pub(super) fn add_to(
    layout: SeedLayout,
    meta_data: &str,
    secrets: &[PathBuf],
) -> Result<String, VolumeFault> {
    let mut keys = Map::new();
    for secret in secrets {
        for (_, value) in read_all(secret)? {
            if !value.is_empty() {
                let key = String::from_utf8_lossy(&value).into_owned();
                keys.insert(keys.len().to_string(), Value::String(key));
            }
        }
    }
    let Ok(Value::Object(mut meta_data)) = serde_json::from_str(meta_data) else {
        return Ok(meta_data.to_owned());
    };
    if !keys.is_empty() {
        let field = match layout {
            SeedLayout::NoCloud => "public-keys",
            SeedLayout::ConfigDrive => "public_keys",
        };
        meta_data.insert(field.to_owned(), Value::Object(keys));
    }
    Ok(Value::Object(meta_data).to_string())
}

/// The public keys in a Secret's directory: each line of each value.
///
/// # Errors
/// See [`VolumeFault`].
pub fn public_keys(secret: &Path) -> Result<Vec<String>, VolumeFault> {
    let mut keys = Vec::new();
    for (_, value) in read_all(secret)? {
        let text = String::from_utf8_lossy(&value);
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        keys.extend(lines.map(str::to_owned));
    }
    Ok(keys)
}

/// The users in a Secret's directory and their passwords. An empty password is none.
///
/// # Errors
/// See [`VolumeFault`].
pub fn passwords(secret: &Path) -> Result<Vec<(String, String)>, VolumeFault> {
    let users = read_all(secret)?.into_iter();
    let passwords = users.map(|(user, value)| (user, String::from_utf8_lossy(&value).trim().to_owned()));
    Ok(passwords.filter(|(_, password)| !password.is_empty()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (key, value) in files {
            std::fs::write(dir.path().join(key), value).unwrap();
        }
        dir
    }

    #[test]
    fn public_keys_are_numbered_in_the_metadata() {
        let (first, second) = (
            secret(&[("b", "key b"), ("a", "key a"), ("none", "")]),
            secret(&[("c", "key c")]),
        );
        let dirs = [first.path().to_owned(), second.path().to_owned()];
        let added = |layout| -> Value {
            let added = add_to(layout, r#"{"instance-id": "x"}"#, &dirs).unwrap();
            serde_json::from_str(&added).unwrap()
        };
        let keys = serde_json::json!({"0": "key a", "1": "key b", "2": "key c"});
        assert_eq!(added(SeedLayout::NoCloud)["public-keys"], keys);
        assert_eq!(added(SeedLayout::ConfigDrive)["public_keys"], keys);
        assert_eq!(added(SeedLayout::NoCloud)["instance-id"], "x");
        assert_eq!(add_to(SeedLayout::NoCloud, "{}", &[]).unwrap(), "{}");
        add_to(SeedLayout::NoCloud, "{}", &["/none".into()]).unwrap_err();
    }

    #[test]
    fn lines_are_keys_and_files_are_users() {
        let dir = secret(&[("keys", " ssh-rsa A \n\nssh-rsa B\n"), ("more", "ssh-rsa C")]);
        assert_eq!(
            public_keys(dir.path()).unwrap(),
            ["ssh-rsa A", "ssh-rsa B", "ssh-rsa C"]
        );
        let dir = secret(&[("root", " secret\n"), ("nobody", "\n")]);
        assert_eq!(
            passwords(dir.path()).unwrap(),
            [("root".to_owned(), "secret".to_owned())]
        );
    }
}
