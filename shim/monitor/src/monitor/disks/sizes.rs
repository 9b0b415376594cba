//! Checks of the disks' sizes, and growth of the images in claims.

use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use husk_vmi::ClaimSize;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;
use tracing::{info, warn};

use super::DisksActor;
use crate::monitor::resize_watch::SizeProbe;
use crate::monitor::sync::short;

/// Maximum time for the storage of a disk to answer. Other disks are checked then.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// The size of a disk's file, as last seen.
#[derive(Debug)]
pub(super) struct WatchedDisk {
    probe: Arc<SizeProbe>,
    /// Size known to the VMM, in bytes.
    known: u64,
    /// Size that the VMM refused, in bytes.
    refused: Option<u64>,
    /// Size of the disk's claim, where the guest may write to its image.
    claim: Option<ClaimSize>,
    /// The last error of extending the image.
    extend_error: Option<String>,
}

impl WatchedDisk {
    pub(super) fn new(probe: SizeProbe) -> WatchedDisk {
        WatchedDisk {
            known: probe.first,
            probe: Arc::new(probe),
            refused: None,
            claim: None,
            extend_error: None,
        }
    }

    /// True while a check of it is under way. Its storage may not answer.
    pub(super) fn is_being_checked(&self) -> bool {
        Arc::strong_count(&self.probe) > 1
    }
}

/// A disk whose size is to be checked.
struct DiskToCheck {
    name: String,
    probe: Arc<SizeProbe>,
    claim: Option<ClaimSize>,
}

impl DiskToCheck {
    /// Checks its size, and extends its image if it may. The second result: it is to be extended later. Blocks.
    fn check(self, extends: bool) -> (DiskSize, bool) {
        let DiskToCheck { name, probe, claim } = self;
        let extended = match claim {
            None => Ok(false),
            Some(claim) if extends => probe.extend(claim).map(|()| false),
            Some(claim) => probe.can_extend(claim),
        };
        let (deferred, extend_error) = match extended {
            Ok(deferred) => (deferred, None),
            Err(error) => (false, Some(error.to_string())),
        };
        let size = DiskSize {
            name,
            bytes: probe.bytes(),
            probe,
            extend_error,
        };
        (size, deferred)
    }
}

/// The result of a check for a caller.
#[derive(Debug, Clone)]
pub(in crate::monitor) struct GrownDisks {
    /// Names of the disks that have grown.
    pub(in crate::monitor) names: Vec<String>,
    /// A snapshot needs the images as they are, or their storage does not answer. They are checked and extended later.
    pub(in crate::monitor) deferred: bool,
}

impl GrownDisks {
    /// The result while no check is made. The next check extends the images.
    pub(super) const DEFERRED: GrownDisks = GrownDisks {
        names: Vec::new(),
        deferred: true,
    };
}

/// The result of a check.
#[derive(Debug, Default)]
pub(super) struct Sizes {
    disks: Vec<DiskSize>,
    deferred: bool,
}

/// The size of a disk's file, as a check has found it.
#[derive(Debug)]
struct DiskSize {
    name: String,
    /// The file. Meanwhile another disk may have the name.
    probe: Arc<SizeProbe>,
    bytes: io::Result<u64>,
    extend_error: Option<String>,
}

impl DisksActor {
    /// Starts a check of all sizes in blocking threads. It leaves out disks whose storage has not answered yet, and
    /// extends no image while a growth lock exists.
    pub(super) fn check_sizes(&mut self) {
        self.size_waiters = std::mem::take(&mut self.next_waiters);
        let extends = self.growth.strong_count() == 0;
        let (busy, free): (Vec<_>, Vec<_>) = self
            .watched
            .iter()
            .partition(|(_, watched)| watched.is_being_checked());
        let deferred = busy.iter().any(|(_, watched)| watched.claim.is_some());
        let disks = free.into_iter().map(|(name, watched)| DiskToCheck {
            name: name.clone(),
            probe: watched.probe.clone(),
            claim: watched.claim,
        });
        let disks: Vec<DiskToCheck> = disks.collect();
        self.size_check = Some(tokio::spawn(async move {
            let mut sizes = check(disks, move |disk| disk.check(extends)).await;
            sizes.deferred |= deferred;
            sizes
        }));
    }

    /// Sets the claims' sizes of all disks that the guest may write to.
    pub(super) fn set_claims(&mut self, claims: &BTreeMap<String, ClaimSize>) {
        for (name, watched) in &mut self.watched {
            watched.claim = match self.table.is_writable(name) {
                true => claims.get(name).copied(),
                false => None,
            };
        }
    }

    /// Resizes the disks that have grown and returns them. A disk that shrank is left alone: the guest may still use its
    /// end.
    pub(super) async fn report_growth(&mut self, sizes: Sizes) -> GrownDisks {
        let mut grown = GrownDisks {
            names: Vec::new(),
            deferred: sizes.deferred,
        };
        let Some(mut connection) = self.connection.clone() else {
            return grown;
        };
        for size in sizes.disks {
            let DiskSize {
                name,
                probe,
                bytes,
                extend_error,
            } = size;
            let watched = self.watched.get_mut(&name);
            let Some(watched) = watched.filter(|watched| Arc::ptr_eq(&watched.probe, &probe)) else {
                continue;
            };
            if extend_error != watched.extend_error {
                if let Some(error) = &extend_error {
                    warn!(
                        disk = name,
                        error, "the image could not be extended to its claim's size"
                    );
                }
                watched.extend_error = extend_error;
            }
            let Ok(bytes) = bytes else {
                continue;
            };
            if bytes <= watched.known {
                continue;
            }
            match connection.resize(&name).await {
                Ok(shown) => {
                    info!(
                        disk = name,
                        before = watched.known,
                        bytes = shown,
                        "the disk has grown"
                    );
                    (watched.known, watched.refused) = (bytes, None);
                    self.table.set_bytes(&name, shown);
                    grown.names.push(name);
                }
                Err(status) if watched.refused != Some(bytes) => {
                    warn!(
                        disk = name,
                        bytes,
                        message = short(&status.to_string()),
                        "the disk has grown, but the guest could not be told"
                    );
                    watched.refused = Some(bytes);
                }
                Err(_) => {}
            }
        }
        grown
    }
}

/// Checks disks one after the other. One whose storage does not answer is left out, and its check goes on.
async fn check(
    disks: Vec<DiskToCheck>,
    check_one: impl Fn(DiskToCheck) -> (DiskSize, bool) + Copy + Send + 'static,
) -> Sizes {
    let mut sizes = Sizes::default();
    for disk in disks {
        let (name, is_claim) = (disk.name.clone(), disk.claim.is_some());
        match timeout(ANSWER_WITHIN, spawn_blocking(move || check_one(disk))).await {
            Ok(Ok((size, deferred))) => {
                sizes.disks.push(size);
                sizes.deferred |= deferred;
            }
            Ok(Err(error)) => warn!(disk = name, %error, "the size of the disk was not checked"),
            Err(_) => {
                warn!(disk = name, "the storage of the disk does not answer");
                sizes.deferred |= is_claim;
            }
        }
    }
    sizes
}

/// Returns the sizes of the check under way. Never completes if there is none.
pub(super) async fn done(size_check: &mut Option<JoinHandle<Sizes>>) -> Sizes {
    match size_check {
        Some(size_check) => size_check.await.unwrap_or_default(),
        None => pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;

    use husk_proto::fds::{FdSender, socketpair};
    use husk_proto::vmm::v1::vmm_client::VmmClient;
    use tonic::transport::Endpoint;

    use super::super::config_lock::tests::actor;
    use super::*;
    use crate::monitor::resize_watch::tests::claim;
    use crate::monitor::vmm_connection::VmmConnection;

    /// A connection to a VMM that fails each call.
    fn vmm_that_is_gone() -> VmmConnection {
        let refused = tower::service_fn(|_| async {
            Err::<hyper_util::rt::TokioIo<tokio::net::UnixStream>, _>(io::Error::other("gone"))
        });
        let channel = Endpoint::from_static("http://vmm").connect_with_connector_lazy(refused);
        let (socket, _) = socketpair().unwrap();
        VmmConnection {
            client: VmmClient::new(channel),
            fds: Arc::new(FdSender::new(socket).unwrap()),
        }
    }

    fn probe(folder: &Path, bytes: u64) -> SizeProbe {
        let image = File::create(folder.join(format!("{bytes}.img"))).unwrap();
        image.set_len(bytes).unwrap();
        SizeProbe::of(&image).unwrap()
    }

    #[tokio::test]
    async fn the_size_of_a_disk_is_not_that_of_the_next_one_of_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let (mut actor, _handle) = actor(folder.path());
        actor.connection = Some(vmm_that_is_gone());
        let watch = |bytes| WatchedDisk::new(probe(folder.path(), bytes));
        actor.watched.insert("data".into(), watch(4096));
        actor.check_sizes();
        actor.watched.insert("data".into(), watch(512));
        let sizes = done(&mut actor.size_check).await;
        actor.report_growth(sizes).await;
        // The VMM was not told to resize it.
        assert_eq!(actor.watched["data"].refused, None);
    }

    #[tokio::test]
    async fn storage_that_does_not_answer_holds_up_no_other_disk() {
        let folder = tempfile::tempdir().unwrap();
        let disks = ["dead", "live"].map(|name| DiskToCheck {
            name: name.into(),
            probe: Arc::new(probe(folder.path(), 512)),
            claim: (name == "dead").then(|| claim(1)),
        });
        let sizes = check(disks.into(), |disk| {
            if disk.name == "dead" {
                std::thread::sleep(2 * ANSWER_WITHIN);
            }
            disk.check(true)
        });
        let sizes = sizes.await;
        assert_eq!((sizes.disks.len(), sizes.deferred), (1, true));
        assert_eq!(sizes.disks[0].name, "live");
    }

    #[tokio::test]
    async fn disks_whose_storage_does_not_answer_are_left_out_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let (mut actor, _handle) = actor(folder.path());
        for (name, bytes) in [("dead", 4096), ("live", 512)] {
            let watched = WatchedDisk::new(probe(folder.path(), bytes));
            actor.watched.insert(name.into(), watched);
        }
        let under_way = actor.watched["dead"].probe.clone();
        actor.check_sizes();
        let sizes = done(&mut actor.size_check).await;
        let checked: Vec<&str> = sizes.disks.iter().map(|size| size.name.as_str()).collect();
        assert_eq!(checked, ["live"]);
        drop(sizes);
        let refused = actor.lock_config().unwrap_err().to_string();
        assert!(refused.contains("\"dead\""), "{refused}");
        drop(under_way);
        actor.lock_config().unwrap();
    }
}
