//! Opens the sources of a plan's disks as descriptors for a VMM.
//!
//! The type of a file is checked before it is opened: only regular files and block devices are. Symbolic links in
//! container images are not followed. A disk, and a kernel, is locked while any process has it open.

mod block_sizes;
mod container_disk;
mod copy;
mod error;
mod file_identity;
mod host_disk;
mod image;
mod image_format;
mod image_handle;
mod image_lock;
mod iso;
mod key_files;
mod oci;
mod open_disk;
mod overlay;
mod passed_fd;
mod path_handle;
mod path_policy;
mod public_keys;
mod saved;
mod scratch;
mod scsi_lun;
mod sealed_memfd;
mod seed_iso;
mod sparse_writer;

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use husk_proto::vmm::v1::disk::Cache;
use husk_vmi::{BootPlan, DeviceType, DiskPlan, DiskSource, KERNEL_VOLUME, KernelFile, VmPlan};
use rustix::fs::{FileType, OFlags};

pub use block_sizes::BlockSizes;
pub use copy::{copy_image, next_data, reflink};
pub use error::{VolumeError, VolumeFault};
pub use file_identity::FileIdentity;
pub use image_format::ImageFormat;
pub use image_handle::{ImageHandle, reopen};
pub use image_lock::{Sharing, is_locked, lock_image};
pub use oci::{ImageFile, decompress, unpack_image};
pub use open_disk::{BackingImage, OpenDisk, OpenLun};
pub use passed_fd::identify;
pub use path_policy::{PathPolicy, PodMounts};
pub use public_keys::{passwords, public_keys};
pub use saved::{SavedBase, SavedImage, SavedVolume, open_saved};
pub use scratch::ScratchDir;
pub use sparse_writer::SparseWriter;

use image::ImageAccess;
use open_disk::DiskImage;
use path_handle::PathHandle;

/// Minimum size and granularity of new disks.
const MIB: u64 = 1 << 20;
/// Smallest block size of a disk, in bytes.
const SECTOR: u64 = 512;

/// All open files of a VM. Dropping it closes them and releases their locks, unless the descriptors were duplicated.
#[derive(Debug)]
pub struct Volumes {
    /// In the order of the plan.
    pub disks: Vec<OpenDisk>,
    pub kernel: Option<OwnedFd>,
    pub initrd: Option<OwnedFd>,
}

/// Progress of unpacking a container image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnpackProgress {
    pub volume: String,
    /// Compressed bytes of the layers read so far.
    pub done: u64,
    /// Compressed bytes of all layers.
    pub size: u64,
}

/// Opens all files of a VM, and creates them where the plan says so. Blocks: unpacking a container image may take
/// seconds. `progress` is called meanwhile.
pub fn open(
    plan: &VmPlan,
    scratch: &ScratchDir,
    paths: &PathPolicy,
    progress: impl Fn(UnpackProgress),
) -> Result<Volumes, VolumeError> {
    scratch.clear();
    let disks = plan.disks.iter().map(|disk| {
        let progress = |done, size| {
            progress(UnpackProgress {
                volume: disk.name.clone(),
                done,
                size,
            });
        };
        let made = match (&disk.source, plan.new_image_bytes.get(&disk.name)) {
            (DiskSource::File(path), Some(bytes)) => paths.create_missing_image(path, *bytes),
            _ => Ok(()),
        };
        let opened = made.and_then(|()| open_disk(disk, scratch, paths, &progress));
        opened.map_err(VolumeFault::for_volume(&disk.name))
    });
    let disks = disks.collect::<Result<Vec<_>, _>>()?;
    with_boot_files(plan, disks)
}

/// Opens and locks the kernel and the initial RAM disk of a VM whose disks are open.
fn with_boot_files(plan: &VmPlan, disks: Vec<OpenDisk>) -> Result<Volumes, VolumeError> {
    let (kernel, initrd) = match &plan.boot {
        BootPlan::Kernel { kernel, initrd, .. } => (Some(kernel), initrd.as_ref()),
        BootPlan::Disks { .. } => (None, None),
    };
    let boot_file = |file: Option<&KernelFile>, option: &str| {
        let given_by = |file: &KernelFile| match file {
            KernelFile::Path(_) => option.to_owned(),
            KernelFile::Beneath(_) => format!("volume {KERNEL_VOLUME:?}"),
        };
        file.map(|file| open_boot_file(file).map_err(VolumeFault::given_by(given_by(file))))
            .transpose()
    };
    Ok(Volumes {
        disks,
        kernel: boot_file(kernel, "--kernel")?,
        initrd: boot_file(initrd, "--initrd")?,
    })
}

/// Opens the image of a hotplugged volume, which is raw and written in place, or reopens a passed descriptor. Blocks.
pub fn open_hotplugged(
    disk: &DiskPlan,
    paths: &PathPolicy,
    handed: Option<&OwnedFd>,
) -> Result<OpenDisk, VolumeError> {
    let open = |found: PathHandle| {
        let path = found.path.clone();
        opened(disk, DiskImage::raw(image::open(&found, access(disk))?, &path))
    };
    let opened = match (&disk.source, handed) {
        (DiskSource::File(path), _) => paths.resolve_hotplugged(path).and_then(open),
        (DiskSource::Descriptor(_), Some(fd)) => passed_fd::reopenable(fd).and_then(open),
        _ => Err(VolumeFault::NotInPod(PathBuf::from(&disk.name))),
    };
    opened.map_err(VolumeFault::for_volume(&disk.name))
}

fn access(disk: &DiskPlan) -> ImageAccess {
    ImageAccess {
        read_only: disk.read_only,
        shareable: disk.shareable,
        cache: disk.cache,
        unit: SECTOR,
    }
}

fn open_disk(
    disk: &DiskPlan,
    scratch: &ScratchDir,
    paths: &PathPolicy,
    progress: &dyn Fn(u64, u64),
) -> Result<OpenDisk, VolumeFault> {
    let access = access(disk);
    let image = match &disk.source {
        // The monitor has the file of downward metrics.
        DiskSource::Empty | DiskSource::DownwardMetrics => return Ok(read_only(None)),
        // Only hotplugged volumes have passed descriptors.
        DiskSource::Descriptor(_) => return Err(VolumeFault::NotInPod(PathBuf::from(&disk.name))),
        DiskSource::CloudInit {
            layout,
            meta_data,
            public_keys,
            user_data,
            network_data,
        } => {
            let meta_data = public_keys::add_to(*layout, meta_data, public_keys)?;
            let image = seed_iso::cloud_init(*layout, &meta_data, user_data, network_data.as_ref())?;
            return sealed(&image);
        }
        DiskSource::Files { dir, label } => return sealed(&seed_iso::files(label, dir.as_deref())?),
        DiskSource::File(path) => {
            let found = paths.resolve_claim(path)?;
            match disk.device {
                DeviceType::Lun { reservation } => return scsi_lun::open(disk, &found, access, reservation),
                _ if disk.overlay => overlay::over(&found, ImageFormat::Raw, access, scratch)?,
                _ => DiskImage::raw(image::open(&found, access)?, path),
            }
        }
        DiskSource::HostDisk { path, create_bytes } => {
            DiskImage::raw(image::open(&paths.host_disk(path, *create_bytes)?, access)?, path)
        }
        DiskSource::ContainerDisk { path, image_path } => {
            let within = container_disk::ContainerDiskSource {
                path,
                image_path: image_path.as_deref(),
                paths,
            };
            container_disk::open(within, access, scratch, progress)?
        }
        DiskSource::EmptyDisk { capacity_bytes } => {
            let size = capacity_bytes / MIB * MIB;
            if size == 0 {
                return Err(VolumeFault::TooSmall);
            }
            let path = scratch.path();
            DiskImage::raw(image::finish(scratch.sparse(size)?, path, access)?, path).private()
        }
    };
    opened(disk, image)
}

/// Checks the size of an image and resolves its block sizes.
fn opened(disk: &DiskPlan, image: DiskImage) -> Result<OpenDisk, VolumeFault> {
    let (file, format) = image.content();
    let block_sizes = block_sizes::resolve(disk.block_size, file, &image.path)?;
    if let Some(sizes) = block_sizes
        && format == ImageFormat::Raw
    {
        image::check_size(file, &image.path, sizes.logical.into())?;
    }
    Ok(OpenDisk {
        file: Some(image.file),
        new_overlay: image.base.is_some(),
        base: image.base,
        private: image.private,
        path: image.path,
        read_only: disk.read_only,
        cache: image.cache,
        format: image.format,
        block_sizes,
        lun: None,
    })
}

/// A read-only medium, or an empty drive.
fn read_only(file: Option<OwnedFd>) -> OpenDisk {
    OpenDisk {
        private: file.is_some(),
        file,
        base: None,
        new_overlay: false,
        path: PathBuf::new(),
        read_only: true,
        cache: Cache::Writeback,
        format: ImageFormat::Raw,
        block_sizes: None,
        lun: None,
    }
}

fn sealed(image: &[u8]) -> Result<OpenDisk, VolumeFault> {
    let file = sealed_memfd::create("husk-iso", image).map_err(VolumeFault::io("husk-iso"))?;
    Ok(read_only(Some(file)))
}

fn open_boot_file(file: &KernelFile) -> Result<OwnedFd, VolumeFault> {
    let found = match file {
        KernelFile::Path(path) => PathHandle::on_host(path).map_err(VolumeFault::io(path))?,
        KernelFile::Beneath(file) => {
            PathHandle::beneath(&file.dir, &file.path).map_err(VolumeFault::io(file.dir.join(&file.path)))?
        }
    };
    if found.kind != FileType::RegularFile {
        return Err(VolumeFault::WrongFileType {
            path: found.path,
            kind: found.kind,
            wanted: "a regular file",
        });
    }
    let file = File::from(found.open(OFlags::RDONLY).map_err(VolumeFault::io(&found.path))?);
    // An image whose kernel a VM boots is in use: a reset and a restore read it again.
    lock_image(&file, &found.path, Sharing::ReadOnly)?;
    if found.was_removed().map_err(VolumeFault::io(&found.path))? {
        return Err(VolumeFault::io(&found.path)(io::Error::from(ErrorKind::NotFound)));
    }
    Ok(file.into())
}

#[cfg(test)]
mod tests;
