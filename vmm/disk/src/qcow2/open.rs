//! Opens and creates images. The author of an image may be hostile.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use imago::format::PreallocateMode;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatCreateBuilder, FormatDriverBuilder};

use super::file_storage::FileStorage;
use super::header::{Qcow2Header, refused};
use crate::geometry::{self, invalid};
use crate::{CacheMode, DiskOptions, ImageFormat};

/// Cluster size of new overlays, in bytes.
pub(crate) const CLUSTER: usize = 64 << 10;

/// An image that imago opened.
pub(super) type ImagoAccess = FormatAccess<FileStorage>;

/// Runs imago and turns a panic into an error.
pub(super) fn guarded<T>(run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(io::Error::other("imago panicked")))
}

pub(super) fn open_file(file: File, options: DiskOptions) -> io::Result<Arc<File>> {
    if options.cache == CacheMode::None {
        return Err(invalid(
            "cache mode none is not available for qcow2: use writeback or writethrough".into(),
        ));
    }
    if geometry::check_access(&file, options)? {
        return Err(invalid(
            "qcow2 images and their bases cannot be opened with O_DIRECT".into(),
        ));
    }
    Ok(Arc::new(file))
}

pub(super) fn open_image(
    file: &Arc<File>,
    base: Option<ImagoAccess>,
    writable: bool,
) -> io::Result<(ImagoAccess, Qcow2Header)> {
    if !file.metadata()?.file_type().is_file() {
        return Err(invalid("a qcow2 image must be a regular file".into()));
    }
    let header = Qcow2Header::load(file, writable)?;
    let access = guarded(|| {
        let image = Qcow2::builder(FileStorage::new(file)?)
            .write(writable)
            .backing(base)
            .data_file(None)
            .open(DenyImplicitOpenGate::default())?;
        if image.implicit_backing_file().is_some() || image.requires_external_data_file() {
            return Err(refused("it names another file"));
        }
        Ok(FormatAccess::new(image))
    })
    .map_err(|error| match error.kind() {
        // imago reports a bad image as any of these kinds.
        io::ErrorKind::Other | io::ErrorKind::InvalidInput => refused(error.to_string()),
        _ => error,
    })?;
    if access.size() != header.size {
        return Err(refused("it changed while it was opened"));
    }
    Ok((access, header))
}

pub(super) fn open_base(
    image: &File,
    base: File,
    format: ImageFormat,
    options: DiskOptions,
) -> io::Result<ImagoAccess> {
    let read_only = true;
    let base = open_file(base, DiskOptions { read_only, ..options })?;
    let (upper, lower) = (image.metadata()?, base.metadata()?);
    if (upper.dev(), upper.ino()) == (lower.dev(), lower.ino()) {
        return Err(invalid("it is the image itself".into()));
    }
    match format {
        ImageFormat::Raw => guarded(|| {
            Ok(FormatAccess::new(Raw::open_image(
                FileStorage::new(&base)?,
                false,
            )?))
        }),
        ImageFormat::Qcow2 => Ok(open_image(&base, None, false)?.0),
    }
}

/// Formats an empty file.
pub(crate) fn create(file: &Arc<File>, size: u64, cluster: usize) -> io::Result<()> {
    if !file.metadata()?.file_type().is_file() || file.metadata()?.len() > 0 {
        return Err(invalid("a new overlay must be an empty regular file".into()));
    }
    if size == 0 || !size.is_multiple_of(512) {
        return Err(invalid(format!("size {size} must be a non-zero multiple of 512")));
    }
    guarded(|| {
        Qcow2::<FileStorage>::create_builder(FileStorage::new(file)?)
            .size(size)
            .preallocate(PreallocateMode::None)
            .cluster_size(cluster)
            .create()
    })?;
    // Refuses to create an image that could not be opened again: one too large for its clusters.
    Qcow2Header::load(file, true).map(|_| ())
}
