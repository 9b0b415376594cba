//! Plugging a disk into a VM that runs.

use std::path::PathBuf;

use super::disk::ScsiAddress;
use super::{
    BlockSize, CacheMode, Controller, DeviceType, DiskPlan, DiskSource, ErrorPolicy, FormatRule, VmPlan,
};
use crate::names::{is_serial, label_fault};

/// The longest serial number, in characters.
const SERIAL: usize = 256;

/// A volume to plug.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewVolume {
    /// The volume's name and the disk's.
    pub name: String,
    /// An image, a block device, or a directory with `disk.img`. Absolute.
    pub path: PathBuf,
    /// Serial number shown to the guest; the name if it is empty.
    pub serial: String,
    /// How the host caches it.
    pub cache: CacheMode,
    /// The guest cannot write it.
    pub read_only: bool,
}

/// What plugging a volume takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plug {
    /// This disk is to be added.
    New(Box<DiskPlan>),
    /// The VM has this very disk.
    There(Box<DiskPlan>),
}

/// Why a volume cannot be plugged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlugError {
    /// Not a volume's name.
    #[error("the volume's name '{0}': {1}")]
    Name(String, &'static str),
    /// Not a serial number.
    #[error("the serial number '{0}' must have at most {SERIAL} letters, digits and '_', '.', '+' or '-'")]
    Serial(String),
    /// Relative to whose directory?
    #[error("the path '{}' is not absolute", .0.display())]
    Path(PathBuf),
    /// Another volume of that name.
    #[error("Unable to add volume [{0}] because volume with that name already exists")]
    NameTaken(String),
    /// A disk of that image.
    #[error("Unable to add volume source [{}] because it already exists", .0.display())]
    SourceTaken(PathBuf),
    /// No controller to plug it into.
    #[error("the manifest switches hotplug off (disableHotplug)")]
    Disabled,
    /// No address is left.
    #[error("the SCSI controller is full")]
    Full,
}

impl VmPlan {
    /// Plans the disk of a volume that is plugged, at the lowest LUN of target 0 that is neither in use nor in `avoid`.
    ///
    /// # Errors
    /// A name, serial number or path that is none; a name or image that the VM has already, in KubeVirt's words; a VM
    /// without a controller, or with a full one.
    pub fn plug(&self, volume: &NewVolume, avoid: &[ScsiAddress]) -> Result<Plug, PlugError> {
        let NewVolume {
            name, path, serial, ..
        } = volume;
        if let Some(fault) = label_fault(name) {
            return Err(PlugError::Name(name.clone(), fault));
        }
        if !is_serial(serial) || serial.len() > SERIAL {
            return Err(PlugError::Serial(serial.clone()));
        }
        if !path.is_absolute() {
            return Err(PlugError::Path(path.clone()));
        }
        let queues = self.scsi.ok_or(PlugError::Disabled)?.queues;
        if let Some(there) = self.disks.iter().find(|disk| disk.name == *name) {
            let same = there
                .scsi_address()
                .is_some_and(|address| *there == volume.at(address, queues));
            return match same {
                true => Ok(Plug::There(Box::new(there.clone()))),
                false => Err(PlugError::NameTaken(name.clone())),
            };
        }
        let source = DiskSource::File(path.clone());
        if self.disks.iter().any(|disk| disk.source == source) {
            return Err(PlugError::SourceTaken(path.clone()));
        }
        let used = self.disks.iter().filter_map(DiskPlan::scsi_address);
        let address = ScsiAddress::free(used.chain(avoid.iter().copied())).ok_or(PlugError::Full)?;
        Ok(Plug::New(Box::new(volume.at(address, queues))))
    }
}

impl NewVolume {
    fn at(&self, address: ScsiAddress, queues: u32) -> DiskPlan {
        let serial = if self.serial.is_empty() {
            &self.name
        } else {
            &self.serial
        };
        DiskPlan {
            name: self.name.clone(),
            target: address.name(),
            controller: Controller::VirtioScsi(address),
            device: DeviceType::Disk,
            read_only: self.read_only,
            overlay: false,
            format: FormatRule::Raw,
            serial: Some(serial.clone()),
            cache: self.cache,
            shareable: false,
            block_size: BlockSize::Default,
            error_policy: ErrorPolicy::Stop,
            queues,
            io_thread: None,
            boot_order: None,
            source: DiskSource::File(self.path.clone()),
        }
    }
}
