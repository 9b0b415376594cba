//! Rules for disks.

use super::common::{faults, refused, with};
use super::{DISK, INVALID, NIC, UNSUPPORTED, volumes};
use serde_json::{Value, json};

fn disk(more: Value) -> [(&'static str, Value); 1] {
    let mut disk = json!({"name": "root"});
    for (name, value) in more.as_object().unwrap() {
        disk[name] = value.clone();
    }
    [("domain/devices/disks", json!([disk]))]
}

#[test]
fn disk_names() {
    let twice = json!([{"name": "root"}, {"name": "root"}]);
    let field = "spec.domain.devices.disks[1].name";
    let text = "spec.domain.devices.disks[1] and spec.domain.devices.disks[0] must not have the same Name.";
    refused(&[("domain/devices/disks", twice)], INVALID, field, text);
    let field = format!("{DISK}.name");
    let text = format!("{DISK}.Name 'other' not found.");
    refused(&disk(json!({"name": "other"})), INVALID, &field, &text);
    refused(&disk(json!({"name": "other", "lun": {}})), INVALID, &field, &text);
    let empty_drive =
        json!([{"name": "root", "disk": {"bus": "virtio"}}, {"name": "other", "cdrom": {"bus": "sata"}}]);
    assert_eq!(faults(&with(&[("domain/devices/disks", empty_drive)])), []);
    let text = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start \
                and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
                '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
    refused(&disk(json!({"name": "Root"})), INVALID, &field, text);
    let list = volumes(json!([{"name": "a_b", "emptyDisk": {"capacity": "1Gi"}}]));
    refused(&list, INVALID, "spec.volumes[0].name", text);
}

#[test]
fn targets() {
    let text = format!("{DISK} can only have a single target type defined");
    refused(&disk(json!({"disk": {}, "cdrom": {}})), INVALID, DISK, &text);
    for kind in ["disk", "lun", "cdrom"] {
        let field = format!("{DISK}.{kind}.bus");
        let text =
            format!("{DISK} is set with an unrecognized bus nvme, must be one of: [virtio scsi sata usb]");
        refused(&disk(json!({kind: {"bus": "nvme"}})), INVALID, &field, &text);
        refused(
            &disk(json!({kind: {"bus": "ide"}})),
            INVALID,
            &field,
            "IDE bus is not supported",
        );
    }
    let field = format!("{DISK}.cdrom.bus");
    let text = "Bus type virtio is invalid for CD-ROM device";
    refused(&disk(json!({"cdrom": {"bus": "virtio"}})), INVALID, &field, text);
    let mut changes = disk(json!({"lun": {}})).to_vec();
    changes.push((
        "volumes",
        json!([{"name": "root", "emptyDisk": {"capacity": "1Gi"}}]),
    ));
    let field = format!("{DISK}.lun");
    for good in [
        json!({"persistentVolumeClaim": {"claimName": "a"}}),
        json!({"dataVolume": {"name": "a"}}),
    ] {
        let mut volume = good;
        volume["name"] = json!("root");
        changes[1].1 = json!([volume]);
        assert_eq!(faults(&with(&changes)), []);
    }
    changes[1].1 = json!([{"name": "root", "emptyDisk": {"capacity": "1Gi"}}]);
    let text = format!("{field} can only be mapped to a DataVolume or PersistentVolumeClaim volume.");
    refused(&changes, INVALID, &field, &text);
}

#[test]
fn boot_orders() {
    let field = format!("{DISK}.bootOrder");
    let text = format!("{DISK} must have a boot order > 0, if supplied");
    refused(&disk(json!({"bootOrder": 0})), INVALID, &field, &text);
    let changes = [
        ("domain/devices/disks/0/bootOrder", json!(1)),
        (
            "domain/devices/interfaces",
            json!([{"name": "default", "bridge": {}, "bootOrder": 1}]),
        ),
        ("networks", json!([{"name": "default", "pod": {}}])),
    ];
    let field = format!("{NIC}.bootOrder");
    refused(
        &changes,
        INVALID,
        &field,
        &format!("Boot order for {field} already set for a different device."),
    );
}

#[test]
fn serials() {
    let field = format!("{DISK}.serial");
    let text = format!("{DISK} must be made up of the following characters [A-Za-z0-9_.+-], if specified");
    refused(&disk(json!({"serial": "a b"})), INVALID, &field, &text);
    let text = format!("{DISK} must be less than or equal to 256 in length, if specified");
    refused(&disk(json!({"serial": "a".repeat(257)})), INVALID, &field, &text);
}

#[test]
fn io_threads_on_sata() {
    let changes = disk(json!({"disk": {"bus": "sata"}, "dedicatedIOThread": true}));
    refused(
        &changes,
        UNSUPPORTED,
        DISK,
        "IOThreads are not supported for disks on a SATA bus",
    );
    // The default bus is SATA.
    for default in [json!({"disk": {}}), json!({})] {
        let mut changes = disk(default);
        changes[0].1[0]["dedicatedIOThread"] = json!(true);
        let text = "IOThreads are not supported for disks on a SATA bus";
        refused(&changes, UNSUPPORTED, DISK, text);
    }
    let changes = disk(json!({"cdrom": {"bus": "sata"}, "dedicatedIOThread": true}));
    assert_eq!(faults(&with(&changes)), []);
}

#[test]
fn modes() {
    let field = format!("{DISK}.cache");
    refused(
        &disk(json!({"cache": "unsafe"})),
        INVALID,
        &field,
        &format!("{field} has invalid value unsafe"),
    );
    let field = format!("{DISK}.io");
    let text = format!("Disk IO mode for {field} is not supported. Supported modes are: native, threads.");
    refused(&disk(json!({"io": "io_uring"})), UNSUPPORTED, &field, &text);
    let field = format!("{DISK}.errorPolicy");
    refused(
        &disk(json!({"errorPolicy": "no"})),
        INVALID,
        &field,
        &format!("{field} has invalid value \"no\""),
    );
}

#[test]
fn block_sizes() {
    let size = |logical: i64, physical: i64| {
        disk(json!({"blockSize": {"custom": {"logical": logical, "physical": physical}}}))
    };
    let field = format!("{DISK}.blockSize");
    let changes = disk(json!({"blockSize": {
        "custom": {"logical": 512, "physical": 512}, "matchVolume": {"enabled": true}}}));
    refused(
        &changes,
        INVALID,
        &field,
        "Block size matching can't be enabled together with a custom value",
    );
    let logical = format!("{field}.custom.logical");
    let physical = format!("{field}.custom.physical");
    let text = "Logical size 4096 must be the same or less than the physical size of 512";
    refused(&size(4096, 512), INVALID, &logical, text);
    let text = "Provided size of 128 is less than the supported minimum size of 512";
    refused(&size(128, 512), INVALID, &logical, text);
    let text = "Provided size of 4194304 is greater than the supported maximum size of 2 MiB";
    refused(&size(512, 4_194_304), INVALID, &physical, text);
    for (logical, physical) in [
        (512, 512),
        (512, 2 << 20),
        (1024, 1024),
        (2048, 4096),
        (4096, 4096),
    ] {
        assert_eq!(faults(&with(&size(logical, physical))), []);
    }
    refused(
        &size(513, 4096),
        INVALID,
        &logical,
        "Provided size of 513 is not a power of 2",
    );
}

#[test]
fn read_only_sata() {
    let changes = disk(json!({"disk": {"bus": "sata", "readonly": true}}));
    refused(
        &changes,
        INVALID,
        &format!("{DISK}.disk.bus"),
        "sata hard-disks do not support read-only.",
    );
    let text = "sata hard-disks do not support read-only.";
    let changes = disk(json!({"disk": {"readonly": true}}));
    refused(&changes, INVALID, &format!("{DISK}.disk.bus"), text);
    for bus in ["virtio", "scsi"] {
        let changes = disk(json!({"disk": {"bus": bus, "readonly": true}}));
        assert_eq!(faults(&with(&changes)), []);
    }
}

#[test]
fn pci_addresses() {
    let field = format!("{DISK}.disk.pciAddress");
    let text = format!("disk {field} - setting a PCI address is only possible with bus type virtio.");
    let changes = disk(json!({"disk": {"bus": "scsi", "pciAddress": "0000:81:01.0"}}));
    refused(&changes, INVALID, &field, &text);
    let text = format!("disk {field} has malformed PCI address (81:01).");
    let changes = disk(json!({"disk": {"bus": "virtio", "pciAddress": "81:01"}}));
    refused(&changes, INVALID, &field, &text);
}
