//! Rules on access credentials.

use crate::field::FieldError;
use crate::load::Vmi;
use crate::names::subdomain_fault;
use crate::types::AccessCredential;

pub(super) fn check(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    let list = vmi.at("accessCredentials");
    let credentials = &vmi.spec.access_credentials;
    for (i, credential) in credentials.iter().enumerate() {
        one(vmi, credential, &format!("{list}[{i}]"), errors);
    }
}

fn one(vmi: &Vmi, credential: &AccessCredential, path: &str, errors: &mut Vec<FieldError>) {
    let mut fault = |field: &str, text: &str| {
        errors.push(FieldError::invalid(
            format!("{path}{field}"),
            format!("{path} {text}"),
        ));
    };
    let mut sources = Vec::new();
    if let Some(key) = &credential.ssh_public_key {
        let method = &key.propagation_method;
        let volumes = &vmi.spec.volumes;
        let at = ".sshPublicKey.propagationMethod";
        if method.no_cloud.is_some() && !volumes.iter().any(|v| v.cloud_init_no_cloud.is_some()) {
            fault(
                at,
                "requires a noCloud volume to exist when the noCloud propagationMethod is in use.",
            );
        }
        if method.config_drive.is_some() && !volumes.iter().any(|v| v.cloud_init_config_drive.is_some()) {
            fault(
                at,
                "requires a configDrive volume to exist when the configDrive propagationMethod is in use.",
            );
        }
        if let Some(agent) = &method.qemu_guest_agent
            && agent.users.is_empty()
        {
            let at = format!("{at}.qemuGuestAgent.users");
            fault(&at, "requires at least one user to be present in the users list");
        }
        let methods = [
            method.no_cloud.is_some(),
            method.config_drive.is_some(),
            method.qemu_guest_agent.is_some(),
        ];
        sources.push((
            "sshPublicKey",
            &key.source,
            methods.iter().filter(|set| **set).count(),
        ));
    }
    if let Some(password) = &credential.user_password {
        let method = password.propagation_method.qemu_guest_agent.is_some();
        sources.push(("userPassword", &password.source, usize::from(method)));
    }
    for (kind, source, methods) in &sources {
        if source.secret.is_none() {
            fault(&format!(".{kind}.source"), "must have exactly one source set");
        }
        if *methods != 1 {
            fault(
                &format!(".{kind}.propagationMethod"),
                "must have exactly one propagationMethod set",
            );
        }
    }
    if sources.len() != 1 {
        fault("", "must have exactly one access credential type set");
    }
    // The name becomes part of a path.
    for (kind, source, _) in sources {
        if let Some(secret) = &source.secret
            && let Some(text) = subdomain_fault(&secret.secret_name)
        {
            let field = format!("{path}.{kind}.source.secret.secretName");
            let text = format!("{field} '{}': {text}", secret.secret_name);
            errors.push(FieldError::invalid(field, text));
        }
    }
}
