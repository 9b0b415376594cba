//! Hot-plugging a disk, or a disc into a CD-ROM drive.

use std::path::PathBuf;

use super::disk::{
    BlockSize, CacheMode, Controller, DeviceType, DiskPlan, DiskSource, ErrorPolicy, FileId, FormatPolicy,
};
use super::types::VmPlan;
use crate::names::{is_serial, label_fault};

/// Maximum length of a serial number in characters.
const SERIAL: usize = 256;

/// A volume to hot-plug.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewVolume {
    /// Name of the volume and the disk. If that is an empty CD-ROM drive, the volume is a disc for it: the properties
    /// of the drive apply.
    pub name: String,
    /// [`DiskSource::File`] with an absolute path of an image, a block device, or a directory with a `disk.img`; or
    /// [`DiskSource::Descriptor`].
    pub source: DiskSource,
    /// Serial number; if empty, the name is used.
    pub serial: String,
    /// Caching on the host.
    pub cache: CacheMode,
    /// Read-only for the guest.
    pub read_only: bool,
    /// Other VMs may have the image open too.
    pub shareable: bool,
    /// Block sizes shown to the guest.
    pub block_size: BlockSize,
    /// Reaction to an I/O error on the host.
    pub error_policy: ErrorPolicy,
    /// The claim is preallocated: see [`DiskPlan::preallocated`].
    pub preallocated: bool,
    /// `KIND/NAME` of the object behind it, if there is one.
    pub origin: Option<String>,
}

impl Default for NewVolume {
    /// An unnamed volume without a source; everything else has the default of a manifest.
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
            preallocated: false,
            origin: None,
        }
    }
}

/// Outcome of planning a hot-plug.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlugPlan {
    /// The disk to add. The VMM chooses its address: see [`DiskPlan::assign`].
    New(Box<DiskPlan>),
    /// The CD-ROM drive with the disc to insert.
    Disc(Box<DiskPlan>),
    /// The VM has exactly this disk already.
    Present(Box<DiskPlan>),
}

/// Error of planning a hot-plug.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlugError {
    /// The name is invalid.
    #[error("the volume name '{0}' is invalid: {1}")]
    Name(String, &'static str),
    /// The serial number is invalid.
    #[error("the serial number '{0}' must have at most {SERIAL} letters, digits and '_', '.', '+' or '-'")]
    Serial(String),
    /// The path is relative.
    #[error("the path '{}' is not absolute", .0.display())]
    Path(PathBuf),
    /// The VM has another volume of that name.
    #[error("Unable to add volume [{0}] because volume with that name already exists")]
    NameTaken(String),
    /// The VM has another disk with that image.
    #[error("Unable to add volume source [{0}] because it already exists")]
    SourceTaken(String),
    /// The source is neither a path nor a descriptor.
    #[error("the volume '{0}' is neither a file nor a block device")]
    Source(String),
    /// The VM has no SCSI controller.
    #[error("the manifest disables hotplug (disableHotplug)")]
    Disabled,
}

impl VmPlan {
    /// Plans the disk of a hot-plugged volume, for which the VMM chooses the address, or the disc of a CD-ROM drive.
    ///
    /// # Errors
    /// See [`PlugError`]. The texts for duplicate names and images are those of KubeVirt.
    pub fn plug(&self, volume: &NewVolume) -> Result<PlugPlan, PlugError> {
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
        let there = self.disks.iter().find(|disk| disk.name == *name);
        if let Some(there) = there.filter(|there| !there.is_empty_drive()) {
            let mut wanted = match there.device {
                DeviceType::Cdrom { .. } => volume.disc_in(there),
                DeviceType::Disk | DeviceType::Lun { .. } => volume.disk(queues),
            };
            if let Some(address) = there.scsi_address() {
                wanted.assign(address);
            }
            // A running disk keeps what its claim's status said when it was plugged.
            wanted.preallocated = there.preallocated;
            return match *there == wanted {
                true => Ok(PlugPlan::Present(Box::new(there.clone()))),
                false => Err(PlugError::NameTaken(name.clone())),
            };
        }
        if self.disks.iter().any(|disk| disk.source == *source) {
            return Err(PlugError::SourceTaken(called));
        }
        Ok(match there {
            Some(drive) => PlugPlan::Disc(Box::new(volume.disc_in(drive))),
            None => PlugPlan::New(Box::new(volume.disk(queues))),
        })
    }
}

impl NewVolume {
    /// A drive with this volume as its disc.
    fn disc_in(&self, drive: &DiskPlan) -> DiskPlan {
        DiskPlan {
            origin: self.origin.clone(),
            source: self.source.clone(),
            ..drive.clone()
        }
    }

    fn disk(&self, queues: u32) -> DiskPlan {
        let serial = if self.serial.is_empty() {
            &self.name
        } else {
            &self.serial
        };
        DiskPlan {
            name: self.name.clone(),
            target: String::new(),
            controller: Controller::VirtioScsiUnassigned,
            device: DeviceType::Disk,
            read_only: self.read_only,
            overlay: false,
            format: FormatPolicy::Raw,
            serial: Some(serial.clone()),
            cache: self.cache,
            shareable: self.shareable,
            block_size: self.block_size,
            error_policy: self.error_policy,
            preallocated: self.preallocated,
            queues,
            io_thread: None,
            boot_order: None,
            origin: self.origin.clone(),
            source: self.source.clone(),
        }
    }
}
