//! A machine for unit tests, on the host's /dev/kvm.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use husk_disk::{Disk, DiskOptions};
use uuid::Uuid;

use super::{BlkDisk, Callbacks, Machine, MachineConfig, SerialEvents, eventfd};
use crate::cpuid::Topology;
use crate::kvm::KvmHost;
use crate::ram::MemoryBacking;
use crate::smbios::SystemIdentity;
use crate::vcpu::Vcpu;

/// A machine with one vCPU, a disk and a watchdog, which has not run.
pub(crate) fn machine() -> Machine {
    let kvm = File::options().read(true).write(true).open("/dev/kvm");
    let host = KvmHost::new(kvm.unwrap().into()).unwrap();
    let image = tempfile::tempfile().unwrap();
    image.set_len(1 << 20).unwrap();
    let config = MachineConfig {
        topology: Topology {
            sockets: 1,
            cores: 1,
            threads: 1,
        },
        memory: 32 << 20,
        backing: MemoryBacking::Anonymous,
        identity: SystemIdentity {
            uuid: Uuid::nil(),
            serial: String::new(),
        },
        nics: vec![],
        plugged_nics: vec![],
        disks: vec![BlkDisk {
            id: "root".into(),
            image: Disk::open_raw(image.into(), DiskOptions::default()).unwrap(),
            serial: String::new(),
            queues: 1,
        }],
        scsi: vec![],
        rng: true,
        balloon: true,
        ports: vec![],
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
    let serial = SerialEvents {
        output_ready: eventfd().unwrap(),
        input_wanted: eventfd().unwrap(),
    };
    Machine::new(&host, config, callbacks, serial).unwrap()
}

/// Replaces the vCPU by one that does not answer.
pub(crate) fn silence(machine: &mut Machine) {
    machine.vcpus = vec![Vcpu::ended(0)];
    // The other may have run into memory without code.
    machine.halted.store(false, Ordering::Release);
}

/// Removes the vCPUs.
pub(crate) fn remove_vcpus(machine: &mut Machine) {
    machine.vcpus.clear();
}

/// True if no vCPU may enter the guest.
pub(crate) fn is_halted(machine: &Machine) -> bool {
    machine.halted.load(Ordering::Acquire)
}
