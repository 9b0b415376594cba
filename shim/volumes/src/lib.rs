//! From the sources a plan names to descriptors a VMM can be handed.
//!
//! What a path is, is found out before it is opened, and only regular files and block devices are. Below a folder
//! that came with a container image no symbolic link is followed. A disk is locked while anybody has it open.

mod block;
mod container_disk;
mod descriptor;
mod error;
mod format;
mod host_disk;
mod image;
mod iso;
mod key_files;
mod lun;
mod memory_file;
mod oci;
mod overlay;
mod path;
mod paths;
mod scratch;
mod seed;
mod sparse;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use husk_proto::vmm::v1::disk::Cache;
use husk_vmi::{BootPlan, DeviceType, DiskPlan, DiskSource, KERNEL_VOLUME, KernelFile, VmPlan};
use rustix::fs::{FileType, OFlags};

pub use block::BlockSizes;
pub use descriptor::identify;
pub use error::{Fault, VolumeError};
pub use format::ImageFormat;
pub use lun::OpenLun;
pub use paths::{Given, Paths};
pub use scratch::Scratch;

use image::Access;
use path::Found;

/// The least size of a disk that is made, and its granularity.
const MIB: u64 = 1 << 20;
/// Bytes of the smallest block a disk is addressed by.
const SECTOR: u64 = 512;

/// Everything of a VM that lies in files, opened. Dropping it closes them, which drops their locks unless the
/// descriptors were handed on.
#[derive(Debug)]
pub struct Volumes {
    /// In the plan's order.
    pub disks: Vec<OpenDisk>,
    /// The kernel, where the plan gives one.
    pub kernel: Option<OwnedFd>,
    /// Its initial RAM disk.
    pub initrd: Option<OwnedFd>,
}

/// One disk's data.
#[derive(Debug)]
pub struct OpenDisk {
    /// A file, block device or sealed memory; none for a drive without a medium.
    pub file: Option<OwnedFd>,
    /// What `file`, which is empty, is to become an overlay of.
    pub base: Option<Base>,
    /// What the image, that of the base if there is one, is called in errors.
    pub path: PathBuf,
    /// The descriptor, and so the disk, cannot be written.
    pub read_only: bool,
    /// The cache mode the descriptor is in.
    pub cache: Cache,
    /// The format of the data.
    pub format: ImageFormat,
    /// The block sizes the guest is told; none if that is the VMM's choice.
    pub block_sizes: Option<BlockSizes>,
    /// What belongs to a SCSI device of the host.
    pub lun: Option<OpenLun>,
}

/// An image that is only read, and shows where its overlay holds nothing.
#[derive(Debug)]
pub struct Base {
    /// The image, locked against whoever would write it.
    pub file: OwnedFd,
    /// Its format.
    pub format: ImageFormat,
}

/// How far the unpacking of a container image is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unpacking {
    /// The volume's name.
    pub volume: String,
    /// Bytes of its layers that were read.
    pub done: u64,
    /// Bytes of its layers.
    pub size: u64,
}

/// Opens, and where the plan says so makes, all files of a VM. Blocks; a container image may take seconds to unpack,
/// which `tell` is told now and then.
pub fn open(
    plan: &VmPlan,
    scratch: &Scratch,
    paths: &Paths,
    tell: impl Fn(Unpacking),
) -> Result<Volumes, VolumeError> {
    let disks = plan.disks.iter().map(|disk| {
        let tell = |done, size| {
            tell(Unpacking {
                volume: disk.name.clone(),
                done,
                size,
            });
        };
        open_disk(disk, scratch, paths, &tell).map_err(Fault::of(&disk.name))
    });
    let disks = disks.collect::<Result<Vec<_>, _>>()?;
    let (kernel, initrd) = match &plan.boot {
        BootPlan::Kernel { kernel, initrd, .. } => (Some(kernel), initrd.as_ref()),
        BootPlan::Disks { .. } => (None, None),
    };
    let boot_file = |file: Option<&KernelFile>, option: &str| {
        let given_by = |file: &KernelFile| match file {
            KernelFile::Path(_) => option.to_owned(),
            KernelFile::Beneath(_) => format!("volume {KERNEL_VOLUME:?}"),
        };
        file.map(|file| open_boot_file(file).map_err(Fault::by(given_by(file))))
            .transpose()
    };
    Ok(Volumes {
        disks,
        kernel: boot_file(kernel, "--kernel")?,
        initrd: boot_file(initrd, "--initrd")?,
    })
}

/// Opens the image of a volume that is plugged into a VM that runs: a raw one, written in place; or opens anew what was
/// handed over. Blocks.
pub fn open_plugged(
    disk: &DiskPlan,
    paths: &Paths,
    handed: Option<&OwnedFd>,
) -> Result<OpenDisk, VolumeError> {
    let open = |found: Found| {
        let path = found.path.clone();
        opened(disk, Image::raw(image::open(&found, access(disk))?, &path))
    };
    let opened = match (&disk.source, handed) {
        (DiskSource::File(path), _) => paths.plugged(path).and_then(open),
        (DiskSource::Descriptor(_), Some(fd)) => descriptor::found(fd).and_then(open),
        _ => Err(Fault::NotGiven(PathBuf::from(&disk.name))),
    };
    opened.map_err(Fault::of(&disk.name))
}

fn access(disk: &DiskPlan) -> Access {
    Access {
        read_only: disk.read_only,
        shareable: disk.shareable,
        cache: disk.cache,
        unit: SECTOR,
    }
}

fn open_disk(
    disk: &DiskPlan,
    scratch: &Scratch,
    paths: &Paths,
    tell: &dyn Fn(u64, u64),
) -> Result<OpenDisk, Fault> {
    let access = access(disk);
    let image = match &disk.source {
        DiskSource::Empty => return Ok(read_only(None)),
        // Only what is plugged is handed over.
        DiskSource::Descriptor(_) => return Err(Fault::NotGiven(PathBuf::from(&disk.name))),
        DiskSource::CloudInit {
            layout,
            meta_data,
            user_data,
            network_data,
        } => {
            let image = seed::cloud_init(*layout, meta_data, user_data, network_data.as_ref())?;
            return sealed(&image);
        }
        DiskSource::Files { dir, label } => return sealed(&seed::files(label, dir.as_deref())?),
        DiskSource::File(path) => {
            let found = paths.claim(path)?;
            match disk.device {
                DeviceType::Lun { reservation } => return lun::open(disk, &found, access, reservation),
                _ if disk.overlay => overlay::over(&found, ImageFormat::Raw, access, scratch)?,
                _ => Image::raw(image::open(&found, access)?, path),
            }
        }
        DiskSource::HostDisk { path, create_bytes } => {
            Image::raw(image::open(&paths.host_disk(path, *create_bytes)?, access)?, path)
        }
        DiskSource::ContainerDisk { path, image_path } => {
            let within = container_disk::Within {
                path,
                image_path: image_path.as_deref(),
                paths,
            };
            container_disk::open(within, access, scratch, tell)?
        }
        DiskSource::EmptyDisk { capacity_bytes } => {
            let size = capacity_bytes / MIB * MIB;
            if size == 0 {
                return Err(Fault::TooSmall);
            }
            let path = scratch.path();
            Image::raw(image::finish(scratch.sparse(size)?, path, access)?, path)
        }
    };
    opened(disk, image)
}

/// A disk of an image, whose size is right for it.
fn opened(disk: &DiskPlan, image: Image) -> Result<OpenDisk, Fault> {
    let (file, format) = image.content();
    let block_sizes = block::sizes(disk.block_size, file, &image.path)?;
    if let Some(sizes) = block_sizes
        && format == ImageFormat::Raw
    {
        image::check_size(file, &image.path, sizes.logical.into())?;
    }
    Ok(OpenDisk {
        file: Some(image.file),
        base: image.base,
        path: image.path,
        read_only: disk.read_only,
        cache: image.cache,
        format: image.format,
        block_sizes,
        lun: None,
    })
}

/// An open image, and what it lies on.
#[derive(Debug)]
struct Image {
    file: OwnedFd,
    cache: Cache,
    format: ImageFormat,
    base: Option<Base>,
    path: PathBuf,
}

impl Image {
    fn of((file, cache): (OwnedFd, Cache), format: ImageFormat, path: &Path) -> Image {
        Image {
            file,
            cache,
            format,
            base: None,
            path: path.to_owned(),
        }
    }

    fn raw(opened: (OwnedFd, Cache), path: &Path) -> Image {
        Image::of(opened, ImageFormat::Raw, path)
    }

    /// What holds the disk's content at first.
    fn content(&self) -> (&OwnedFd, ImageFormat) {
        match &self.base {
            Some(base) => (&base.file, base.format),
            None => (&self.file, self.format),
        }
    }
}

/// A drive's medium that nobody can write, or none.
fn read_only(file: Option<OwnedFd>) -> OpenDisk {
    OpenDisk {
        file,
        base: None,
        path: PathBuf::new(),
        read_only: true,
        cache: Cache::Writeback,
        format: ImageFormat::Raw,
        block_sizes: None,
        lun: None,
    }
}

fn sealed(image: &[u8]) -> Result<OpenDisk, Fault> {
    let file = memory_file::sealed("husk-iso", image).map_err(Fault::io("husk-iso"))?;
    Ok(read_only(Some(file)))
}

fn open_boot_file(file: &KernelFile) -> Result<OwnedFd, Fault> {
    let found = match file {
        KernelFile::Path(path) => Found::on_host(path).map_err(Fault::io(path))?,
        KernelFile::Beneath(file) => {
            Found::beneath(&file.dir, &file.path).map_err(Fault::io(file.dir.join(&file.path)))?
        }
    };
    if found.kind != FileType::RegularFile {
        return Err(Fault::Kind {
            path: found.path,
            kind: found.kind,
            wanted: "a regular file",
        });
    }
    found.open(OFlags::RDONLY).map_err(Fault::io(&found.path))
}

#[cfg(test)]
mod tests;
