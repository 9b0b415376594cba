//! Reading of objects: what each kind gives, and the errors of its values.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn read_all(text: &str) -> Vec<Object> {
    read_objects(text).unwrap()
}

fn one(value: &Value) -> ObjectKind {
    read_all(&value.to_string()).remove(0).kind
}

/// The errors of an object, a line each.
fn faults(value: &Value) -> Vec<String> {
    match read_objects(&value.to_string()) {
        Ok(_) => Vec::new(),
        Err(error) => error.to_string().lines().map(str::to_owned).collect(),
    }
}

#[track_caller]
fn only_fault(value: &Value, want: &str) {
    assert_eq!(faults(value), [want], "{value}");
}

fn secret(fields: Value) -> Value {
    let mut secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}});
    merge(&mut secret, fields);
    secret
}

fn claim(spec: Value) -> Value {
    let mut whole = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
    merge(&mut whole, spec);
    json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"}, "spec": whole})
}

fn data_volume(spec: Value) -> Value {
    json!({"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "metadata": {"name": "root"}, "spec": spec})
}

/// A DataVolume with this source and 1 GiB.
fn sourced(source: Value) -> Value {
    data_volume(json!({"source": source, "storage": {"resources": {"requests": {"storage": "1Gi"}}}}))
}

fn vm(spec: Value) -> Value {
    let mut whole = json!({
        "runStrategy": "Always",
        "template": {"spec": {"domain": {"devices": {}}, "volumes": [{"name": "root", "dataVolume": {"name": "root"}}]}},
    });
    merge(&mut whole, spec);
    json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "vm", "namespace": "ns"}, "spec": whole})
}

fn merge(target: &mut Value, fields: Value) {
    for (name, value) in fields.as_object().unwrap() {
        target[name] = value.clone();
    }
}

#[test]
fn a_manifest_gives_its_objects_in_order() {
    let text = "
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Secret, metadata: {name: a}, stringData: {k: v}}
- {apiVersion: v1, kind: Service, metadata: {name: web, namespace: prod}, spec: {any: 1}}
---
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: b}
spec: {domain: {devices: {}}}
---
apiVersion: other.example/v1
kind: Secret
metadata: {name: c}
";
    let objects = read_all(text);
    let names: Vec<_> = objects.iter().map(|object| object.document.as_deref()).collect();
    assert_eq!(names, [Some("a"), Some("prod/web"), Some("b"), Some("c")]);
    assert!(matches!(&objects[0].kind, ObjectKind::Secret(secret) if secret.data["k"] == b"v"));
    assert!(matches!(&objects[1].kind, ObjectKind::Other(other) if other.to_string() == "Service prod/web"));
    assert!(
        matches!(&objects[2].kind, ObjectKind::VirtualMachineInstance(vmi) if vmi.document.as_deref() == Some("b"))
    );
    assert!(matches!(&objects[3].kind, ObjectKind::Other(other) if other.to_string() == "Secret c"));
    assert_eq!(read_all(""), []);
}

#[test]
fn envelopes_have_errors_like_those_of_vms() {
    let version =
        |version: &str, kind: &str| json!({"apiVersion": version, "kind": kind, "metadata": {"name": "a"}});
    only_fault(
        &version("v2", "Secret"),
        "apiVersion: Unsupported value: 'v2' is not supported; use v1",
    );
    only_fault(
        &version("", "ConfigMap"),
        "apiVersion: Unsupported value: '' is not supported; use v1",
    );
    only_fault(
        &version("instancetype.kubevirt.io/v1alpha2", "VirtualMachinePreference"),
        "apiVersion: Unsupported value: 'instancetype.kubevirt.io/v1alpha2' is not supported; use \
         instancetype.kubevirt.io/v1beta1",
    );
    only_fault(
        &secret(json!({"datas": {}})),
        "datas: Invalid value: datas in body is a forbidden property",
    );
    only_fault(
        &secret(json!({"metadata": {}})),
        "metadata.name: Required value: metadata.name in body is required",
    );
    let both = format!("{}\n{}", secret(json!({"a": 1})), claim(json!({"b": 1})));
    assert_eq!(
        read_objects(&both).unwrap_err().to_string(),
        "keys: a: Invalid value: a in body is a forbidden property\n\
         data: spec.b: Invalid value: spec.b in body is a forbidden property"
    );
}

#[test]
fn secrets_are_decoded_and_stay_secret() {
    let ObjectKind::Secret(read) = one(&secret(json!({
        "data": {"a": "YQ==", "b": "Yg==\n"}, "stringData": {"b": "plain"}, "immutable": true,
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
fn claims_have_modes_size_and_source() {
    let ObjectKind::PersistentVolumeClaim(read) = one(&claim(json!({
        "volumeMode": "Block", "storageClassName": "fast", "dataSource": {"kind": "PersistentVolumeClaim", "name": "golden"},
    }))) else {
        panic!()
    };
    assert_eq!(
        read.spec,
        ClaimSpec {
            access_modes: vec![AccessMode::ReadWriteOnce],
            volume_mode: VolumeMode::Block,
            storage_class_name: Some("fast".to_owned()),
            size: Some(1 << 30),
            data_source: Some("golden".to_owned()),
        }
    );
    let storage = |size: Value| json!({"resources": {"requests": {"storage": size}}});
    for (spec, want) in [
        (
            json!({"accessModes": []}),
            "spec.accessModes: Required value: at least 1 access mode is required",
        ),
        (
            json!({"accessModes": ["ReadWrite"]}),
            "spec.accessModes: Unsupported value: \"ReadWrite\": supported values: \"ReadOnlyMany\", \
             \"ReadWriteMany\", \"ReadWriteOnce\", \"ReadWriteOncePod\"",
        ),
        (
            json!({"accessModes": ["ReadWriteOncePod", "ReadOnlyMany"]}),
            "spec.accessModes: Invalid value: may not use ReadWriteOncePod with other access modes",
        ),
        (
            json!({"resources": {}}),
            "spec.resources.requests.storage: Required value: spec.resources.requests.storage in body is required",
        ),
        (
            storage(json!(0)),
            "spec.resources.requests.storage: Invalid value: \"0\": must be greater than zero",
        ),
        (
            storage(json!("-1Gi")),
            "spec.resources.requests.storage: Invalid value: \"-1Gi\": must be greater than zero",
        ),
        (
            json!({"volumeMode": "File"}),
            "spec.volumeMode: Unsupported value: \"File\": supported values: \"Block\", \"Filesystem\"",
        ),
        (
            json!({"dataSource": {"kind": "VolumeSnapshot", "apiGroup": "snapshot.storage.k8s.io", "name": "s"}}),
            "spec.dataSource.kind: Unsupported value: \"VolumeSnapshot\" cannot be copied; only a \
             PersistentVolumeClaim can",
        ),
        (
            json!({
                "dataSource": {"kind": "PersistentVolumeClaim", "name": "a"},
                "dataSourceRef": {"kind": "PersistentVolumeClaim", "name": "b"},
            }),
            "spec.dataSource: Invalid value: must match dataSourceRef",
        ),
    ] {
        only_fault(&claim(spec), want);
    }
    assert!(faults(&claim(json!({"volumeName": "pv"})))[0].starts_with("spec.volumeName: Unsupported value"));
    assert!(
        faults(&claim(json!({"storageClassName": "A b"})))[0].starts_with("spec.storageClassName: Invalid")
    );
    assert!(faults(&claim(storage(json!("much"))))[0].contains("spec.resources.requests.storage 'much'"));
    let noted = read_all(&claim(json!({"volumeAttributesClassName": "gold"})).to_string());
    assert_eq!(noted[0].notes[0].field, "spec.volumeAttributesClassName");
}

#[test]
fn data_volumes_have_a_source_and_a_claim() {
    let ObjectKind::DataVolume(read) = one(&sourced(json!({"blank": {}}))) else {
        panic!()
    };
    assert_eq!(read.source, DataVolumeSource::Blank);
    assert!(read.by_storage);
    assert_eq!(read.claim.access_modes, [AccessMode::ReadWriteOnce]);
    let copy = json!({"source": {"pvc": {"namespace": "golden", "name": "debian"}}, "storage": {}});
    let ObjectKind::DataVolume(read) = one(&data_volume(copy)) else {
        panic!()
    };
    assert_eq!(read.claim.size, None);
    let pvc = |modes: Value| json!({"accessModes": modes, "resources": {"requests": {"storage": "1Gi"}}});
    let blank = json!({"blank": {}});
    for (spec, want) in [
        (
            json!({"source": blank}),
            "spec: Invalid value: Missing Data volume PVC or Storage",
        ),
        (
            json!({"source": blank, "pvc": pvc(json!(["ReadWriteOnce"])), "storage": {"resources": {"requests": {"storage": 1}}}}),
            "spec: Invalid value: Duplicate storage definition, both target storage and target pvc defined",
        ),
        (
            json!({"source": blank, "storage": {}}),
            "spec.storage.resources.requests.storage: Invalid value: Storage size is missing",
        ),
        (
            json!({"source": blank, "pvc": pvc(json!([]))}),
            "spec.pvc.accessModes: Required value: at least 1 access mode is required",
        ),
        (
            json!({"source": blank, "pvc": pvc(json!(["ReadWriteOnce", "ReadOnlyMany"]))}),
            "spec.pvc.accessModes: Invalid value: PVC multiple accessModes",
        ),
        (
            json!({"pvc": pvc(json!(["ReadWriteOnce"]))}),
            "spec.source: Invalid value: Data volume should have either Source or SourceRef, or be externally populated",
        ),
        (
            json!({"source": {}, "pvc": pvc(json!(["ReadWriteOnce"]))}),
            "spec.source: Invalid value: Missing Data volume source",
        ),
        (
            json!({"source": {"blank": {}, "http": {"url": "http://a"}}, "pvc": pvc(json!(["ReadWriteOnce"]))}),
            "spec.source: Invalid value: Multiple Data volume sources",
        ),
        (
            json!({"source": blank, "contentType": "archive", "pvc": pvc(json!(["ReadWriteOnce"]))}),
            "spec.contentType: Unsupported value: archives are not unpacked; use an image of a disk",
        ),
        (
            json!({"source": blank, "contentType": "x", "pvc": pvc(json!(["ReadWriteOnce"]))}),
            "spec.contentType: Invalid value: ContentType not one of: kubevirt, archive",
        ),
    ] {
        only_fault(&data_volume(spec), want);
    }
    for source in ["s3", "gcs", "imageio", "vddk", "upload", "snapshot"] {
        only_fault(
            &sourced(json!({source: {}})),
            &format!(
                "spec.source.{source}: Unsupported value: this source is not supported; supported sources: blank, \
                 http, registry and pvc"
            ),
        );
    }
    let refused =
        json!({"sourceRef": {"kind": "DataSource", "name": "d"}, "checkpoints": [{}], "storage": {}});
    let fields: Vec<_> = faults(&data_volume(refused))
        .iter()
        .map(|line| line.split(':').next().unwrap().to_owned())
        .collect();
    assert_eq!(
        fields,
        [
            "spec.storage.resources.requests.storage",
            "spec.sourceRef",
            "spec.checkpoints"
        ]
    );
}

#[test]
fn web_sources_are_checked() {
    let digest = "A".repeat(64);
    let ObjectKind::DataVolume(read) = one(&sourced(json!({"http": {
        "url": "https://u@host:8443/a.img?x=1", "secretRef": "s", "certConfigMap": "c",
        "extraHeaders": ["X-Token: a: b "], "secretExtraHeaders": ["h"], "checksum": format!("sha256:{digest}"),
    }}))) else {
        panic!()
    };
    let DataVolumeSource::Http(http) = read.source else {
        panic!()
    };
    assert_eq!(http.extra_headers, [("X-Token".to_owned(), "a: b".to_owned())]);
    assert_eq!(
        http.checksum,
        Some(Checksum {
            algorithm: ChecksumAlgorithm::Sha256,
            digest: "a".repeat(64)
        })
    );
    for (url, want) in [
        ("", "source URL is empty"),
        ("host/a", "Invalid source URL: host/a"),
        ("http://", "Invalid source URL: http://"),
        ("http://:80/", "Invalid source URL: http://:80/"),
        ("http://a/b c", "Invalid source URL: http://a/b c"),
        ("ftp://a/b", "Invalid source URL scheme: ftp://a/b"),
    ] {
        only_fault(
            &sourced(json!({"http": {"url": url}})),
            &format!("spec.source.http.url: Invalid value: {want}"),
        );
    }
    for checksum in ["sha256:ab", "crc:00", "md5", &format!("md5:{}", "g".repeat(32))] {
        let lines = faults(&sourced(
            json!({"http": {"url": "http://a", "checksum": checksum}}),
        ));
        assert!(
            lines.len() == 1 && lines[0].starts_with("spec.source.http.checksum: Invalid value: '"),
            "{lines:?}"
        );
    }
    for header in ["no colon", "a b: c", ": c", "a: b\r\nc: d"] {
        only_fault(
            &sourced(json!({"http": {"url": "http://a", "extraHeaders": ["A: b", header]}})),
            "spec.source.http.extraHeaders[1]: Invalid value: must be one line 'NAME: VALUE'",
        );
    }
}

#[test]
fn registries_are_checked() {
    let ObjectKind::DataVolume(read) = one(&sourced(
        json!({"registry": {"url": "docker://quay.io/a/b:1", "pullMethod": "node"}}),
    )) else {
        panic!()
    };
    let DataVolumeSource::Registry(registry) = read.source else {
        panic!()
    };
    assert_eq!(
        (registry.image.as_str(), registry.pull_method),
        ("quay.io/a/b:1", PullMethod::Node)
    );
    for (registry, want) in [
        (
            json!({}),
            ": Invalid value: Source registry should have either URL or ImageStream",
        ),
        (
            json!({"url": "quay.io/a"}),
            ".url: Invalid value: Illegal registry source URL scheme quay.io/a",
        ),
        (
            json!({"url": "docker://"}),
            ".url: Invalid value: Illegal registry source URL docker://",
        ),
        (
            json!({"url": "oci-archive:/a"}),
            ".url: Unsupported value: oci-archive names a file of CDI's importer; use docker://",
        ),
        (
            json!({"imageStream": "a"}),
            ".imageStream: Unsupported value: image streams need OpenShift; use url",
        ),
        (
            json!({"url": "docker://a", "pullMethod": "push"}),
            ".pullMethod: Invalid value: ImportMethod push is neither pod, node or \"\"",
        ),
        (
            json!({"url": "docker://a", "platform": {"architecture": "arm64"}}),
            ".platform.architecture: Unsupported value: 'arm64' is not supported; use amd64",
        ),
    ] {
        only_fault(
            &sourced(json!({"registry": registry})),
            &format!("spec.source.registry{want}"),
        );
    }
}

#[test]
fn virtual_machines_are_kept_whole() {
    let template = json!({"metadata": {"name": "root", "labels": {"a": "b"}}, "spec": {"source": {"blank": {}}, "storage": {"resources": {"requests": {"storage": "1Gi"}}}}});
    let ObjectKind::VirtualMachine(read) = one(&vm(json!({
        "dataVolumeTemplates": [template],
        "instancetype": {"name": "small"},
        "preference": {"inferFromVolume": "root", "inferFromVolumeFailurePolicy": "IgnoreInferFromVolumeFailure"},
    }))) else {
        panic!()
    };
    assert_eq!(read.run_strategy, RunStrategy::Always);
    assert_eq!(read.data_volume_templates[0].metadata.namespace, "ns");
    assert_eq!(read.instancetype.unwrap().name, "small");
    assert_eq!(
        read.preference.unwrap().infer_from_volume_failure_policy,
        InferFromVolumeFailurePolicy::Ignore
    );
    let renamed = |name: Value| {
        let mut template = template.clone();
        template["metadata"]["name"] = name;
        json!({"dataVolumeTemplates": [template]})
    };
    for (spec, want) in [
        (
            json!({"running": true}),
            "spec.running: Invalid value: Running and RunStrategy are mutually exclusive",
        ),
        (
            json!({"runStrategy": "Ever"}),
            "spec.runStrategy: Invalid value: Invalid RunStrategy (Ever)",
        ),
        (
            json!({"instancetype": {}}),
            "spec.instancetype: Not found: Either Name or InferFromVolume should be provided within the \
             InstancetypeMatcher",
        ),
        (
            json!({"preference": {"name": "a", "inferFromVolume": "root"}}),
            "spec.preference.name: Unsupported value: Name already set, should be cleared before setting \
             inferFromVolume",
        ),
        (
            json!({"preference": {"kind": "a", "inferFromVolume": "root"}}),
            "spec.preference.kind: Unsupported value: Kind already set, should be cleared before setting \
             inferFromVolume",
        ),
        (
            json!({"preference": {"name": "a", "inferFromVolumeFailurePolicy": "x"}}),
            "spec.preference.inferFromVolumeFailurePolicy: Invalid value: Invalid value 'x' for \
             InferFromVolumeFailurePolicy",
        ),
        (
            renamed(json!("")),
            "spec.dataVolumeTemplate[0].name: Required value: 'name' field must not be empty for DataVolumeTemplate \
             entry spec.dataVolumeTemplate[0].name.",
        ),
        (
            renamed(json!("other")),
            "spec.dataVolumeTemplate[0]: Required value: DataVolumeTemplate entry spec.dataVolumeTemplate[0] must be \
             referenced in the VMI template's 'volumes' list",
        ),
        (
            json!({"template": {"spec": {"domain": {"devices": {}, "cpus": 1}}}}),
            "spec.template.spec.domain.cpus: Invalid value: spec.template.spec.domain.cpus in body is a forbidden \
             property",
        ),
        (
            json!({"template": {}}),
            "spec.template.spec: Required value: spec.template.spec in body is required",
        ),
    ] {
        only_fault(&vm(spec), want);
    }
    assert!(
        faults(&vm(json!({"instancetype": {"name": "a", "revisionName": "r"}})))[0]
            .starts_with("spec.instancetype.revisionName")
    );
    assert_eq!(
        faults(&vm(json!({"dataVolumeTemplates": [{"metadata": {"name": "root"}, "spec": {"source": {"http": {"url": ""}}, "storage": {}}}]}))).len(),
        2
    );
}

#[test]
fn instance_types_and_preferences_are_checked() {
    let object = |kind: &str, spec: Value| json!({"apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": kind, "metadata": {"name": "a"}, "spec": spec});
    let ObjectKind::Instancetype(read) = one(&object(
        "VirtualMachineClusterInstancetype",
        json!({"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}, "gpus": [{"name": "g", "deviceName": "d"}]}),
    )) else {
        panic!()
    };
    assert_eq!(read.metadata.namespace, "");
    assert_eq!(read.spec.cpu.guest, 2);
    for (spec, want) in [
        (
            json!({"memory": {"guest": 1}}),
            "spec.cpu: Required value: spec.cpu in body is required",
        ),
        (
            json!({"cpu": {"guest": 1}, "memory": {"guest": 1, "overcommitPercent": 101}}),
            "spec.memory.overcommitPercent: Invalid value: spec.memory.overcommitPercent in body should be less than \
             or equal to 100",
        ),
        (
            json!({"cpu": {"guest": 1}, "memory": {"guest": 1, "overcommitPercent": 5, "hugepages": {"pageSize": "2Mi"}}}),
            "spec.memory.overcommitPercent: Invalid value: spec.memory.overcommitPercent and spec.memory.hugepages \
             should not be requested together.",
        ),
    ] {
        only_fault(&object("VirtualMachineInstancetype", spec), want);
    }
    let spread =
        |options: Value| json!({"cpu": {"preferredCPUTopology": "spread", "spreadOptions": options}});
    for (spec, want) in [
        (
            json!({"cpu": {"preferredCPUTopology": "dies"}}),
            "spec.cpu.preferredCPUTopology: Invalid value: unknown preferredCPUTopology dies",
        ),
        (
            spread(json!({"across": "Dies"})),
            "spec.cpu.spreadOptions.across: Invalid value: across Dies is not supported",
        ),
        (
            spread(json!({"across": "CoresThreads", "ratio": 4})),
            "spec.cpu.spreadOptions.ratio: Invalid value: only a ratio of 2 (1 core 2 threads) is allowed when spreading \
             vCPUs over cores and threads",
        ),
        (
            spread(json!({"ratio": 0})),
            "spec.cpu.spreadOptions.ratio: Invalid value: must be greater than zero",
        ),
    ] {
        only_fault(&object("VirtualMachinePreference", spec), want);
    }
}

#[test]
fn errors_are_bounded() {
    let bad: Map<_, _> = (0..5000).map(|n| (format!("/{n}"), json!(""))).collect();
    let lines = faults(&secret(json!({"stringData": bad})));
    assert_eq!(lines.len(), 101);
    assert!(lines[100].ends_with("and 4900 more validation errors"));
}

/// Arbitrary JSON with names that exist.
pub(crate) fn any_json() -> impl Strategy<Value = Value> {
    let names = || {
        prop::sample::select(vec![
            "a",
            "name",
            "namespace",
            "metadata",
            "spec",
            "data",
            "stringData",
            "type",
            "source",
            "http",
            "url",
            "checksum",
            "registry",
            "pvc",
            "storage",
            "resources",
            "requests",
            "accessModes",
            "dataSource",
            "kind",
            "template",
            "domain",
            "devices",
            "disks",
            "volumes",
            "cpu",
            "guest",
            "memory",
            "instancetype",
            "preference",
            "inferFromVolume",
            "dataVolumeTemplates",
            "running",
            "labels",
            "annotations",
            "features",
            "interfaces",
        ])
    };
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        names().prop_map(Value::from),
        prop::sample::select(vec!["1Gi", "", "é", "http://a", "docker://a", "YQ==", "md5:"])
            .prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 60, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(names().prop_map(str::to_owned), inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

const KINDS: &[(&str, &str)] = &[
    ("v1", "Secret"),
    ("v1", "ConfigMap"),
    ("v1", "PersistentVolumeClaim"),
    ("cdi.kubevirt.io/v1beta1", "DataVolume"),
    ("instancetype.kubevirt.io/v1beta1", "VirtualMachineInstancetype"),
    (
        "instancetype.kubevirt.io/v1beta1",
        "VirtualMachineClusterPreference",
    ),
    ("kubevirt.io/v1", "VirtualMachine"),
    ("kubevirt.io/v1", "VirtualMachineInstance"),
    ("v1", "Service"),
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_object_makes_reading_panic(kind in 0..KINDS.len(), body in any_json(), spec in any_json(), named in any::<bool>()) {
        let mut object = if body.is_object() { body } else { json!({}) };
        (object["apiVersion"], object["kind"]) = (KINDS[kind].0.into(), KINDS[kind].1.into());
        if named {
            object["metadata"] = json!({"name": "a"});
            object["spec"] = spec;
        }
        if let Err(error) = read_objects(&object.to_string()) {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn no_text_makes_reading_panic(text in "\\PC{0,200}") {
        let _ = read_objects(&text);
    }
}
