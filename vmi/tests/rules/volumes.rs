//! Rules for volumes.

use super::common::{faults, refused, with};
use super::{INVALID, MISSING, REQUIRED, volumes};
use serde_json::{Value, json};

#[test]
fn a_list_that_is_too_long_is_the_only_fault() {
    for (pointer, field, length) in [
        ("volumes", "spec.volumes", 257),
        ("domain/devices/disks", "spec.domain.devices.disks", 257),
        ("domain/devices/disks", "spec.domain.devices.disks", 40_000),
        ("networks", "spec.networks", 257),
        ("domain/devices/interfaces", "spec.domain.devices.interfaces", 257),
    ] {
        let entries: Vec<_> = (0..length).map(|_| json!({"name": "Same"})).collect();
        let faults = faults(&with(&[(pointer, json!(entries))]));
        let lines: Vec<_> = faults.iter().map(ToString::to_string).collect();
        let line = format!("{field}: Invalid value: {field} list exceeds the 256 element limit in length");
        assert_eq!(lines, [line], "{length}");
    }
}

#[test]
fn volume_names_are_unique() {
    let disk = json!({"name": "root", "emptyDisk": {"capacity": "1Gi"}});
    refused(
        &volumes(json!([disk, disk])),
        INVALID,
        "spec.volumes[1].name",
        "spec.volumes[1] and spec.volumes[0] must not have the same Name.",
    );
}

#[test]
fn one_source() {
    let text = "spec.volumes[0] must have exactly one source type set";
    refused(
        &volumes(json!([{"name": "root"}])),
        INVALID,
        "spec.volumes[0]",
        text,
    );
    let two = json!([{"name": "root", "emptyDisk": {"capacity": "1Gi"}, "dataVolume": {"name": "x"}}]);
    refused(&volumes(two), INVALID, "spec.volumes[0]", text);
}

#[test]
fn names_of_sources() {
    let list = volumes(json!([{"name": "a", "dataVolume": {"name": ""}}]));
    refused(
        &list,
        REQUIRED,
        "spec.volumes[0].name",
        "DataVolume 'name' must be set",
    );
    for (source, field) in [
        (json!({"name": "a", "configMap": {}}), "configMap.name"),
        (json!({"name": "a", "secret": {}}), "secret.secretName"),
        (
            json!({"name": "a", "serviceAccount": {}}),
            "serviceAccount.serviceAccountName",
        ),
    ] {
        let field = format!("spec.volumes[0].{field}");
        refused(
            &volumes(json!([source])),
            INVALID,
            &field,
            &format!("{field} is a required field"),
        );
    }
}

#[test]
fn every_source_that_is_served_is_valid() {
    for source in [
        json!({"configMap": {"name": "a", "optional": true, "volumeLabel": "x"}}),
        json!({"secret": {"secretName": "a"}}),
        json!({"downwardAPI": {"fields": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}}),
        json!({"serviceAccount": {"serviceAccountName": "a"}}),
        json!({"ephemeral": {"persistentVolumeClaim": {"claimName": "a"}}}),
    ] {
        let mut volume = source;
        volume["name"] = json!("a");
        assert_eq!(faults(&with(&volumes(json!([volume])))), []);
    }
}

#[test]
fn downward_metrics_are_on_a_disk_on_virtio() {
    let with_disk = |disk: Value| {
        let mut changes = volumes(json!([{"name": "m", "downwardMetrics": {}}])).to_vec();
        changes.push(("domain/devices/disks", json!([disk])));
        changes
    };
    let field = "spec.domain.devices.disks[0].disk";
    let text = format!("DownwardMetrics volume must be mapped to a disk, but disk is not set on {field}.");
    refused(
        &with_disk(json!({"name": "m", "cdrom": {}})),
        REQUIRED,
        field,
        &text,
    );
    let text = format!("DownwardMetrics volume must be mapped to virtio bus, but {field}.bus is set to scsi");
    let scsi = with_disk(json!({"name": "m", "disk": {"bus": "scsi"}}));
    refused(&scsi, INVALID, &format!("{field}.bus"), &text);
    for disk in [json!({}), json!({"bus": "virtio"})] {
        assert_eq!(faults(&with(&with_disk(json!({"name": "m", "disk": disk})))), []);
    }
}

#[test]
fn one_of_a_kind() {
    for (source, name) in [
        ("serviceAccount", "serviceAccount"),
        ("downwardMetrics", "downwardMetric"),
        ("memoryDump", "memory dump"),
    ] {
        let list = json!([{"name": "a", source: {}}, {"name": "b", source: {}}]);
        let text = format!("spec.volumes must have max one {name} volume set");
        refused(&volumes(list), INVALID, "spec.volumes", &text);
    }
}

#[test]
fn paths_in_images() {
    let field = "spec.volumes[0].containerDisk";
    let list = |path: &str| volumes(json!([{"name": "a", "containerDisk": {"image": "i", "path": path}}]));
    refused(
        &list("/"),
        INVALID,
        field,
        &format!("{field} must not point to root"),
    );
    for path in ["disk.img", "/a/../b", "/a//b", "/./a", "//", "/a//"] {
        let text = format!("{field} must be an absolute path to a file without relative components");
        refused(&list(path), INVALID, field, &text);
    }
    assert_eq!(faults(&with(&list("/disk/a.img/"))), []);
}

#[test]
fn cloud_init_of_both_kinds() {
    for kind in ["cloudInitNoCloud", "cloudInitConfigDrive"] {
        cloud_init(kind);
    }
}

fn cloud_init(kind: &str) {
    let field = &format!("spec.volumes[0].{kind}");
    let list = |source: Value| volumes(json!([{"name": "a", kind: source}]));
    let text = format!("{field} must have only one userdatasource set.");
    refused(
        &list(json!({"userData": "a", "userDataBase64": "YQ=="})),
        INVALID,
        field,
        &text,
    );
    let both = json!({"userData": "a", "secretRef": {"name": "s"}});
    refused(&list(both), INVALID, field, &text);
    let text = format!("{field} must have only one networkdata source set.");
    let both = json!({"networkData": "a", "networkDataSecretRef": {"name": "s"}});
    refused(&list(both), INVALID, field, &text);
    refused(
        &list(json!({"networkData": "a", "networkDataBase64": "YQ=="})),
        INVALID,
        field,
        &text,
    );
    let text =
        format!("{field} userdata exceeds 2048 byte limit. Should use UserDataSecretRef for larger data.");
    refused(
        &list(json!({"userData": "a".repeat(2049)})),
        INVALID,
        field,
        &text,
    );
    let text = format!(
        "{field} networkdata exceeds 2048 byte limit. Should use NetworkDataSecretRef for larger data."
    );
    refused(
        &list(json!({"networkData": "a".repeat(2049)})),
        INVALID,
        field,
        &text,
    );
    let text = format!("{field} must have at least one userdatasource or one networkdatasource set.");
    refused(&list(json!({})), INVALID, field, &text);
    refused(&list(json!({"userData": ""})), INVALID, field, &text);
    for name in ["userDataBase64", "networkDataBase64"] {
        let field = format!("{field}.{name}");
        let text = format!("{field} is not a valid base64 value.");
        refused(
            &list(json!({name: "#######garbage******"})),
            INVALID,
            &field,
            &text,
        );
    }
    for good in [
        json!({"userData": "a".repeat(2048)}),
        json!({"secretRef": {"name": "s"}}),
        json!({"networkDataSecretRef": {"name": "s"}, "userData": "a"}),
    ] {
        assert_eq!(faults(&with(&list(good))), []);
    }
}

#[test]
fn host_disks() {
    let field = "spec.volumes[0].hostDisk";
    let list = |source: Value| volumes(json!([{"name": "a", "hostDisk": source}]));
    let text = format!("{field}.path is required for hostDisk volume");
    refused(
        &list(json!({"path": "", "type": "Disk"})),
        MISSING,
        &format!("{field}.path"),
        &text,
    );
    let text = format!("{field}.type has invalid value 'Block', allowed are 'Disk' or 'DiskOrCreate'");
    refused(
        &list(json!({"path": "/a", "type": "Block"})),
        INVALID,
        &format!("{field}.type"),
        &text,
    );
    let text = format!("{field}.capacity is allowed to pass only with {field}.type equal to 'DiskOrCreate'");
    let source = json!({"path": "/a", "type": "Disk", "capacity": "1Gi"});
    refused(&list(source), INVALID, &format!("{field}.capacity"), &text);
}
