//! A whole machine is saved, and restored into another. The guest does not run.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use husk_devices::component::{ComponentError, ComponentStates};
use husk_disk::{Disk, DiskOptions};
use husk_virtio_console::PortSetup;
use husk_virtio_scsi::target::Lun;
use husk_virtio_scsi::{Medium, NewUnit, UnitAddress};
use husk_vmm::cpuid::Topology;
use husk_vmm::kvm::KvmHost;
use husk_vmm::machine::{BlkDisk, Callbacks, Machine, MachineConfig, SerialEvents, VsockSetup, eventfd};
use husk_vmm::ram::MemoryBacking;
use husk_vmm::smbios::SystemIdentity;
use serde_json::Value;

fn disk() -> Disk {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    Disk::open_raw(file.into(), DiskOptions::default()).unwrap()
}

/// A paused machine with a device of each kind that needs nothing of the host, and the host's end of its port.
fn machine(disks: &[&str]) -> (Machine, UnixStream) {
    let kvm = std::fs::File::options().read(true).write(true).open("/dev/kvm");
    let host = KvmHost::new(kvm.unwrap().into()).unwrap();
    let (port, stream) = UnixStream::pair().unwrap();
    let blk = |id: &&str| BlkDisk {
        id: (*id).into(),
        image: disk(),
        serial: String::new(),
        queues: 1,
    };
    let unit = NewUnit {
        id: "data".into(),
        address: UnitAddress {
            target: 0,
            lun: Lun::new(0).unwrap(),
        },
        serial: String::new(),
        medium: Medium::Disk(disk()),
        shareable: false,
    };
    let config = MachineConfig {
        topology: Topology {
            sockets: 1,
            cores: 1,
            threads: 1,
        },
        memory: 64 << 20,
        backing: MemoryBacking::Anonymous,
        identity: SystemIdentity {
            uuid: uuid::Uuid::nil(),
            serial: String::new(),
        },
        nics: vec![],
        plugged_nics: vec![],
        disks: disks.iter().map(blk).collect(),
        scsi: vec![unit],
        rng: true,
        balloon: true,
        ports: vec![PortSetup {
            name: "port".into(),
            stream: stream.into(),
        }],
        vsock: Some(VsockSetup { cid: 3, vhost: None }),
        watchdog: true,
        rtc_offset: 3600,
    };
    let callbacks = Callbacks {
        event: Arc::new(|_| {}),
        alarm: Arc::new(|_| {}),
        watchdog: Arc::new(|_| {}),
        guest_open: Arc::new(|_, _| {}),
        vsock_request: Arc::new(|_, _| false),
    };
    let serial = SerialEvents {
        output_ready: eventfd().unwrap(),
        input_wanted: eventfd().unwrap(),
    };
    (Machine::new(&host, config, callbacks, serial).unwrap(), port)
}

/// The states without the configuration generations, which a restore increments.
fn comparable(states: ComponentStates) -> Vec<(String, Value)> {
    let states = states.into_iter().map(|(name, state)| {
        let mut state = Value::from(state);
        if let Some(generation) = state.get_mut("generation") {
            *generation = Value::Null;
        }
        (name, state)
    });
    states.collect()
}

#[test]
#[ignore = "needs /dev/kvm"]
fn every_part_of_a_machine_is_saved_and_restored() {
    let (mut old, _port) = machine(&["root", "scratch"]);
    assert!(
        matches!(old.save_devices(), Err(ComponentError::Save { .. })),
        "it runs"
    );
    old.pause().unwrap();
    old.new_generation().unwrap();
    let text = serde_json::to_string(&old.save_devices().unwrap()).unwrap();
    let states: ComponentStates = serde_json::from_str(&text).unwrap();
    let names: Vec<_> = states.keys().map(String::as_str).collect();
    let expected = [
        "acpi-power",
        "i6300esb",
        "i8042",
        "pci",
        "pci-hotplug",
        "pvpanic",
        "rtc",
        "serial",
        "virtio-balloon",
        "virtio-blk-root",
        "virtio-blk-scratch",
        "virtio-console",
        "virtio-rng",
        "virtio-scsi",
        "virtio-vsock",
    ];
    assert_eq!(names, expected);
    let power = Value::from(states["acpi-power"].clone());
    assert_eq!(
        power["pending"], 4,
        "the new generation, of which the guest does not know yet"
    );

    let (mut new, _port) = machine(&["root", "scratch"]);
    new.restore_devices(&states).unwrap();
    assert_eq!(
        comparable(new.save_devices().unwrap()),
        comparable(states.clone())
    );

    let (mut other, _port) = machine(&["root"]);
    let refused = other.restore_devices(&states).unwrap_err().to_string();
    assert_eq!(
        refused,
        "cannot restore virtio-blk-scratch: the machine has no such component"
    );
}
