//! Logical units to be added.

use std::sync::Arc;

use husk_disk::Disk;

use crate::UnitAddress;
use crate::target::{PassthroughDevice, PassthroughLimits};

/// The kind of a new unit and its medium.
#[derive(Clone, Debug)]
pub enum Medium {
    /// A hard disk.
    Disk(Disk),
    /// A CD-ROM drive, with this disc or empty.
    CdRom(Option<Disk>),
    /// A passthrough device.
    Passthrough(PassthroughUnit),
}

/// An open passthrough device.
#[derive(Clone, Debug)]
pub struct PassthroughUnit {
    /// Executes the commands. Closed when the unit is removed.
    pub device: Arc<dyn PassthroughDevice>,
    /// Its limits.
    pub limits: PassthroughLimits,
    /// The same device as an image, to read a kernel from.
    pub image: Option<Disk>,
}

/// A logical unit to be added.
#[derive(Clone, Debug)]
pub struct NewUnit {
    /// The disk's name in the configuration. No two units have the same.
    pub id: String,
    /// Address on the controller.
    pub address: UnitAddress,
    /// Serial number; may be empty.
    pub serial: String,
    /// Kind and medium.
    pub medium: Medium,
    /// Others may write the disk at the same time.
    pub shareable: bool,
}

impl NewUnit {
    /// The disk or disc in it.
    pub(crate) fn disk(&self) -> Option<&Disk> {
        match &self.medium {
            Medium::Disk(disk) => Some(disk),
            Medium::CdRom(disc) => disc.as_ref(),
            Medium::Passthrough(_) => None,
        }
    }
}
