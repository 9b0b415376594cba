//! Claims and DataVolumes.

use super::*;

fn data_volume(spec: Value) -> Value {
    json!({"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "metadata": {"name": "root"}, "spec": spec})
}

/// A DataVolume with this source and 1 GiB.
fn sourced(source: Value) -> Value {
    data_volume(json!({"source": source, "storage": {"resources": {"requests": {"storage": "1Gi"}}}}))
}

#[test]
fn claims_have_modes_size_and_source() {
    let ObjectKind::PersistentVolumeClaim(read) = one(&claim(json!({
        "volumeMode": "Block", "storageClassName": "fast",
        "dataSource": {"kind": "PersistentVolumeClaim", "name": "golden"},
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
    let ignored = read_all(&claim(json!({"volumeAttributesClassName": "gold"})).to_string());
    assert_eq!(ignored[0].warnings[0].field, "spec.volumeAttributesClassName");
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
            json!({
                "source": blank,
                "pvc": pvc(json!(["ReadWriteOnce"])),
                "storage": {"resources": {"requests": {"storage": 1}}},
            }),
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
            "spec.source: Invalid value: Data volume should have either Source or SourceRef, or be externally \
             populated",
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
            json!({"imageStream": ""}),
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
