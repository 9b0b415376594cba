//! Checks of the disks' sizes, and growth of the images in claims.

use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::sync::Arc;

use husk_vmi::ClaimSize;
use tokio::task::{JoinHandle, spawn_blocking};
use tracing::{info, warn};

use super::DisksActor;
use crate::monitor::resize_watch::SizeProbe;

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
}

/// The result of a check for a caller.
#[derive(Debug, Clone)]
pub(in crate::monitor) struct GrownDisks {
    /// Names of the disks that have grown.
    pub(in crate::monitor) names: Vec<String>,
    /// A snapshot needs the images as they are. They are checked and extended later.
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
    /// Starts a check of all sizes in a blocking thread. It extends no image while a growth lock exists.
    pub(super) fn check_sizes(&mut self) {
        self.size_waiters = std::mem::take(&mut self.next_waiters);
        let probes = self.watched.iter();
        let probes: Vec<(String, Arc<SizeProbe>, Option<ClaimSize>)> = probes
            .map(|(name, watched)| (name.clone(), watched.probe.clone(), watched.claim))
            .collect();
        let extends = self.growth.strong_count() == 0;
        self.size_check = Some(spawn_blocking(move || {
            let mut sizes = Sizes::default();
            for (name, probe, claim) in probes {
                let extended = match claim {
                    None => Ok(()),
                    Some(claim) if extends => probe.extend(claim),
                    Some(claim) => probe.can_extend(claim).map(|can| sizes.deferred |= can),
                };
                let extend_error = extended.err().map(|error| error.to_string());
                let bytes = probe.bytes();
                sizes.disks.push(DiskSize {
                    name,
                    probe,
                    bytes,
                    extend_error,
                });
            }
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
                        message = %status,
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
}
