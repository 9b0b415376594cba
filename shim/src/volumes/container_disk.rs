//! containerDisk: one image file in the folder `disk` of a container image. Whoever built the image chose every name
//! in it, so nothing in it leads anywhere else.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use husk_proto::vmm::v1::disk::Cache;
use rustix::fs::{FileType, OFlags};

use super::error::Fault;
use super::image::{self, Access};
use super::path::Found;
use super::scratch::Scratch;

/// Opens the disk for reading, or a private copy of it for writing: what the VM writes dies with it.
pub(super) fn open(
    path: &Path,
    image_path: Option<&Path>,
    access: Access,
    scratch: &Scratch,
    tell: &dyn Fn(u64, u64),
) -> Result<(OwnedFd, Cache), Fault> {
    let found = find(path, image_path)?;
    let (fd, cache) = image::open(
        &found,
        Access {
            read_only: true,
            ..access
        },
    )?;
    let mut magic = [0; 4];
    let file = File::from(found.open(OFlags::RDONLY).map_err(Fault::io(&found.path))?);
    file.read_exact_at(&mut magic, 0)
        .map_err(Fault::io(&found.path))?;
    if &magic == b"QFI\xfb" {
        return Err(Fault::Qcow2(found.path.clone()));
    }
    if access.read_only {
        return Ok((fd, cache));
    }
    if found.kind != FileType::RegularFile {
        return Err(Fault::Kind {
            path: found.path.clone(),
            kind: found.kind,
            wanted: "an image file",
        });
    }
    image::finish(scratch.copy(&file, tell)?, scratch.path(), access)
}

/// The image file: `path` itself, or in the container image whose root, or whose folder `disk`, `path` is.
fn find(path: &Path, image_path: Option<&Path>) -> Result<Found, Fault> {
    let given = Found::on_host(path).map_err(Fault::io(path))?;
    if !given.is_directory() {
        return Ok(given);
    }
    if let Some(image_path) = image_path {
        return given.child(image_path).map_err(Fault::io(path.join(image_path)));
    }
    let folder = match given.child(Path::new("disk")) {
        Ok(folder) if folder.is_directory() => folder,
        _ => given,
    };
    let mut names = folder.names().map_err(Fault::io(&folder.path))?;
    match (names.pop(), names.is_empty()) {
        (None, _) => Err(Fault::NoDisk(folder.path)),
        (Some(_), false) => Err(Fault::ManyDisks(folder.path)),
        (Some(name), true) => folder.child(&name).map_err(Fault::io(folder.path.join(&name))),
    }
}
