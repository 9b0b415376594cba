//! Plugging a disk into a VM that runs.

use std::path::PathBuf;

use super::disk::{
    BlockSize, CacheMode, Controller, DeviceType, DiskPlan, DiskSource, ErrorPolicy, FileId, FormatPolicy,
    ScsiAddress,
};
use super::types::VmPlan;
use crate::names::{is_serial, label_fault};

/// The longest serial number, in characters.
const SERIAL: usize = 256;

/// A volume to plug.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewVolume {
    /// The volume's name and the disk's.
    pub name: String,
    /// [`DiskSource::File`], an image, a block device, or a directory with `disk.img`, by an absolute path; or
    /// [`DiskSource::Descriptor`].
    pub source: DiskSource,
    /// Serial number shown to the guest; the name if it is empty.
    pub serial: String,
    /// How the host caches it.
    pub cache: CacheMode,
    /// The guest cannot write it.
    pub read_only: bool,
    /// Another VM may have it open too.
    pub shareable: bool,
    /// The block sizes the guest is told.
    pub block_size: BlockSize,
    /// What happens on an I/O error of the host.
    pub error_policy: ErrorPolicy,
    /// What the manifest calls the object behind it, if one does.
    pub origin: Option<String>,
}

impl Default for NewVolume {
    /// One without a name or a source, and all else as a manifest that does not say.
    fn default() -> Self {
        Self {
            name: String::new(),
            source: DiskSource::Empty,
            serial: String::new(),
            cache: CacheMode::Auto,
            read_only: false,
            shareable: false,
            block_size: BlockSize::Default,
            error_policy: ErrorPolicy::Stop,
            origin: None,
        }
    }
}

/// What plugging a volume takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlugPlan {
    /// This disk is to be added.
    New(Box<DiskPlan>),
    /// The VM has this very disk.
    Present(Box<DiskPlan>),
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
    #[error("Unable to add volume source [{0}] because it already exists")]
    SourceTaken(String),
    /// Neither a file's path nor a descriptor.
    #[error("the volume '{0}' is neither a file nor a block device")]
    Source(String),
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
    pub fn plug(&self, volume: &NewVolume, avoid: &[ScsiAddress]) -> Result<PlugPlan, PlugError> {
        let NewVolume {
            name, source, serial, ..
        } = volume;
        if let Some(fault) = label_fault(name) {
            return Err(PlugError::Name(name.clone(), fault));
        }
        if !is_serial(serial) || serial.len() > SERIAL {
            return Err(PlugError::Serial(serial.clone()));
        }
        let called = match source {
            DiskSource::File(path) if !path.is_absolute() => return Err(PlugError::Path(path.clone())),
            DiskSource::File(path) => path.display().to_string(),
            DiskSource::Descriptor(FileId { device, inode }) => format!("file {inode} of device {device:#x}"),
            _ => return Err(PlugError::Source(name.clone())),
        };
        let queues = self.scsi.ok_or(PlugError::Disabled)?.queues;
        if let Some(there) = self.disks.iter().find(|disk| disk.name == *name) {
            let same = there
                .scsi_address()
                .is_some_and(|address| *there == volume.at(address, queues));
            return match same {
                true => Ok(PlugPlan::Present(Box::new(there.clone()))),
                false => Err(PlugError::NameTaken(name.clone())),
            };
        }
        if self.disks.iter().any(|disk| disk.source == *source) {
            return Err(PlugError::SourceTaken(called));
        }
        let used = self.disks.iter().filter_map(DiskPlan::scsi_address);
        let address = ScsiAddress::free(used.chain(avoid.iter().copied())).ok_or(PlugError::Full)?;
        Ok(PlugPlan::New(Box::new(volume.at(address, queues))))
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
            format: FormatPolicy::Raw,
            serial: Some(serial.clone()),
            cache: self.cache,
            shareable: self.shareable,
            block_size: self.block_size,
            error_policy: self.error_policy,
            queues,
            io_thread: None,
            boot_order: None,
            origin: self.origin.clone(),
            source: self.source.clone(),
        }
    }
}
