//! A dropped machine closes its disks.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use husk_disk::{Disk, DiskOptions, ImageFormat};
use husk_virtio_scsi::target::Lun;
use husk_virtio_scsi::{Medium, NewUnit, UnitAddress};
use husk_vmm::cpuid::Topology;
use husk_vmm::kvm::KvmHost;
use husk_vmm::machine::{self, Callbacks, Machine, MachineConfig, SerialEvents, eventfd};
use husk_vmm::ram::MemoryBacking;
use husk_vmm::smbios::SystemIdentity;

const MIB: u64 = 1 << 20;

/// A disk, and a file that can be locked after the disk is closed.
fn overlay() -> (Disk, File) {
    let overlay = tempfile::NamedTempFile::new().unwrap();
    let watch = File::open(overlay.path()).unwrap();
    overlay.as_file().lock().unwrap();
    let base = tempfile::tempfile().unwrap();
    base.set_len(MIB).unwrap();
    let (overlay, base) = (OwnedFd::from(overlay.into_file()), base.into());
    let disk = Disk::new_overlay(overlay, (base, ImageFormat::Raw), DiskOptions::default()).unwrap();
    assert!(watch.try_lock().is_err());
    (disk, watch)
}

fn machine(host: &KvmHost, blk: Disk, scsi: Disk) -> Machine {
    let config = MachineConfig {
        topology: Topology {
            sockets: 1,
            cores: 2,
            threads: 1,
        },
        memory: 32 * MIB,
        backing: MemoryBacking::Anonymous,
        identity: SystemIdentity {
            uuid: uuid::Uuid::nil(),
            serial: String::new(),
        },
        nics: Vec::new(),
        plugged_nics: Vec::new(),
        disks: vec![machine::BlkDisk {
            id: "blk".into(),
            image: blk,
            serial: String::new(),
            queues: 2,
        }],
        scsi: vec![NewUnit {
            id: "scsi".into(),
            address: UnitAddress {
                target: 0,
                lun: Lun::new(0).unwrap(),
            },
            serial: String::new(),
            medium: Medium::Disk(scsi),
            shareable: false,
        }],
        rng: true,
        balloon: true,
        ports: Vec::new(),
        vsock: None,
        watchdog: true,
        rtc_offset: 0,
    };
    let callbacks = Callbacks {
        event: Arc::new(|_| {}),
        alarm: Arc::new(|_| {}),
        watchdog: Arc::new(|_| {}),
        guest_open: Arc::new(|_, _| {}),
        vsock_request: Arc::new(|_, _| false),
    };
    let serial_events = SerialEvents {
        output_ready: eventfd().unwrap(),
        input_wanted: eventfd().unwrap(),
    };
    Machine::new(host, config, callbacks, serial_events).unwrap()
}

#[test]
fn a_dropped_machine_closes_its_disks() {
    let kvm = File::options().read(true).write(true).open("/dev/kvm").unwrap();
    let host = KvmHost::new(kvm.into()).unwrap();
    for stopped in [false, true] {
        let (disks, watches): (Vec<_>, Vec<_>) = [overlay(), overlay()].into_iter().unzip();
        let [blk, scsi] = disks.try_into().unwrap();
        let mut machine = machine(&host, blk, scsi);
        if stopped {
            machine.stop().unwrap();
        }
        assert!(watches.iter().all(|watch| watch.try_lock().is_err()));
        drop(machine);
        // A child that another test forks holds copies of the descriptors until it executes its program.
        let deadline = Instant::now() + Duration::from_secs(5);
        for watch in &watches {
            while let Err(e) = watch.try_lock() {
                assert!(Instant::now() < deadline, "{e}");
                sleep(Duration::from_millis(5));
            }
        }
    }
}
