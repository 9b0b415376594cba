//! Access credentials: which Secrets they are in, and what the guest's agent propagates.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::types::PodResources;
use crate::field::FieldError;
use crate::load::Vmi;
use crate::types::AccessCredential;

/// Access credentials of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CredentialsPlan {
    /// Directory with a file for each key, by the name of the Secret.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub secrets: BTreeMap<String, PathBuf>,
    /// Secrets that the guest agent propagates.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub by_agent: Vec<AgentCredential>,
}

/// A Secret that the guest's agent propagates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AgentCredential {
    /// Each line of each value is a public key of these users.
    #[serde(rename_all = "camelCase")]
    PublicKeys {
        /// Name of the Secret.
        secret: String,
        /// Users of the guest.
        users: Vec<String>,
    },
    /// Each key is a user, and its value the password.
    #[serde(rename_all = "camelCase")]
    Passwords {
        /// Name of the Secret.
        secret: String,
    },
}

impl CredentialsPlan {
    /// There are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.secrets.is_empty()
    }
}

/// The name of a Secret among the volumes that a caller gives: that of its mount in KubeVirt's pods.
#[must_use]
pub fn credential_volume(secret: &str) -> String {
    format!("{secret}-access-cred")
}

/// True if a volume has the name of a Secret with access credentials of the VM.
#[must_use]
pub fn is_credential_volume(vmi: &Vmi, name: &str) -> bool {
    let mut credentials = vmi.spec.access_credentials.iter();
    credentials.any(|credential| credential_volume(credential.secret()) == name)
}

/// Plans the credentials of a valid VMI.
pub(super) fn plan(vmi: &Vmi, resources: &PodResources, errors: &mut Vec<FieldError>) -> CredentialsPlan {
    let mut plan = CredentialsPlan::default();
    for (i, credential) in vmi.spec.access_credentials.iter().enumerate() {
        let secret = credential.secret();
        let volume = credential_volume(secret);
        match resources.volumes.get(&volume) {
            Some(dir) => _ = plan.secrets.insert(secret.to_owned(), dir.clone()),
            None => {
                let field = vmi.at(&format!("accessCredentials[{i}]"));
                let text = format!(
                    "{field} needs data: pass a directory with the files of the Secret {secret:?} with --volume {volume}=DIR"
                );
                errors.push(FieldError::required(field, text));
            }
        }
    }
    plan.by_agent = by_agent(vmi).collect();
    plan
}

/// Returns the Secrets that the guest agent propagates.
pub(super) fn by_agent(vmi: &Vmi) -> impl Iterator<Item = AgentCredential> {
    vmi.spec.access_credentials.iter().filter_map(|credential| {
        let secret = credential.secret().to_owned();
        if let Some(key) = &credential.ssh_public_key {
            let users = key.propagation_method.qemu_guest_agent.as_ref()?.users.clone();
            return Some(AgentCredential::PublicKeys { secret, users });
        }
        let password = credential.user_password.as_ref()?;
        password.propagation_method.qemu_guest_agent.as_ref()?;
        Some(AgentCredential::Passwords { secret })
    })
}

/// Directories of the Secrets whose public keys cloud-init reads by the method that `is` tells.
pub(super) fn public_keys(
    vmi: &Vmi,
    resources: &PodResources,
    is: impl Fn(&AccessCredential) -> bool,
) -> Vec<PathBuf> {
    let of_method = vmi
        .spec
        .access_credentials
        .iter()
        .filter(|credential| is(credential));
    let given = |credential: &AccessCredential| {
        let volume = credential_volume(credential.secret());
        resources.volumes.get(&volume).cloned()
    };
    of_method.filter_map(given).collect()
}
