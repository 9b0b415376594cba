//! Access credentials in a plan.

use super::common::{resources, vmi, with};
use husk_vmi::{AgentCredential, DiskSource, PodResources, VmPlan, plan};
use serde_json::{Value, json};

fn key(secret: &str, method: Value) -> Value {
    json!({"sshPublicKey": {"source": {"secret": {"secretName": secret}}, "propagationMethod": method}})
}

fn manifest() -> Value {
    let password = json!({"userPassword": {
        "source": {"secret": {"secretName": "passwords"}}, "propagationMethod": {"qemuGuestAgent": {}},
    }});
    let root = json!({"name": "root", "persistentVolumeClaim": {"claimName": "root"}});
    let seed = json!({"name": "seed", "cloudInitNoCloud": {"userData": "#cloud-config"}});
    with(&[
        ("volumes", json!([root, seed])),
        (
            "accessCredentials",
            json!([
                key("seed", json!({"noCloud": {}})),
                key("agent", json!({"qemuGuestAgent": {"users": ["root", "debian"]}})),
                password,
            ]),
        ),
    ])
}

fn with_secrets() -> PodResources {
    resources(&[
        ("root", "/r.img"),
        ("seed-access-cred", "/secrets/seed"),
        ("agent-access-cred", "/secrets/agent"),
        ("passwords-access-cred", "/secrets/passwords"),
    ])
}

fn planned() -> VmPlan {
    plan(&vmi(&manifest()), &with_secrets()).unwrap()
}

#[test]
fn each_method_has_its_secrets() {
    let plan = planned();
    let secret = |name: &str| name.to_owned();
    assert_eq!(
        plan.credentials.by_agent,
        [
            AgentCredential::PublicKeys {
                secret: secret("agent"),
                users: vec!["root".to_owned(), "debian".to_owned()],
            },
            AgentCredential::Passwords {
                secret: secret("passwords")
            },
        ]
    );
    let dirs: Vec<_> = plan.credentials.secrets.keys().map(String::as_str).collect();
    assert_eq!(dirs, ["agent", "passwords", "seed"]);
    let seeds: Vec<_> = plan
        .disks
        .iter()
        .filter_map(|disk| match &disk.source {
            DiskSource::CloudInit { public_keys, .. } => Some(public_keys),
            _ => None,
        })
        .collect();
    assert_eq!(seeds, [&[std::path::PathBuf::from("/secrets/seed")]]);
}

#[test]
fn a_secret_without_data_names_the_remedy() {
    let mut resources = with_secrets();
    resources.volumes.remove("agent-access-cred");
    let errors = plan(&vmi(&manifest()), &resources).unwrap_err();
    let text = errors[0].to_string();
    assert!(
        text.starts_with("spec.accessCredentials[1]: ") && text.ends_with("--volume agent-access-cred=DIR"),
        "{text}"
    );
}

#[test]
fn a_running_vm_keeps_its_credentials() {
    let plan = planned();
    plan.live(&vmi(&manifest())).unwrap();
    let mut changed = manifest();
    changed["spec"]["accessCredentials"][1]["sshPublicKey"]["propagationMethod"] =
        json!({"qemuGuestAgent": {"users": ["root"]}});
    let errors = plan.live(&vmi(&changed)).unwrap_err();
    assert_eq!(errors[0].field, "spec.accessCredentials");
    assert!(errors[0].to_string().contains("restart the VM"), "{}", errors[0]);
}
