//! Rules for access credentials.

use super::INVALID;
use super::common::{faults, refused, with};
use serde_json::{Value, json};

const ENTRY: &str = "spec.accessCredentials[0]";

fn key(method: Value) -> Value {
    json!([{"sshPublicKey": {"source": {"secret": {"secretName": "keys"}}, "propagationMethod": method}}])
}

#[test]
fn credentials_have_one_type_source_and_method() {
    let key_by = "sshPublicKey.propagationMethod";
    let secret = json!({"secret": {"secretName": "keys"}});
    let agent = json!({"qemuGuestAgent": {"users": ["root"]}});
    assert_eq!(faults(&with(&[("accessCredentials", key(agent.clone()))])), []);
    let password = json!({"source": secret, "propagationMethod": {"qemuGuestAgent": {}}});
    assert_eq!(
        faults(&with(&[(
            "accessCredentials",
            json!([{"userPassword": password}])
        )])),
        []
    );
    for (list, field, text) in [
        (
            json!([{}]),
            String::new(),
            "must have exactly one access credential type set",
        ),
        (
            json!([{"sshPublicKey": {"source": secret, "propagationMethod": agent}, "userPassword": password}]),
            String::new(),
            "must have exactly one access credential type set",
        ),
        (
            key(json!({})),
            format!(".{key_by}"),
            "must have exactly one propagationMethod set",
        ),
        (
            key(json!({"qemuGuestAgent": {"users": ["root"]}, "noCloud": {}})),
            format!(".{key_by}"),
            "must have exactly one propagationMethod set",
        ),
        (
            key(json!({"qemuGuestAgent": {"users": []}})),
            format!(".{key_by}.qemuGuestAgent.users"),
            "requires at least one user to be present in the users list",
        ),
        (
            key(json!({"noCloud": {}})),
            format!(".{key_by}"),
            "requires a noCloud volume to exist when the noCloud propagationMethod is in use.",
        ),
        (
            key(json!({"configDrive": {}})),
            format!(".{key_by}"),
            "requires a configDrive volume to exist when the configDrive propagationMethod is in use.",
        ),
        (
            json!([{"userPassword": {"source": {}, "propagationMethod": {"qemuGuestAgent": {}}}}]),
            ".userPassword.source".to_owned(),
            "must have exactly one source set",
        ),
        (
            json!([{"userPassword": {"source": secret, "propagationMethod": {}}}]),
            ".userPassword.propagationMethod".to_owned(),
            "must have exactly one propagationMethod set",
        ),
    ] {
        refused(
            &[("accessCredentials", list)],
            INVALID,
            &format!("{ENTRY}{field}"),
            &format!("{ENTRY} {text}"),
        );
    }
}

#[test]
fn the_name_of_a_secret_is_no_path() {
    let list = json!([{"sshPublicKey": {
        "source": {"secret": {"secretName": "../../etc"}},
        "propagationMethod": {"qemuGuestAgent": {"users": ["root"]}},
    }}]);
    let faults = faults(&with(&[("accessCredentials", list)]));
    let field = format!("{ENTRY}.sshPublicKey.source.secret.secretName");
    assert!(faults.iter().any(|fault| fault.field == field), "{faults:?}");
}
