//! Opens the filesystem on a partition.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::ext4::Ext4Volume;
use crate::fat::FatVolume;
use crate::probe::FsKind;
use crate::source::Extent;
use crate::volume::{Sink, Volume, VolumeError};

/// Opens the filesystem on `extent`, which [`probe`](crate::probe::probe) found to be `content`.
pub(crate) fn open(extent: Extent, content: FsKind) -> Result<Box<dyn Volume>, VolumeError> {
    match content {
        FsKind::Ext(_) => {
            catch_panics(|| Ext4Volume::open(extent)).map(|v| Box::new(PanicGuard(v)) as Box<dyn Volume>)
        }
        FsKind::Fat => {
            catch_panics(|| FatVolume::open(extent)).map(|v| Box::new(PanicGuard(v)) as Box<dyn Volume>)
        }
        other => Err(VolumeError::Filesystem(format!(
            "{}: Husk reads ext2, ext3, ext4 and FAT",
            other.name()
        ))),
    }
}

/// Runs `f` and turns a panic of a filesystem crate on a damaged image into an error.
fn catch_panics<T>(f: impl FnOnce() -> Result<T, VolumeError>) -> Result<T, VolumeError> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or(Err(VolumeError::Panicked))
}

/// A volume that turns panics of its reader into errors.
struct PanicGuard<V>(V);

impl<V: Volume> Volume for PanicGuard<V> {
    fn uuid(&self) -> &str {
        self.0.uuid()
    }

    fn label(&self) -> &str {
        self.0.label()
    }

    fn note(&self) -> Option<&str> {
        self.0.note()
    }

    fn list(&self, path: &str) -> Result<Vec<String>, VolumeError> {
        catch_panics(|| self.0.list(path))
    }

    fn size(&self, path: &str) -> Result<u64, VolumeError> {
        catch_panics(|| self.0.size(path))
    }

    fn stream(&self, path: &str, size: u64, sink: &mut Sink<'_>) -> Result<(), VolumeError> {
        catch_panics(|| self.0.stream(path, size, sink))
    }
}
