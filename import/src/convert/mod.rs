//! Converts an image to the raw disk of a volume.
//!
//! Decompressors and qcow2 tables read what strangers wrote. So a process of its own does it, which is confined before
//! it reads a byte: it has the image open for reading, the disk for writing, and a pipe for its reports, and it can
//! open nothing else. What it reports is not trusted either.

mod confined;
mod format;
mod image;
mod process;
mod report;

use std::fs::File;

use husk_images::Event;

use crate::volume::{Entry, ImportDirectory, VolumeError};
use image::Limits;
use process::Converter;
use report::{ConvertError, Converted};

pub use confined::serve;

/// First argument of the confined process.
pub const ARGUMENT: &str = "convert";

/// Converts the image to the new disk of the directory, and returns its size in bytes.
///
/// # Errors
/// The image is in an unknown format, damaged or too large; or there is no room for it.
pub fn convert(
    image: File,
    directory: &ImportDirectory,
    size: Option<u64>,
    emit: &dyn Fn(&Event),
) -> Result<u64, VolumeError> {
    match once(image, directory, size, emit)? {
        Converted::Disk { size } => Ok(size),
        Converted::Unpacked => {
            directory.rename(Entry::NewDisk, Entry::Unpacked)?;
            let path = directory.path(Entry::Unpacked);
            let unpacked = File::open(&path).map_err(VolumeError::io(&path))?;
            match once(unpacked, directory, size, emit)? {
                Converted::Disk { size } => Ok(size),
                Converted::Unpacked => Err(VolumeError::Unreadable("it is compressed twice".into())),
            }
        }
    }
}

fn once(
    image: File,
    directory: &ImportDirectory,
    size: Option<u64>,
    emit: &dyn Fn(&Event),
) -> Result<Converted, VolumeError> {
    let disk = directory.file(Entry::NewDisk)?;
    let limits = Limits {
        size,
        room: directory.room()?,
    };
    let written = disk
        .try_clone()
        .map_err(VolumeError::io(&directory.path(Entry::NewDisk)))?;
    let converted = Converter::start(image, disk, limits)?
        .wait(&|done, size| emit(&Event::Converting { done, size }))
        .map_err(|error| of_report(error, directory, size))?;
    if let Converted::Disk { size: reported } = converted {
        let length = written
            .metadata()
            .map_err(VolumeError::io(&directory.path(Entry::NewDisk)))?
            .len();
        if length != reported || size.is_some_and(|size| size != reported) {
            return Err(VolumeError::Unreadable(
                "its disk has another size than it says".into(),
            ));
        }
    }
    Ok(converted)
}

fn of_report(error: ConvertError, directory: &ImportDirectory, size: Option<u64>) -> VolumeError {
    match (error, size) {
        (ConvertError::TooLarge { needed: Some(needed) }, Some(size)) => VolumeError::Larger { needed, size },
        (ConvertError::TooLarge { .. }, Some(size)) => VolumeError::LargerThanClaim { size },
        (ConvertError::TooLarge { .. }, None) => {
            VolumeError::Unreadable("it unpacks to more than 1 TiB".into())
        }
        (ConvertError::Full, _) => directory.full(),
        (ConvertError::Format { reason }, _) => VolumeError::Format(reason),
        (ConvertError::Unreadable { reason }, _) => VolumeError::Unreadable(reason),
        (ConvertError::Failed { reason }, _) => VolumeError::Conversion(reason),
    }
}
