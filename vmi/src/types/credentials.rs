//! `spec.accessCredentials`.

use serde::Deserialize;

use super::Empty;

manifest! {
    /// `spec.accessCredentials[]`
    AccessCredential {
        ssh_public_key: Option<SshPublicKey>,
        user_password: Option<UserPassword>,
    }

    /// `sshPublicKey`
    SshPublicKey {
        source: CredentialSource,
        propagation_method: SshPropagation,
    }

    /// `userPassword`
    UserPassword {
        source: CredentialSource,
        propagation_method: PasswordPropagation,
    }

    /// `source`
    CredentialSource {
        secret: Option<CredentialSecret>,
    }

    /// `source.secret`
    CredentialSecret {
        secret_name: String,
    }

    /// `sshPublicKey.propagationMethod`
    SshPropagation {
        no_cloud: Option<Empty>,
        config_drive: Option<Empty>,
        qemu_guest_agent: Option<SshUsers>,
    }

    /// `sshPublicKey.propagationMethod.qemuGuestAgent`
    SshUsers {
        users: Vec<String>,
    }

    /// `userPassword.propagationMethod`
    PasswordPropagation {
        qemu_guest_agent: Option<Empty>,
    }
}

impl AccessCredential {
    /// Name of its Secret; empty if there is none.
    #[must_use]
    pub fn secret(&self) -> &str {
        let source = match (&self.ssh_public_key, &self.user_password) {
            (Some(key), _) => Some(&key.source),
            (None, Some(password)) => Some(&password.source),
            (None, None) => None,
        };
        let secret = source.and_then(|source| source.secret.as_ref());
        secret
            .map(|secret| secret.secret_name.as_str())
            .unwrap_or_default()
    }
}
