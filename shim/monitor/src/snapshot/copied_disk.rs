//! Disks whose images were copied out of a snapshot, perhaps to another kind of file system.

use husk_proto::vmm::v1::disk::Cache;
use husk_vmi::{CacheMode, DiskPlan};
use husk_volumes::OpenDisk;

/// Gives a copy a write cache, unless the manifest chooses the mode. On a file system with direct I/O the guest has
/// seen one, and for a driver that has not, each write is durable. A copy that direct I/O does not serve does without.
/// It ends with the VM, so the host's page cache loses nothing.
pub(crate) fn adapt(plan: &DiskPlan, open: &mut OpenDisk) {
    if plan.cache == CacheMode::Auto && open.private && !open.read_only && open.cache == Cache::Writethrough {
        open.cache = Cache::Writeback;
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
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
}
