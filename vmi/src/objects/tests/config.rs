//! Secrets and ConfigMaps.

use super::*;

#[test]
fn secrets_are_decoded_and_stay_secret() {
    let ObjectKind::Secret(read) = one(&secret(json!({
        "data": {"a": "YR==", "b": "Yg==\n"}, "stringData": {"b": "plain"}, "immutable": true,
    }))) else {
        panic!()
    };
    assert_eq!(read.secret_type, "Opaque");
    assert_eq!(
        (read.data["a"].as_slice(), read.data["b"].as_slice()),
        (&b"a"[..], &b"plain"[..])
    );
    assert!(read.immutable);
    assert!(!format!("{read:?}").contains("plain") && !format!("{read:?}").contains("112"));
    only_fault(
        &secret(json!({"data": {"a": "hunter2!"}})),
        "data[a]: Invalid value: data[a] is not a valid base64 value.",
    );
}

#[test]
fn keys_are_names_of_files() {
    for (key, fault) in [
        (
            "a/b",
            "a valid config key must consist of alphanumeric characters",
        ),
        ("", "a valid config key"),
        (".", "must not be '.'"),
        ("..", "must not be '..'"),
        ("..data", "must not start with '..'"),
    ] {
        let lines = faults(&secret(json!({"stringData": {key: ""}})));
        assert!(
            lines[0].starts_with(&format!("stringData[{key}]: Invalid value: \"{key}\": {fault}")),
            "{lines:?}"
        );
    }
    assert_eq!(
        faults(&secret(json!({"stringData": {"x".repeat(254): ""}}))).len(),
        1
    );
    assert!(faults(&secret(json!({"stringData": {".a-B_c": ""}}))).is_empty());
}

#[test]
fn secrets_have_the_keys_of_their_type() {
    for (secret_type, data, want) in [
        (
            "kubernetes.io/tls",
            json!({"tls.crt": ""}),
            "data[tls.key]: Required value: tls.key is required",
        ),
        (
            "kubernetes.io/basic-auth",
            json!({}),
            "data[username]: Required value: username or password",
        ),
        (
            "kubernetes.io/dockerconfigjson",
            json!({}),
            "data[.dockerconfigjson]: Required value",
        ),
        (
            "kubernetes.io/dockerconfigjson",
            json!({".dockerconfigjson": "["}),
            "data[.dockerconfigjson]: Invalid value: must be a JSON object",
        ),
        (
            "kubernetes.io/ssh-auth",
            json!({}),
            "data[ssh-privatekey]: Required value",
        ),
    ] {
        let lines = faults(&secret(json!({"type": secret_type, "stringData": data})));
        assert!(lines.len() == 1 && lines[0].starts_with(want), "{lines:?}");
    }
    assert!(faults(&secret(json!({"type": "example.com/any"}))).is_empty());
}

#[test]
fn config_maps_have_texts_and_bytes() {
    let map = |fields: Value| {
        let mut map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "files"}});
        merge(&mut map, fields);
        map
    };
    let ObjectKind::ConfigMap(read) = one(&map(json!({"data": {"a": "1"}, "binaryData": {"b": "/w=="}})))
    else {
        panic!()
    };
    let files: Vec<_> = read.files().collect();
    assert_eq!(files, [("a", &b"1"[..]), ("b", &[0xff][..])]);
    only_fault(
        &map(json!({"data": {"a": ""}, "binaryData": {"a": ""}})),
        "data[a]: Invalid value: \"a\": duplicate of key present in binaryData",
    );
}

#[test]
fn a_key_without_a_value_is_an_empty_file() {
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "files", "labels": null},
        "data": {"a": null}, "binaryData": {"b": null}, "immutable": null});
    let object = read_all(&map.to_string()).remove(0);
    let ObjectKind::ConfigMap(read) = object.kind else {
        panic!()
    };
    assert_eq!(
        read.files().collect::<Vec<_>>(),
        [("a", &b""[..]), ("b", &b""[..])]
    );
    let stored = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "files"},
        "data": {"a": ""}, "binaryData": {"b": ""}});
    assert_eq!(object.value, stored);
    let given = secret(json!({"data": {"a": null}, "stringData": {"b": null}}));
    let ObjectKind::Secret(read) = one(&given) else {
        panic!()
    };
    assert_eq!(read.data, [("a".into(), vec![]), ("b".into(), vec![])].into());
    let ObjectKind::Secret(read) = one(&secret(json!({"data": null}))) else {
        panic!()
    };
    assert!(read.data.is_empty());
}

#[test]
fn errors_are_bounded() {
    let bad: Map<_, _> = (0..5000).map(|n| (format!("/{n}"), json!(""))).collect();
    let lines = faults(&secret(json!({"stringData": bad})));
    assert_eq!(lines.len(), 101);
    assert!(lines[100].ends_with("and 4900 more validation errors"));
}
