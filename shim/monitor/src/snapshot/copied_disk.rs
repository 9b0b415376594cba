//! Disks whose images were copied out of a snapshot, perhaps to another kind of file system.

use husk_proto::vmm::v1::disk::Cache;
use husk_vmi::CacheMode;
use husk_volumes::OpenDisk;

/// Gives a copy a write cache, unless the manifest chooses the mode (`planned`). On a file system with direct I/O the
/// guest has seen one, and for a driver that has not, each write is durable. A copy that direct I/O does not serve does
/// without. It ends with the VM, so the host's page cache loses nothing.
pub(crate) fn adapt(planned: CacheMode, open: &mut OpenDisk) {
    if planned == CacheMode::Auto && open.private && !open.read_only && open.cache == Cache::Writethrough {
        open.cache = Cache::Writeback;
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use husk_volumes::ImageFormat;

    use super::*;

    #[test]
    fn a_copy_on_a_file_system_without_direct_io_has_a_write_cache() {
        use Cache::{Writeback, Writethrough};
        let adapted = |planned, cache, private| {
            let mut open = OpenDisk {
                file: None,
                base: None,
                new_overlay: false,
                private,
                path: PathBuf::new(),
                read_only: false,
                cache,
                format: ImageFormat::Raw,
                block_sizes: None,
                lun: None,
            };
            adapt(planned, &mut open);
            open.cache
        };
        assert_eq!(adapted(CacheMode::Auto, Writethrough, true), Writeback);
        assert_eq!(adapted(CacheMode::WriteThrough, Writethrough, true), Writethrough);
        assert_eq!(
            adapted(CacheMode::Auto, Writethrough, false),
            Writethrough,
            "an image outside"
        );
    }
}
