//! What can be wrong with a volume.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::FileType;

use super::path_handle::describe;

/// Why a volume, or a kernel file, of a VM could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("{given_by}: {fault}")]
pub struct VolumeError {
    /// What names the file: a volume and its name, or an option of the command line.
    pub given_by: String,
    /// What is wrong; its own source is this error's.
    #[source]
    pub fault: VolumeFault,
}

impl VolumeError {
    /// The image of a volume, which the VMM refused for a reason that may quote the image.
    pub fn refused(volume: &str, path: &Path, reason: &str) -> VolumeError {
        let printable = |c: char| if c.is_control() { ' ' } else { c };
        VolumeFault::for_volume(volume)(VolumeFault::RefusedImage {
            path: path.to_owned(),
            reason: reason.chars().map(printable).collect(),
        })
    }
}

/// What is wrong with a file meant for a VM.
#[derive(Debug, thiserror::Error)]
pub enum VolumeFault {
    /// A system call on a path failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is no place for what a VM does not keep.
    #[error(
        "{}{}: {cause}: set HUSK_SCRATCH_DIR to a directory with room on a real disk",
        if *chosen { "HUSK_SCRATCH_DIR=" } else { "" },
        directory.display()
    )]
    Scratch {
        /// The directory.
        directory: PathBuf,
        /// The variable chose it.
        chosen: bool,
        /// Reason; in the text already, before the way out.
        cause: io::Error,
    },
    /// Neither a regular file nor, where one would do, a block device.
    #[error("{} is {}, not {wanted}", path.display(), describe(*kind))]
    WrongFileType {
        /// The file.
        path: PathBuf,
        /// What it is.
        kind: FileType,
        /// What it should be.
        wanted: &'static str,
    },
    /// A pod may use only what it was given.
    #[error("{} is nothing that this pod was given: neither a device, nor in a mount, nor in its hotplug directory", .0.display())]
    NotInPod(PathBuf),
    /// What was handed over is not open in the way that is needed.
    #[error("the descriptor {0}")]
    Descriptor(&'static str),
    /// Somebody else has it open.
    #[error("{} is in use by another VM or program", .0.display())]
    InUse(PathBuf),
    /// A disk consists of whole blocks, one at least.
    #[error("{} has {bytes} bytes: a raw image is a multiple of {unit} bytes and not empty", path.display())]
    BadSize {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// Bytes of a block.
        unit: u64,
    },
    /// `cache: none` was asked for.
    #[error("Unable to use 'none' cache mode, file system where {} is stored does not support direct I/O", .0.display())]
    NoDirectIo(PathBuf),
    /// A format that is recognised but not served.
    #[error("{}: unsupported image format: {format}", path.display())]
    UnsupportedFormat {
        /// The file.
        path: PathBuf,
        /// The format.
        format: &'static str,
    },
    /// The VMM, which alone looks into images, refused it.
    #[error("{}: {reason}", path.display())]
    RefusedImage {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A `lun` that is no SCSI device.
    #[error("{} is not a SCSI device; use `disk` instead of `lun`", .0.display())]
    NotScsi(PathBuf),
    /// A `lun` that is a part of a SCSI device: commands would reach the whole of it.
    #[error("{} is a partition, and a `lun` is a whole SCSI device; use `disk` instead", .0.display())]
    Partition(PathBuf),
    /// Persistent reservations without the right to make them.
    #[error("persistent reservations on {} need CAP_SYS_RAWIO: run as root, or without `lun.reservation`", .0.display())]
    NeedsRawIo(PathBuf),
    /// A directory of keys without the one that is needed.
    #[error("{} has no file {keys}", path.display())]
    NoKey {
        /// The directory.
        path: PathBuf,
        /// The names it may have.
        keys: String,
    },
    /// A directory of keys that no object can have.
    #[error("{} holds too much: a volume of files has at most 1024 of them, 4 MiB together, 8 levels deep", .0.display())]
    TooManyFiles(PathBuf),
    /// A container image that cannot be used.
    #[error("{} is no usable container image: {reason}", path.display())]
    ContainerImage {
        /// The archive or directory.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A containerDisk without a disk.
    #[error("no file found in folder {}, no disk present", .0.display())]
    NoDisk(PathBuf),
    /// A containerDisk with a choice of disks.
    #[error("more than one file found in folder {}, only one disk is allowed", .0.display())]
    ManyDisks(PathBuf),
    /// An image could not be created.
    #[error(
        "unable to create {}, not enough space, demanded size {demanded} B is bigger than available space {available} B, \
         also after taking 10 % toleration into account",
        path.display()
    )]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// Bytes asked for.
        demanded: u64,
        /// Bytes there are.
        available: u64,
    },
    /// KubeVirt's least size of a disk it creates.
    #[error("the size is too low, must be at least 1MiB")]
    TooSmall,
    /// A volume of files could not be built.
    #[error("building the ISO image failed: {0}")]
    Iso(String),
}

/// Reason why a container image is refused, without the path of the image.
pub(super) type Reason = String;

impl VolumeFault {
    pub(super) fn container_image(path: &Path, reason: Reason) -> VolumeFault {
        VolumeFault::ContainerImage {
            path: path.to_owned(),
            reason,
        }
    }

    /// Names the file a system call failed on.
    pub(super) fn io<E: Into<io::Error>>(path: impl Into<PathBuf>) -> impl FnOnce(E) -> VolumeFault {
        let path = path.into();
        move |source| VolumeFault::Io {
            path,
            source: source.into(),
        }
    }

    /// Names the volume.
    pub(super) fn for_volume(volume: &str) -> impl FnOnce(VolumeFault) -> VolumeError {
        VolumeFault::given_by(format!("volume {volume:?}"))
    }

    /// Names what the file was given by.
    pub(super) fn given_by(given_by: String) -> impl FnOnce(VolumeFault) -> VolumeError {
        move |fault| VolumeError { given_by, fault }
    }
}
