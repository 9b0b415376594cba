//! Disks whose images were copied out of a snapshot, perhaps to another kind of file system.

use std::io;
use std::os::fd::AsFd;

use husk_proto::vmm::v1::disk::Cache;
use husk_vmi::{CacheMode, DiskPlan};
use husk_volumes::OpenDisk;
use rustix::fs::{AtFlags, OFlags, StatxFlags, fcntl_getfl, fcntl_setfl, fstat, statx};

/// Alignment that is safe for direct I/O where the kernel tells none.
const PAGE: u64 = 4096;

/// Gives a copy a write cache, unless the manifest chooses the mode. On a file system with direct I/O the guest has
/// seen one, and for a driver that has not, each write is durable. A copy whose end direct I/O does not reach does
/// without. It ends with the VM, so the host's page cache loses nothing.
pub(crate) fn adapt(plan: &DiskPlan, open: &mut OpenDisk) {
    if plan.cache != CacheMode::Auto || !open.private || open.read_only {
        return;
    }
    let buffered = match (open.cache, &open.file) {
        (Cache::None, Some(file)) => !reaches_the_end(file) && end_direct_io(file).is_ok(),
        (cache, _) => cache == Cache::Writethrough,
    };
    if buffered {
        open.cache = Cache::Writeback;
    }
}

/// True if direct I/O can reach the last byte of a file.
fn reaches_the_end(file: impl AsFd) -> bool {
    let size = fstat(&file).map_or(0, |stat| stat.st_size.unsigned_abs());
    let unit = match statx(&file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(stat) if stat.stx_dio_offset_align != 0 => stat.stx_dio_offset_align.into(),
        _ => PAGE,
    };
    size.is_multiple_of(unit)
}

fn end_direct_io(file: impl AsFd) -> io::Result<()> {
    Ok(fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::DIRECT)?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::PathBuf;

    use husk_volumes::ImageFormat;
    use serde_json::json;

    use super::*;

    fn plan(cache: CacheMode) -> DiskPlan {
        let vmi = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "vm"},
            "spec": {
                "domain": {
                    "memory": {"guest": "128Mi"},
                    "devices": {"disks": [{"name": "data", "disk": {"bus": "virtio"}}]},
                },
                "volumes": [{"name": "data", "emptyDisk": {"capacity": "1Gi"}}],
            },
        });
        let husk_vmi::Loaded::Vmi(vmi) = husk_vmi::load(&vmi.to_string()).unwrap().remove(0) else {
            panic!("it is a VMI")
        };
        let plan = husk_vmi::plan(&vmi, &husk_vmi::PodResources::default()).unwrap();
        let disk = plan.disks[0].clone();
        DiskPlan { cache, ..disk }
    }

    fn opened(file: Option<OwnedFd>, cache: Cache) -> OpenDisk {
        OpenDisk {
            file,
            base: None,
            new_overlay: false,
            private: true,
            path: PathBuf::new(),
            read_only: false,
            cache,
            format: ImageFormat::Raw,
            block_sizes: None,
            lun: None,
        }
    }

    #[test]
    fn a_copy_on_a_file_system_without_direct_io_has_a_write_cache() {
        use Cache::{Writeback, Writethrough};
        let adapted = |planned, cache, private| {
            let mut open = OpenDisk {
                private,
                ..opened(None, cache)
            };
            adapt(&plan(planned), &mut open);
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

    #[test]
    fn a_copy_of_odd_size_does_without_direct_io() {
        // tmpfs does direct I/O of whole pages only, and none before Linux 6.6.
        let path = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        let mut direct = File::options();
        direct
            .read(true)
            .write(true)
            .custom_flags(OFlags::DIRECT.bits() as i32);
        let Ok(file) = direct.open(path.path()) else {
            return;
        };
        for (size, cache) in [(2 * PAGE, Cache::None), (PAGE + 512, Cache::Writeback)] {
            file.set_len(size).unwrap();
            let mut open = opened(Some(file.try_clone().unwrap().into()), Cache::None);
            adapt(&plan(CacheMode::Auto), &mut open);
            assert_eq!(open.cache, cache);
            let flags = fcntl_getfl(&file).unwrap();
            assert_eq!(flags.contains(OFlags::DIRECT), cache == Cache::None);
        }
    }
}
