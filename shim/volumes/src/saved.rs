//! Opens the disks of a VM that goes on from a snapshot.
//!
//! An image that the guest writes is copied into a scratch file, so a snapshot is never written, and VMs that go on from
//! the same one share nothing. Other images of the snapshot are opened where they are. An image that the snapshot does
//! not hold is opened by its path, and must be what it was.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use husk_proto::vmm::v1::disk::Cache;
use husk_vmi::{DiskPlan, DiskSource, VmPlan};

use super::block_sizes::BlockSizes;
use super::copy::copy_image;
use super::error::{VolumeError, VolumeFault};
use super::file_identity::FileIdentity;
use super::image::{self, ImageAccess};
use super::image_format::ImageFormat;
use super::open_disk::{BackingImage, DiskImage, OpenDisk};
use super::path_policy::PathPolicy;
use super::scratch::ScratchDir;
use super::{MIB, UnpackProgress, Volumes, access, open_disk, with_boot_files};

/// A disk of a snapshot.
#[derive(Debug)]
pub enum SavedVolume {
    /// It has no content to keep, and is opened as at a start.
    Remade,
    /// The snapshot has its image.
    Held {
        /// The image, or the overlay.
        image: SavedImage,
        /// The backing image, if `image` is an overlay.
        base: Option<SavedBase>,
        /// Block sizes that the guest sees; `None` if the VMM chooses.
        block_sizes: Option<BlockSizes>,
    },
    /// Its image is at the path of the plan.
    Outside(FileIdentity),
}

/// An image of a snapshot.
#[derive(Debug)]
pub struct SavedImage {
    /// Open for reading. Nobody else has this open file.
    pub file: File,
    /// Its path, for errors.
    pub path: PathBuf,
    /// Its format.
    pub format: ImageFormat,
}

/// The backing image of an overlay.
#[derive(Debug)]
pub enum SavedBase {
    /// The snapshot has it.
    Held(SavedImage),
    /// It is at the path of the plan.
    Outside(FileIdentity),
}

/// As [`super::open`], for a VM that goes on from a snapshot with these disks, in the order of the plan. `progress` is
/// called with the bytes copied.
///
/// # Errors
/// Also if an image outside of the snapshot has changed.
pub fn open_saved(
    plan: &VmPlan,
    saved: Vec<SavedVolume>,
    scratch: &ScratchDir,
    paths: &PathPolicy,
    progress: impl Fn(UnpackProgress),
) -> Result<Volumes, VolumeError> {
    scratch.clear();
    let disks = plan.disks.iter().zip(saved).map(|(disk, saved)| {
        let progress = |done, size| {
            progress(UnpackProgress {
                volume: disk.name.clone(),
                done,
                size,
            });
        };
        let opened = match saved {
            SavedVolume::Remade => open_disk(disk, scratch, paths, &progress),
            SavedVolume::Outside(identity) => outside(disk, identity, scratch, paths),
            SavedVolume::Held {
                image,
                base: Some(SavedBase::Outside(identity)),
                ..
            } => over_outside(disk, image, identity, (scratch, paths), &progress),
            SavedVolume::Held {
                image,
                base: None,
                block_sizes,
            } => held(disk, image, None, scratch, &progress).map(|held| with_sizes(disk, held, block_sizes)),
            SavedVolume::Held {
                image,
                base: Some(SavedBase::Held(base)),
                block_sizes,
            } => held(disk, image, Some(base), scratch, &progress)
                .map(|held| with_sizes(disk, held, block_sizes)),
        };
        opened.map_err(VolumeFault::for_volume(&disk.name))
    });
    let disks = disks.collect::<Result<Vec<_>, _>>()?;
    with_boot_files(plan, disks)
}

/// Opens a disk whose image is at the plan's path.
fn outside(
    disk: &DiskPlan,
    identity: FileIdentity,
    scratch: &ScratchDir,
    paths: &PathPolicy,
) -> Result<OpenDisk, VolumeFault> {
    let open = open_disk(&existing(disk), scratch, paths, &|_, _| {})?;
    match &open.file {
        Some(file) if open.base.is_none() => check(file, identity, &open)?,
        _ => return Err(VolumeFault::Changed(open.path)),
    }
    Ok(open)
}

/// Opens an overlay whose base is at the plan's path.
fn over_outside(
    disk: &DiskPlan,
    image: SavedImage,
    identity: FileIdentity,
    (scratch, paths): (&ScratchDir, &PathPolicy),
    progress: &dyn Fn(u64, u64),
) -> Result<OpenDisk, VolumeFault> {
    let open = open_disk(&existing(disk), scratch, paths, &|_, _| {})?;
    match &open.base {
        Some(base) => check(&base.file, identity, &open)?,
        None => return Err(VolumeFault::Changed(open.path)),
    }
    Ok(OpenDisk {
        file: Some(copied(&image, scratch, progress)?),
        new_overlay: false,
        ..open
    })
}

fn check(file: &OwnedFd, identity: FileIdentity, open: &OpenDisk) -> Result<(), VolumeFault> {
    let now = FileIdentity::of(file).map_err(VolumeFault::io(&open.path))?;
    match is_unchanged(&open.path, now, identity) {
        true => Ok(()),
        false => Err(VolumeFault::Changed(open.path.clone())),
    }
}

fn is_unchanged(path: &Path, now: FileIdentity, before: FileIdentity) -> bool {
    // What was pulled again by its digest has the same content in another file.
    now == before || (is_of_stored_image(path) && now.bytes == before.bytes)
}

/// True for a file of an image that Husk has pulled, in a directory named by the image's digest (`husk-images`). Nobody
/// changes such a file.
fn is_of_stored_image(path: &Path) -> bool {
    let is_digest = |name: &OsStr| {
        let hex = name.as_encoded_bytes().strip_prefix(b"sha256-");
        hex.is_some_and(|hex| hex.len() == 64 && hex.iter().all(u8::is_ascii_hexdigit))
    };
    let mut parents = path
        .ancestors()
        .filter_map(|path| Some((path.file_name()?, path.parent()?)));
    parents.any(|(name, parent)| name == "rootfs" && parent.file_name().is_some_and(is_digest))
}

/// The disk, whose image must exist.
fn existing(disk: &DiskPlan) -> DiskPlan {
    let mut disk = disk.clone();
    if let DiskSource::HostDisk { create_bytes, .. } = &mut disk.source {
        *create_bytes = None;
    }
    disk
}

/// Opens a disk that the snapshot has whole.
fn held(
    disk: &DiskPlan,
    image: SavedImage,
    base: Option<SavedImage>,
    scratch: &ScratchDir,
    progress: &dyn Fn(u64, u64),
) -> Result<DiskImage, VolumeFault> {
    let access = access(disk);
    if let Some(base) = base {
        let read_only = ImageAccess {
            read_only: true,
            ..in_format(access, base.format)
        };
        let (file, cache) = image::finish(base.file.into(), &base.path, read_only.buffered())?;
        return Ok(DiskImage {
            file: copied(&image, scratch, progress)?,
            cache,
            format: image.format,
            base: Some(BackingImage {
                file,
                format: base.format,
                private: true,
            }),
            private: true,
            path: base.path,
        });
    }
    if matches!(
        disk.source,
        DiskSource::CloudInit { .. } | DiskSource::Files { .. }
    ) {
        // As at a start: it is never read past the page cache.
        return Ok(
            DiskImage::new((image.file.into(), Cache::Writeback), image.format, &image.path).private(),
        );
    }
    let access = in_format(access, image.format);
    let file = match disk.read_only {
        true => image.file.into(),
        false => copied(&image, scratch, progress)?,
    };
    let opened = image::finish(file, &image.path, access)?;
    Ok(DiskImage::new(opened, image.format, &image.path).private())
}

fn in_format(access: ImageAccess, format: ImageFormat) -> ImageAccess {
    match format {
        ImageFormat::Raw => access,
        // The size of a qcow2 file is not that of the disk.
        ImageFormat::Qcow2 => ImageAccess {
            unit: 1,
            ..access.buffered()
        },
    }
}

/// Copies an image of the snapshot into a scratch file.
fn copied(
    image: &SavedImage,
    scratch: &ScratchDir,
    progress: &dyn Fn(u64, u64),
) -> Result<OwnedFd, VolumeFault> {
    let file = scratch.file()?;
    let copied = copy_image(&image.file, &file, &mut |done, total| {
        // Little data is copied in an instant.
        if total >= MIB {
            progress(done, total);
        }
        Ok(())
    });
    copied.map_err(|source| VolumeFault::Copy {
        path: image.path.clone(),
        source,
    })?;
    Ok(file.into())
}

fn with_sizes(disk: &DiskPlan, image: DiskImage, block_sizes: Option<BlockSizes>) -> OpenDisk {
    OpenDisk {
        file: Some(image.file),
        base: image.base,
        new_overlay: false,
        private: true,
        path: image.path,
        read_only: disk.read_only,
        cache: image.cache,
        format: image.format,
        block_sizes,
        lun: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_was_pulled_again_is_the_same() {
        let before = FileIdentity {
            bytes: 1 << 20,
            inode: 7,
            modified_seconds: 1000,
            modified_nanoseconds: 0,
        };
        let (again, other) = (
            FileIdentity { inode: 8, ..before },
            FileIdentity { bytes: 1, ..before },
        );
        let store = format!("/var/lib/husk/images/sha256-{}", "0a".repeat(32));
        let stored = PathBuf::from(format!("{store}/rootfs/disk/root.qcow2"));
        assert!(is_unchanged(&stored, before, before) && is_unchanged(&stored, again, before));
        assert!(!is_unchanged(&stored, other, before));
        for path in [
            "/images/root.qcow2",
            "/images/sha256-0a/rootfs/disk/root.qcow2",
            "/rootfs/root",
            &store,
        ] {
            assert!(!is_unchanged(Path::new(path), again, before), "{path}");
        }
    }
}
