//! Validation refuses requests beyond Husk's limits, before data or a host is looked for.

use super::common::{faults, refused, with};
use super::{INVALID, REQUEST, UNSUPPORTED, volumes};
use serde_json::{Value, json};

#[test]
fn sizes_that_no_vm_can_have() {
    let field = "spec.domain.memory.guest";
    refused(
        &[("domain/memory/guest", json!("0"))],
        INVALID,
        field,
        &format!("{field} '0': a guest cannot start with less than 16Mi"),
    );
    let field = "spec.domain.cpu";
    refused(
        &[("domain/cpu/cores", json!(300))],
        INVALID,
        field,
        &format!("{field} asks for 1 sockets x 300 cores x 1 threads; a VM has at most 254 vCPUs"),
    );
    let text = format!(
        "{field} needs APIC ids up to 335, but the maximum is 254: make cores and threads powers of two, \
         or use fewer"
    );
    let cpus = |sockets, cores| [("domain/cpu", json!({"sockets": sockets, "cores": cores}))];
    refused(&cpus(3, 80), INVALID, field, &text);
    for (sockets, cores) in [(1, 254), (254, 1), (3, 64), (1, 200)] {
        assert_eq!(faults(&with(&cpus(sockets, cores))), []);
    }
}

#[test]
fn kubevirts_word_on_memory_is_the_only_one() {
    for memory in ["0", "64Ki", "-1Gi"] {
        let faults = faults(&with(&[("domain/resources/requests/memory", json!(memory))]));
        let fields: Vec<_> = faults.iter().map(|fault| fault.field.as_str()).collect();
        assert_eq!(fields, [if memory == "0" { "" } else { REQUEST }], "{memory}");
    }
}

#[test]
fn disks_that_cannot_be_made_or_found() {
    let field = "spec.volumes[0].emptyDisk.capacity";
    refused(
        &volumes(json!([{"name": "a", "emptyDisk": {"capacity": "0"}}])),
        INVALID,
        field,
        "the size for volume a is too low, must be at least 1MiB",
    );
    let field = "spec.volumes[0].hostDisk.path";
    refused(
        &volumes(json!([{"name": "a", "hostDisk": {"path": "a.img", "type": "Disk"}}])),
        INVALID,
        field,
        &format!("{field} 'a.img' must be an absolute path"),
    );
    let field = "spec.domain.devices.disks[0].blockSize.custom.logical";
    let sizes = json!({"logical": 8192, "physical": 8192});
    refused(
        &[("domain/devices/disks/0/blockSize/custom", sizes)],
        UNSUPPORTED,
        field,
        &format!("{field} '8192' is not supported: the maximum logical block size is 4096 bytes"),
    );
    let field = "spec.domain.devices.disks[0].cache";
    refused(
        &[
            ("domain/devices/disks/0/shareable", json!(true)),
            ("domain/devices/disks/0/cache", json!("writeback")),
        ],
        INVALID,
        field,
        "a sharable disk requires cache = none got: writeback",
    );
}

#[test]
fn disks_on_bus_virtio_need_a_slot_each() {
    let disks = |count: usize, bus: &str| -> [(&'static str, Value); 2] {
        let names: Vec<String> = (0..count).map(|n| format!("d{n}")).collect();
        let disk = |name: &String| json!({"name": name, "disk": {"bus": bus}});
        let volume = |name: &String| json!({"name": name, "emptyDisk": {"capacity": "1Gi"}});
        [
            ("domain/devices/disks", names.iter().map(disk).collect()),
            ("volumes", names.iter().map(volume).collect()),
        ]
    };
    let field = "spec.domain.devices.disks";
    let text = format!(
        "{field} has 40 disks on bus virtio, but a VM with these devices has at most 26; use bus scsi for more"
    );
    refused(&disks(40, "virtio"), INVALID, field, &text);
    assert_eq!(faults(&with(&disks(26, "virtio"))), []);
    assert_eq!(faults(&with(&disks(40, "scsi"))), []);
    let but = |count, field, value| {
        let mut changes = disks(count, "virtio").to_vec();
        changes.push((field, value));
        faults(&with(&changes)).len()
    };
    assert_eq!(but(26, "domain/devices/rng", json!({})), 1);
    assert_eq!(but(26, "domain/devices/watchdog", json!({"name": "w"})), 1);
    assert_eq!(but(25, "domain/devices/watchdog", json!({"name": "w"})), 0);
    assert_eq!(but(27, "domain/devices/autoattachPodInterface", json!(false)), 0);
}

#[test]
fn interfaces_need_a_slot_each() {
    let nics = |count: usize| {
        let names: Vec<String> = (0..count).map(|n| format!("n{n}")).collect();
        let interface = |name: &String| json!({"name": name, "bridge": {}});
        let network = |name: &String| json!({"name": name, "multus": {"networkName": name}});
        [
            (
                "domain/devices/interfaces",
                names.iter().map(interface).collect::<Value>(),
            ),
            ("networks", names.iter().map(network).collect()),
        ]
    };
    let field = "spec.domain.devices.interfaces";
    let text = format!("{field} has 30 interfaces; a VM with these devices has at most 27");
    refused(&nics(30), INVALID, field, &text);
    assert_eq!(faults(&with(&nics(26))), [], "and a disk");
    let disks = "spec.domain.devices.disks";
    let text = format!(
        "{disks} has 1 disks on bus virtio, but a VM with these devices has at most 0; use bus scsi for more"
    );
    refused(&nics(27), INVALID, disks, &text);
}
