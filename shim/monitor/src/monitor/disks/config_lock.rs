//! The disks while a snapshot is made, and the references to their images that it needs.

use std::io;
use std::sync::Arc;

use tracing::warn;

use super::DisksActor;
use super::open::storage_hangs;
use crate::monitor::vm_error::VmError;
use crate::snapshot::{DiskSet, OpenDiskRefs};

/// While it exists, no device of the VM is added, removed or resized.
pub(in crate::monitor) type ConfigLock = Arc<()>;

/// While it exists, no image is extended to its claim's size.
pub(in crate::monitor) type GrowthLock = Arc<()>;

/// The disks of a VM, and what keeps them as they are.
pub(in crate::monitor) type LockedDisks = (ConfigLock, GrowthLock, DiskSet);

impl DisksActor {
    pub(super) fn is_held(&self) -> bool {
        self.held.strong_count() > 0
    }

    /// Returns the disks for a snapshot, which no request changes while the first result exists. Images keep their sizes
    /// while the second one exists.
    pub(super) fn lock_config(&mut self) -> Result<LockedDisks, VmError> {
        if let Some(name) = self.waiters.keys().next() {
            let text = format!("volume {name:?} is being removed: wait until the guest has released it");
            return Err(VmError::wrong_state(text));
        }
        // It may still extend the image.
        if let Some((name, _)) = self.watched.iter().find(|(_, disk)| disk.is_being_checked()) {
            return Err(storage_hangs(name));
        }
        let lock = Arc::new(());
        self.held = Arc::downgrade(&lock);
        // An earlier snapshot of the same pause may have it.
        let growth = self.growth.upgrade().unwrap_or_default();
        self.growth = Arc::downgrade(&growth);
        let set = DiskSet {
            plan: self.table.plan().clone(),
            plugged: self.table.plugged().clone(),
            kept: self.kept.clone(),
        };
        Ok((lock, growth, set))
    }

    /// Keeps references to the images of a disk.
    pub(super) fn keep(&mut self, name: &str, kept: io::Result<OpenDiskRefs>) {
        match kept {
            Ok(kept) => drop(self.kept.insert(name.to_owned(), Arc::new(kept))),
            Err(error) => warn!(volume = name, %error, "the volume cannot be in a snapshot"),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;
    use std::fs::File;
    use std::path::Path;
    use std::pin::pin;
    use std::time::Duration;

    use husk_vmi::{Loaded, PodResources, VmPlan};
    use serde_json::json;
    use tokio::task::{spawn_blocking, yield_now};
    use tokio::time::{sleep, timeout};

    use super::super::sizes::{Sizes, WatchedDisk};
    use super::super::{DisksHandle, POLL_INTERVAL, SizeProbe};
    use super::*;
    use crate::monitor::resize_watch::tests::claim;
    use crate::vm_environment::VmEnvironment;

    const MIB: u64 = 1 << 20;

    fn plan() -> VmPlan {
        let vmi = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "vm"},
            "spec": {
                "domain": {
                    "memory": {"guest": "128Mi"},
                    "devices": {"disks": [{"name": "root", "disk": {"bus": "virtio"}}]},
                },
                "volumes": [{"name": "root", "hostDisk": {"type": "Disk", "path": "/disk.img"}}],
            },
        });
        let Loaded::Vmi(vmi) = husk_vmi::load(&vmi.to_string()).unwrap().remove(0) else {
            panic!("it is a VMI")
        };
        husk_vmi::plan(&vmi, &PodResources::default()).unwrap()
    }

    pub(in crate::monitor::disks) fn actor(folder: &Path) -> (DisksActor, DisksHandle) {
        let environment = Arc::new(VmEnvironment::of_caller(None));
        DisksActor::new(plan(), folder.join("plan.json"), environment)
    }

    /// The actor of a disk with an image of 1 MiB.
    fn actor_of_image(folder: &Path) -> (DisksActor, DisksHandle, File) {
        let image = File::create(folder.join("disk.img")).unwrap();
        image.set_len(MIB).unwrap();
        let (mut actor, handle) = actor(folder);
        let probe = SizeProbe::of(&image).unwrap();
        actor.watched.insert("root".into(), WatchedDisk::new(probe));
        (actor, handle, image)
    }

    #[tokio::test]
    async fn a_snapshot_waits_for_the_size_check_under_way() {
        let folder = tempfile::tempdir().unwrap();
        let (mut actor, handle) = actor(folder.path());
        let (end, ended) = std::sync::mpsc::channel::<()>();
        actor.size_check = Some(spawn_blocking(move || {
            let _ = ended.recv();
            Sizes::default()
        }));
        let actor = tokio::spawn(actor.run());
        let mut lock = pin!(handle.lock_config());
        assert!(timeout(Duration::from_millis(100), &mut lock).await.is_err());
        end.send(()).unwrap();
        let (_stays, _, set) = lock.await.unwrap();
        assert_eq!(set.plan.disks.len(), 1);
        actor.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn an_image_grows_after_the_snapshot() {
        let folder = tempfile::tempdir().unwrap();
        let (actor, handle, image) = actor_of_image(folder.path());
        let actor = tokio::spawn(actor.run());
        let (stays, _, _) = handle.lock_config().await.unwrap();
        let claims = BTreeMap::from([("root".to_owned(), claim(4))]);
        let checked = handle.check_sizes(claims).await.unwrap();
        assert!(checked.deferred);
        sleep(2 * POLL_INTERVAL).await;
        assert_eq!(image.metadata().unwrap().len(), MIB);
        drop(stays);
        sleep(2 * POLL_INTERVAL).await;
        assert_eq!(image.metadata().unwrap().len(), 4 * MIB);
        actor.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn an_image_keeps_its_size_until_the_last_growth_lock_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let (actor, handle, image) = actor_of_image(folder.path());
        let actor = tokio::spawn(actor.run());
        let file = || {
            let file = image.metadata().unwrap();
            (file.len(), file.modified().unwrap())
        };
        let before = file();
        let (_, growth, _) = handle.lock_config().await.unwrap();
        let check = |mib| handle.check_sizes(BTreeMap::from([("root".to_owned(), claim(mib))]));
        assert!(!check(1).await.unwrap().deferred, "it has this size");
        assert!(check(4).await.unwrap().deferred);
        // The locks of a snapshot that fails.
        drop(handle.lock_config().await.unwrap());
        assert!(check(4).await.unwrap().deferred);
        sleep(2 * POLL_INTERVAL).await;
        assert_eq!(file(), before);
        drop(growth);
        sleep(POLL_INTERVAL + Duration::from_millis(1)).await;
        assert_eq!(file().0, 4 * MIB);
        actor.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_waits_for_the_size_check_is_kept_for_after_the_snapshot() {
        let folder = tempfile::tempdir().unwrap();
        let (mut actor, handle, image) = actor_of_image(folder.path());
        let (end, ended) = std::sync::mpsc::channel::<()>();
        actor.size_check = Some(spawn_blocking(move || {
            let _ = ended.recv();
            Sizes::default()
        }));
        let actor = tokio::spawn(actor.run());
        let claims = BTreeMap::from([("root".to_owned(), claim(4))]);
        let lock = async {
            let lock = handle.lock_config().await.unwrap();
            sleep(2 * POLL_INTERVAL).await;
            lock
        };
        let check = handle.check_sizes(claims);
        let end = async {
            // The actor has both requests then.
            yield_now().await;
            end.send(()).unwrap();
        };
        let (stays, checked, ()) = tokio::join!(lock, check, end);
        assert!(checked.unwrap().deferred);
        assert_eq!(image.metadata().unwrap().len(), MIB);
        drop(stays);
        sleep(2 * POLL_INTERVAL).await;
        assert_eq!(image.metadata().unwrap().len(), 4 * MIB);
        actor.abort();
    }
}
