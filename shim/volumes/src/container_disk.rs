//! containerDisk: one image file in the folder `disk` of a container image. Whoever built the image chose every name
//! in it, so nothing in it leads anywhere else.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, OFlags};

use super::error::Fault;
use super::format::{ImageFormat, probe};
use super::image::{self, Access};
use super::path::Found;
use super::paths::Paths;
use super::scratch::Scratch;
use super::{Image, oci, overlay};

/// Where a disk is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Within<'a> {
    /// An image file, an archive, or the root directory of a container image.
    pub(super) path: &'a Path,
    /// The file in there, if the manifest names it.
    pub(super) image_path: Option<&'a Path>,
    pub(super) paths: &'a Paths,
}

/// Opens the disk for reading, or an overlay of it for writing: what the VM writes dies with it.
pub(super) fn open(
    within: Within<'_>,
    access: Access,
    scratch: &Scratch,
    tell: &dyn Fn(u64, u64),
) -> Result<Image, Fault> {
    let Within {
        path,
        image_path,
        paths,
    } = within;
    let given = Found::on_host(path).map_err(Fault::io(path))?;
    if paths.are_callers()
        && let Some(image) = oci::Image::find(&given)?
    {
        let file = image.extract(image_path, scratch, tell)?;
        return unpacked(file, path, access, scratch);
    }
    let found = paths.image(find(given, within)?)?;
    if !matches!(found.kind, FileType::RegularFile | FileType::BlockDevice) {
        return Err(Fault::Kind {
            path: found.path.clone(),
            kind: found.kind,
            wanted: "an image file",
        });
    }
    let file = File::from(found.open(OFlags::RDONLY).map_err(Fault::io(&found.path))?);
    let (format, access) = probed(&file, &found.path, access)?;
    if access.read_only {
        let opened = image::open(&found, access)?;
        return Ok(Image::of(opened, format, &found.path));
    }
    overlay::over(&found, format, access, scratch)
}

/// A disk that was unpacked is this VM's own already: a raw one is written in place.
fn unpacked(file: File, path: &Path, access: Access, scratch: &Scratch) -> Result<Image, Fault> {
    let (format, access) = probed(&file, path, access)?;
    if format == ImageFormat::Raw && !access.read_only {
        let opened = image::finish(OwnedFd::from(file), path, access)?;
        return Ok(Image::of(opened, format, path));
    }
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    let reader = File::open(name).map_err(Fault::io(scratch.path()))?;
    let read_only = Access {
        read_only: true,
        ..access
    };
    let (file, cache) = image::finish(reader.into(), path, read_only)?;
    if access.read_only {
        return Ok(Image::of((file, cache), format, path));
    }
    overlay::on(file, format, cache, path, scratch)
}

fn probed(file: &File, path: &Path, access: Access) -> Result<(ImageFormat, Access), Fault> {
    Ok(match probe(file, path)? {
        ImageFormat::Raw => (ImageFormat::Raw, access),
        // Its size is that of a file, not of a disk.
        ImageFormat::Qcow2 => {
            let access = access.buffered();
            (ImageFormat::Qcow2, Access { unit: 1, ..access })
        }
    })
}

/// The image file: `path` itself, or in the container image whose root, or whose folder `disk`, `path` is.
fn find(given: Found, within: Within<'_>) -> Result<Found, Fault> {
    let Within {
        path,
        image_path,
        paths,
    } = within;
    if !given.is_directory() {
        return Ok(given);
    }
    if let Some(image_path) = image_path {
        return given.child(image_path).map_err(Fault::io(path.join(image_path)));
    }
    let folder = match given.child(Path::new("disk")) {
        Ok(folder) if folder.is_directory() => folder,
        // A caller may name the folder itself.
        _ if paths.are_callers() => given,
        _ => return Err(Fault::NoDisk(path.join("disk"))),
    };
    let mut names = folder.names().map_err(Fault::io(&folder.path))?;
    match (names.pop(), names.is_empty()) {
        (None, _) => Err(Fault::NoDisk(folder.path)),
        (Some(_), false) => Err(Fault::ManyDisks(folder.path)),
        (Some(name), true) => folder.child(&name).map_err(Fault::io(folder.path.join(&name))),
    }
}
