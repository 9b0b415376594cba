//! The virtio devices of a machine, in slot order: disks first, so that names follow the manifest.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::balloon::{Balloon, BalloonHandle};
use husk_devices::virtio::rng::Rng;
use husk_disk::EngineKind;
use husk_virtio_blk::{Blk, BlkHandle, Setup};

use super::{Event, EventFn, MachineError};

/// Distance of one device's BAR from the next.
pub const BAR_STRIDE: u64 = 1 << 20;

/// A virtio-blk disk, opened.
#[derive(Debug)]
pub struct Disk {
    /// The volume's name.
    pub id: String,
    /// Its image.
    pub image: husk_disk::Disk,
    /// Serial number shown to the guest, may be empty.
    pub serial: String,
    /// Virtqueues, each with a ring and a worker thread: more than vCPUs only cost memory.
    pub queues: u16,
}

impl Disk {
    /// Opens an image somebody else opened the file of, for one queue. A name goes with every error.
    pub fn open(id: &str, file: OwnedFd, serial: &str, options: husk_disk::Options) -> Result<Self, String> {
        let image = husk_disk::Disk::open_raw(file, options).map_err(|e| format!("disk {id:?}: {e}"))?;
        Ok(Self {
            id: id.to_owned(),
            image,
            serial: serial.to_owned(),
            queues: 1,
        })
    }
}

pub(super) struct Built {
    pub devices: Vec<Box<dyn VirtioDevice>>,
    pub disks: Vec<BlkHandle>,
    pub balloon: Option<BalloonHandle>,
}

pub(super) fn build(
    disks: Vec<Disk>,
    rng: bool,
    balloon: bool,
    reporting: bool,
    event: &EventFn,
) -> Result<Built, MachineError> {
    let mut devices: Vec<Box<dyn VirtioDevice>> = Vec::new();
    let mut handles = Vec::new();
    for disk in disks {
        let (id, event) = (disk.id.clone(), event.clone());
        let (blk, handle) = Blk::new(Setup {
            id: disk.id,
            disk: disk.image,
            serial: disk.serial,
            queues: disk.queues,
            engine: EngineKind::Auto,
            on_stop: Arc::new(move |error| {
                event(Event::DiskStopped {
                    disk: id.clone(),
                    error: error.to_string(),
                });
            }),
        })?;
        devices.push(Box::new(blk));
        handles.push(handle);
    }
    if rng {
        devices.push(Box::new(Rng::new()));
    }
    let balloon = balloon.then(|| {
        let (device, handle) = Balloon::new(reporting);
        devices.push(Box::new(device));
        handle
    });
    if devices.len() > 31 {
        return Err(MachineError::Slots(devices.len()));
    }
    Ok(Built {
        devices,
        disks: handles,
        balloon,
    })
}
