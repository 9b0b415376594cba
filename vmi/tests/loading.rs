//! From text to a manifest: faults of schema and envelope, text that is none, lists.

mod common;

use common::{base, faults, with};
use husk_vmi::{LoadError, Loaded, load};
use serde_json::{Value, json};

#[test]
fn schema_faults_are_all_reported_at_once_with_paths() {
    let mut manifest = base();
    manifest["very"] = json!("unexpected");
    manifest["spec"] = json!({
        "extremely": 1,
        "domain": {"cpu": {"cores": "2", "sockets": -1, "threads": 4_294_967_296_i64}, "devices": {"disks": [{"disk": 3, "io": null}]}},
        "volumes": {"name": "x"},
        "hostname": true,
        "terminationGracePeriodSeconds": 1.5,
    });
    let faults: Vec<String> = faults(&manifest).into_iter().map(|fault| fault.message).collect();
    insta::assert_snapshot!(faults.join("\n"), @"
    very in body is a forbidden property
    spec.extremely in body is a forbidden property
    spec.domain.cpu.cores in body must be of type integer: \"string\"
    spec.domain.cpu.sockets in body should be greater than or equal to 0
    spec.domain.cpu.threads in body should be less than or equal to 4294967295
    spec.domain.devices.disks[0].name in body is required
    spec.domain.devices.disks[0].disk in body must be of type object: \"integer\"
    spec.terminationGracePeriodSeconds in body must be of type integer: \"number\"
    spec.volumes in body must be of type array: \"object\"
    spec.hostname in body must be of type string: \"boolean\"
    ");
}

#[test]
fn envelope_faults_have_paths() {
    let faults_of = |change: fn(&mut Value)| {
        let mut manifest = base();
        change(&mut manifest);
        faults(&manifest)
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        faults_of(|m| m["apiVersion"] = json!("kubevirt.io/v2")),
        [
            "apiVersion: Unsupported value: 'kubevirt.io/v2' is not supported; use kubevirt.io/v1 or kubevirt.io/v1alpha3"
        ]
    );
    assert_eq!(
        faults_of(|m| m["metadata"] = json!({})),
        ["metadata.name: Required value: metadata.name in body is required"]
    );
    assert_eq!(
        faults_of(|m| m["spec"] = json!({})),
        ["spec.domain: Required value: spec.domain in body is required"]
    );
    for name in ["../up", "Up", "a/b", "-", "a b"] {
        let mut manifest = base();
        manifest["metadata"]["name"] = json!(name);
        assert_eq!(faults(&manifest)[0].field, "metadata.name");
        manifest["metadata"] = json!({"name": "a", "namespace": name});
        assert_eq!(faults(&manifest)[0].field, "metadata.namespace");
    }
    let vm = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "a"},
        "spec": {"running": true, "template": {"spec": {"domain": {}}}}});
    assert_eq!(
        faults(&vm)[0].to_string(),
        "spec.template.spec.domain.devices: Required value: spec.template.spec.domain.devices in body is required"
    );
}

#[test]
fn text_that_is_no_manifest_gives_one_line() {
    let line = |text: &str| load(text).unwrap_err().to_string();
    assert_eq!(line("a: [1, 2"), "line 1, column 4: unclosed bracket '['");
    assert_eq!(
        line("a: 1\na: 2"),
        "line 2, column 1: duplicate mapping key: a not allowed here"
    );
    assert_eq!(
        line(""),
        "no VirtualMachineInstance or VirtualMachine in the manifest"
    );
    assert_eq!(
        line("kind: Service\n---\nkind: ConfigMap"),
        "no VirtualMachineInstance or VirtualMachine in the manifest (found Service, ConfigMap)"
    );
    assert_eq!(
        line(&" ".repeat(2 << 20)),
        "the manifest is larger than the limit of 1 MiB: split it into several files"
    );
    assert_eq!(
        line(&"---\na: 1\n".repeat(300)),
        "line 513, column 1: more than 256 documents: split the manifest into several files"
    );
    assert_eq!(
        line(&"{\"a\": 1}\n".repeat(300)),
        "line 257, column 1: more than 256 documents: split the manifest into several files"
    );
    assert_eq!(
        line(&format!("a: &a 1\nb: [{}]", ["*a"; 1500].join(", "))),
        "line 2, column 4005: more than 1000 aliases (*name): replace them by their values"
    );
    let bomb = (0..9).fold("a0: &a0 [x, x, x, x, x, x, x, x]\n".to_owned(), |text, n| {
        let aliases = vec![format!("*a{n}"); 9].join(", ");
        format!("{text}a{}: &a{} [{aliases}]\n", n + 1, n + 1)
    });
    let aliases = "the aliases (*name) expand to too much data: replace them by their values";
    assert_eq!(line(&bomb), format!("line 5, column 15: {aliases}"));
    for text in [
        "[".repeat(100_000),
        "{a: ".repeat(1000),
        "- ".repeat(10_000),
        "a: *b".to_owned(),
        "\0".to_owned(),
    ] {
        let line = line(&text);
        assert!(!line.contains('\n') && line.len() < 1000, "{line}");
        assert!(!line.contains(" { "), "no Rust for people: {line}");
    }
}

#[test]
fn repeated_faults_and_repeated_text_stay_bounded() {
    let manifest = with(&[("volumes", json!(vec![1; 100_000]))]);
    let all = faults(&manifest);
    assert_eq!(all.len(), 101);
    assert_eq!(all[100].message, "and 99900 more validation errors");
    let big = "x".repeat(100_000);
    let text = format!("a: &a {big}\nb: [{}]\n", vec!["*a"; 900].join(", "));
    assert!(
        matches!(load(&text), Err(LoadError::Syntax { line: 2, message, .. }) if message.contains("aliases"))
    );
}

#[test]
fn a_list_is_taken_apart_and_json_is_read() {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [base(), {"kind": "Service", "apiVersion": "v1"}]});
    let documents = load(&serde_json::to_string_pretty(&list).unwrap()).unwrap();
    assert!(matches!(
        documents.as_slice(),
        [Loaded::Vmi(_), Loaded::Other { .. }]
    ));
}
