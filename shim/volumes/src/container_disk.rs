//! containerDisk: one image file in the folder `disk` of a container image. All names in the image are untrusted, so no
//! path may lead out of it.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, OFlags};

use super::error::VolumeFault;
use super::image::{self, ImageAccess};
use super::image_format::{ImageFormat, probe};
use super::open_disk::{BackingImage, DiskImage};
use super::path_handle::PathHandle;
use super::path_policy::PathPolicy;
use super::scratch::ScratchDir;
use super::{oci, overlay};

/// Source of a containerDisk.
#[derive(Debug, Clone, Copy)]
pub(super) struct ContainerDiskSource<'a> {
    /// An image file, an archive, or the root directory of a container image.
    pub(super) path: &'a Path,
    /// Path of the file in the image, if the manifest sets one.
    pub(super) image_path: Option<&'a Path>,
    pub(super) paths: &'a PathPolicy,
}

/// Opens the disk for reading, or an overlay of it for writing, which ends with the VM.
pub(super) fn open(
    within: ContainerDiskSource<'_>,
    access: ImageAccess,
    scratch: &ScratchDir,
    progress: &dyn Fn(u64, u64),
) -> Result<DiskImage, VolumeFault> {
    let ContainerDiskSource {
        path,
        image_path,
        paths,
    } = within;
    let given = PathHandle::on_host(path).map_err(VolumeFault::io(path))?;
    if paths.is_caller()
        && let Some(image) = oci::ContainerImage::find(&given)?
    {
        let file = image.extract(image_path, scratch, progress)?;
        return unpacked(file, path, access, scratch);
    }
    let found = paths.image(find(given, within)?)?;
    if !matches!(found.kind, FileType::RegularFile | FileType::BlockDevice) {
        return Err(VolumeFault::WrongFileType {
            path: found.path.clone(),
            kind: found.kind,
            wanted: "an image file",
        });
    }
    let file = File::from(found.open(OFlags::RDONLY).map_err(VolumeFault::io(&found.path))?);
    let (format, access) = probed(&file, &found.path, access)?;
    if access.read_only {
        let opened = image::open(&found, access)?;
        return Ok(DiskImage::new(opened, format, &found.path));
    }
    overlay::over(&found, format, access, scratch)
}

/// An unpacked disk belongs to this VM, so a raw one is written in place.
fn unpacked(
    file: File,
    path: &Path,
    access: ImageAccess,
    scratch: &ScratchDir,
) -> Result<DiskImage, VolumeFault> {
    let (format, access) = probed(&file, path, access)?;
    if format == ImageFormat::Raw && !access.read_only {
        let opened = image::finish(OwnedFd::from(file), path, access)?;
        return Ok(DiskImage::new(opened, format, path).private());
    }
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    let reader = File::open(name).map_err(VolumeFault::io(scratch.path()))?;
    let read_only = ImageAccess {
        read_only: true,
        ..access
    };
    let (file, cache) = image::finish(reader.into(), path, read_only)?;
    if access.read_only {
        return Ok(DiskImage::new((file, cache), format, path).private());
    }
    let base = BackingImage {
        file,
        format,
        private: true,
    };
    overlay::on(base, cache, path, scratch)
}

fn probed(file: &File, path: &Path, access: ImageAccess) -> Result<(ImageFormat, ImageAccess), VolumeFault> {
    Ok(match probe(file, path)? {
        ImageFormat::Raw => (ImageFormat::Raw, access),
        // The file size of a qcow2 image is not the disk size.
        ImageFormat::Qcow2 => {
            let access = access.buffered();
            (ImageFormat::Qcow2, ImageAccess { unit: 1, ..access })
        }
    })
}

/// Finds the image file: `path` itself, or a file in the container image whose root or folder `disk` is `path`.
fn find(given: PathHandle, within: ContainerDiskSource<'_>) -> Result<PathHandle, VolumeFault> {
    let ContainerDiskSource {
        path,
        image_path,
        paths,
    } = within;
    if !given.is_directory() {
        return Ok(given);
    }
    if let Some(image_path) = image_path {
        return given
            .child(image_path)
            .map_err(VolumeFault::io(path.join(image_path)));
    }
    let folder = match given.child(Path::new("disk")) {
        Ok(folder) if folder.is_directory() => folder,
        // A caller may name the folder `disk` itself.
        _ if paths.is_caller() => given,
        _ => return Err(VolumeFault::NoDisk(path.join("disk"))),
    };
    let mut names = folder.names().map_err(VolumeFault::io(&folder.path))?;
    match (names.pop(), names.is_empty()) {
        (None, _) => Err(VolumeFault::NoDisk(folder.path)),
        (Some(_), false) => Err(VolumeFault::ManyDisks(folder.path)),
        (Some(name), true) => folder
            .child(&name)
            .map_err(VolumeFault::io(folder.path.join(&name))),
    }
}
