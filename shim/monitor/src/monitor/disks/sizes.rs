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
    /// The sizes of the disks, and the errors of extending their images.
    disks: Vec<(String, io::Result<u64>, Option<String>)>,
    deferred: bool,
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
                let error = extended.err().map(|error| error.to_string());
                sizes.disks.push((name, probe.bytes(), error));
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
        for (name, bytes, extend_error) in sizes.disks {
            let Some(watched) = self.watched.get_mut(&name) else {
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
