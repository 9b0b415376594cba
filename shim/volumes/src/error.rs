//! Errors of volumes.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::FileType;

use super::path_handle::describe;

/// Error of opening a volume or kernel file of a VM.
#[derive(Debug, thiserror::Error)]
#[error("{given_by}: {fault}")]
pub struct VolumeError {
    /// The volume's name, or the command line option.
    pub given_by: String,
    #[source]
    pub fault: VolumeFault,
}

impl VolumeError {
    /// The VMM refused an image. Its reason may quote the image, so control characters are replaced.
    pub fn refused(volume: &str, path: &Path, reason: &str) -> VolumeError {
        let printable = |c: char| if c.is_control() { ' ' } else { c };
        VolumeFault::for_volume(volume)(VolumeFault::RefusedImage {
            path: path.to_owned(),
            reason: reason.chars().map(printable).collect(),
        })
    }
}

/// Cause of a [`VolumeError`].
#[derive(Debug, thiserror::Error)]
pub enum VolumeFault {
    /// A system call on a path failed.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The scratch directory cannot be used.
    #[error(
        "{}{}: {cause}: set HUSK_SCRATCH_DIR to a directory with room on a real disk",
        if *chosen { "HUSK_SCRATCH_DIR=" } else { "" },
        directory.display()
    )]
    Scratch {
        directory: PathBuf,
        /// `HUSK_SCRATCH_DIR` is set.
        chosen: bool,
        /// Not a `source`: the message contains it before the remedy.
        cause: io::Error,
    },
    /// The file has the wrong type.
    #[error("{} is {}, not {wanted}", path.display(), describe(*kind))]
    WrongFileType {
        path: PathBuf,
        kind: FileType,
        wanted: &'static str,
    },
    /// The path is not in the pod's mounts, devices or hotplug directory.
    #[error("{} is not in a mount, the devices or the hotplug directory of this pod", .0.display())]
    NotInPod(PathBuf),
    /// A passed descriptor is not open in the required way.
    #[error("the descriptor {0}")]
    Descriptor(&'static str),
    /// A file that a snapshot does not hold is not what it was.
    #[error("{} has changed since the snapshot, which needs it as it was", .0.display())]
    Changed(PathBuf),
    /// The content of a file of a snapshot could not be copied.
    #[error("copying {} failed: {source}", path.display())]
    Copy { path: PathBuf, source: io::Error },
    #[error("{} is in use by another VM or program", .0.display())]
    InUse(PathBuf),
    /// The image is empty, or not a whole number of blocks.
    #[error("{} has {bytes} bytes: the size must be a non-zero multiple of {unit} bytes", path.display())]
    BadSize {
        path: PathBuf,
        bytes: u64,
        /// Block size in bytes.
        unit: u64,
    },
    /// `cache: none` needs direct I/O.
    #[error("Unable to use 'none' cache mode, file system where {} is stored does not support direct I/O", .0.display())]
    NoDirectIo(PathBuf),
    /// The image format is recognised but not supported.
    #[error("{}: unsupported image format: {format}", path.display())]
    UnsupportedFormat { path: PathBuf, format: &'static str },
    /// The VMM, which alone parses images, refused it.
    #[error("{}: {reason}", path.display())]
    RefusedImage { path: PathBuf, reason: String },
    /// A `lun` is not a SCSI device.
    #[error("{} is not a SCSI device; use `disk` instead of `lun`", .0.display())]
    NotScsi(PathBuf),
    /// A `lun` is a partition: commands would reach the whole device.
    #[error("{} is a partition, and a `lun` is a whole SCSI device; use `disk` instead", .0.display())]
    Partition(PathBuf),
    /// Persistent reservations need CAP_SYS_RAWIO.
    #[error("persistent reservations on {} need CAP_SYS_RAWIO: run as root, or remove `lun.reservation`", .0.display())]
    NeedsRawIo(PathBuf),
    /// Persistent reservations on a dm-multipath map would be made by one path only.
    #[error("{} has several paths, and a persistent reservation binds one: remove `lun.reservation`", .0.display())]
    Multipath(PathBuf),
    /// A directory of keys lacks the required key.
    #[error("{} has no file {keys}", path.display())]
    NoKey {
        path: PathBuf,
        /// Accepted names.
        keys: String,
    },
    /// A directory of keys exceeds the limits of API objects.
    #[error("{} is too large: at most 1024 entries, 4 MiB in total, 8 levels", .0.display())]
    TooManyFiles(PathBuf),
    /// A container image cannot be used.
    #[error("{} is not a usable container image: {reason}", path.display())]
    ContainerImage { path: PathBuf, reason: String },
    /// A hostDisk does not exist, and its manifest does not say how to create it.
    #[error(
        "{} does not exist: create it, or set hostDisk.type to DiskOrCreate and hostDisk.capacity",
        .0.display()
    )]
    NoHostDisk(PathBuf),
    /// A containerDisk has no file.
    #[error("no file found in folder {}, no disk present", .0.display())]
    NoDisk(PathBuf),
    /// A containerDisk has several files.
    #[error("more than one file found in folder {}, only one disk is allowed", .0.display())]
    ManyDisks(PathBuf),
    /// Not enough space for a new image.
    #[error(
        "unable to create {}, not enough space, demanded size {demanded} B is bigger than available space {available} B, \
         also after taking 10 % toleration into account",
        path.display()
    )]
    NoSpace {
        path: PathBuf,
        /// In bytes.
        demanded: u64,
        /// In bytes.
        available: u64,
    },
    /// Below KubeVirt's minimum size of new disks.
    #[error("the size is too low, must be at least 1MiB")]
    TooSmall,
    /// The ISO image could not be built.
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

    /// Adds the path that a system call failed on.
    pub(super) fn io<E: Into<io::Error>>(path: impl Into<PathBuf>) -> impl FnOnce(E) -> VolumeFault {
        let path = path.into();
        move |source| VolumeFault::Io {
            path,
            source: source.into(),
        }
    }

    /// Adds the name of the volume.
    pub(super) fn for_volume(volume: &str) -> impl FnOnce(VolumeFault) -> VolumeError {
        VolumeFault::given_by(format!("volume {volume:?}"))
    }

    /// Adds the source that named the file.
    pub(super) fn given_by(given_by: String) -> impl FnOnce(VolumeFault) -> VolumeError {
        move |fault| VolumeError { given_by, fault }
    }
}
