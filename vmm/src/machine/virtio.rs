//! Creates the virtio devices of a machine, in slot order: NICs first, because guests name them by their slots and a
//! further disk must not rename them; then disks in the manifest's order; the SCSI controller, the console and vsock last.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::balloon::Balloon;
use husk_devices::virtio::rng::Rng;
use husk_disk::EngineKind;
use husk_virtio_blk::{Blk, BlkSetup};
use husk_virtio_console::{Console, GuestOpenFn, PortSetup};
use husk_virtio_net::NetSetup;
use husk_virtio_scsi::{NewUnit, ScsiHandle, VirtioScsi};
use husk_virtio_vsock::{RequestFn, VhostVsock, Vsock, VsockHandle};

use super::error::MachineError;
use super::event::{EventFn, VmEvent};
use super::nic::Nic;
use super::registry::DeviceHandle;

/// The SCSI controller's last target. Drivers scan every target: a higher number costs them requests.
const MAX_TARGET: u8 = 255;

/// A virtio-blk disk, opened.
#[derive(Debug)]
pub struct BlkDisk {
    /// Id: the volume's name.
    pub id: String,
    /// The image.
    pub image: husk_disk::Disk,
    /// Serial number shown to the guest, may be empty.
    pub serial: String,
    /// Number of virtqueues, each with a ring and a worker thread. More than one for each vCPU only cost memory.
    pub queues: u16,
}

/// A vsock device.
#[derive(Debug)]
pub struct VsockSetup {
    /// CID of the guest, at least 3.
    pub cid: u32,
    /// An open `/dev/vhost-vsock` with that CID, if the host's kernel carries the connections.
    pub vhost: Option<OwnedFd>,
}

/// The devices to create.
pub(super) struct DevicePlan {
    /// In slot order, as `disks` are.
    pub nics: Vec<NetSetup>,
    pub disks: Vec<BlkDisk>,
    pub rng: bool,
    /// A balloon: true if it reports free pages.
    pub balloon: Option<bool>,
    /// Disks on the SCSI controller, which every machine has.
    pub scsi: Vec<NewUnit>,
    /// Ports of the console device. None: no such device.
    pub ports: Vec<PortSetup>,
    pub vsock: Option<VsockSetup>,
    pub vcpus: u32,
}

/// Devices in slot order, and handles of those that are found by their kind.
pub(super) struct BuiltDevices {
    pub devices: Vec<(Box<dyn VirtioDevice>, DeviceHandle)>,
    pub scsi: ScsiHandle,
    /// Of the device whose connections the VMM carries.
    pub vsock: Option<VsockHandle>,
}

pub(super) fn build(
    plan: DevicePlan,
    event: &EventFn,
    guest_open: GuestOpenFn,
    vsock_request: RequestFn,
) -> Result<BuiltDevices, MachineError> {
    let mut devices: Vec<(Box<dyn VirtioDevice>, DeviceHandle)> = Vec::new();
    for (slot, setup) in (1..=u8::MAX).zip(plan.nics) {
        let (net, nic) = Nic::new(setup, slot)?;
        devices.push((net, DeviceHandle::Net(nic)));
    }
    for disk in plan.disks {
        let (id, event) = (disk.id.clone(), event.clone());
        let (blk, handle) = Blk::new(BlkSetup {
            id: disk.id,
            disk: disk.image,
            serial: disk.serial,
            queues: disk.queues,
            engine: EngineKind::Auto,
            on_io_stop: Arc::new(move |error| {
                event(VmEvent::DiskStopped {
                    disk: id.clone(),
                    error: error.to_string(),
                });
            }),
        })?;
        devices.push((Box::new(blk), DeviceHandle::Blk(handle)));
    }
    if plan.rng {
        devices.push((Box::new(Rng::new()), DeviceHandle::None));
    }
    if let Some(reporting) = plan.balloon {
        let (device, handle) = Balloon::new(reporting);
        devices.push((Box::new(device), DeviceHandle::Balloon(handle)));
    }
    // After the others, so that their slots do not depend on it.
    let event = event.clone();
    let (controller, scsi) = VirtioScsi::new(husk_virtio_scsi::ScsiConfig {
        queues: u16::try_from(plan.vcpus).unwrap_or(u16::MAX),
        max_target: MAX_TARGET,
        units: plan.scsi,
        engine: EngineKind::Auto,
        on_io_error: Arc::new(move |disk, error| {
            event(VmEvent::DiskStopped {
                disk: disk.to_owned(),
                error: error.to_string(),
            });
        }),
    })?;
    devices.push((Box::new(controller), DeviceHandle::None));
    if !plan.ports.is_empty() {
        let console = Console::new(plan.ports, guest_open).map_err(MachineError::Console)?;
        devices.push((Box::new(console), DeviceHandle::None));
    }
    let mut vsock = None;
    match plan.vsock {
        Some(VsockSetup { cid, vhost: None }) => {
            let (device, handle) = Vsock::new(cid, vsock_request).map_err(MachineError::Vsock)?;
            devices.push((Box::new(device), DeviceHandle::None));
            vsock = Some(handle);
        }
        Some(VsockSetup {
            cid,
            vhost: Some(file),
        }) => {
            let device = VhostVsock::new(cid, file).map_err(MachineError::Vsock)?;
            devices.push((Box::new(device), DeviceHandle::None));
        }
        None => {}
    }
    Ok(BuiltDevices { devices, scsi, vsock })
}
