//! Synchronises a running VM with its VMI.
//!
//! Calls keep no state. Each compares the VM with the VMI, so the next call completes one that was cut short.

mod interfaces;
mod volumes;

use std::sync::Arc;
use std::time::Duration;

use husk_proto::shim::v1::change::Kind;
use husk_proto::shim::v1::sync_vmi_request::RunState;
use husk_proto::shim::v1::{Change, RestartRequired, SyncVmiRequest, SyncVmiResponse};
use husk_vmi::{FieldError, LiveUpdate, Loaded, VmPlan, Vmi, load};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::spawn_blocking;

use super::handle::VmHandle;
use super::volume_files::VolumeFiles;
use super::{disks, interfaces as nics};
use crate::monitor::vm_error::VmError;
use crate::vm_environment::VmEnvironment;

/// Maximum number of calls that wait, each with a manifest.
const CALLS: usize = 8;
/// Maximum time to wait for the guest to release a device. For a disk it has 5 s, then its writes are flushed.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// The same for a paused VM.
const RELEASE_TIMEOUT_PAUSED: Duration = Duration::from_secs(1);
/// Maximum lines of an error, and bytes of a line. A gRPC status is sent in a header.
const LINES: usize = 16;
const LINE_BYTES: usize = 300;

/// Synchronises a VM with its VMI.
#[derive(Debug)]
pub(super) struct VmiSync {
    plan: Arc<VmPlan>,
    environment: Arc<VmEnvironment>,
    vm: VmHandle,
    disks: disks::DisksHandle,
    interfaces: nics::InterfacesHandle,
    files: VolumeFiles,
    queue: Semaphore,
    in_progress: Mutex<()>,
}

/// The changes made by a call, and whether some are still pending.
#[derive(Debug, Default)]
struct SyncProgress {
    changes: Vec<Change>,
    waits: bool,
}

impl SyncProgress {
    fn note(&mut self, kind: Kind, name: &str) {
        self.changes.push(Change {
            kind: kind.into(),
            name: name.to_owned(),
        });
    }
}

impl VmiSync {
    pub(super) fn new(
        plan: Arc<VmPlan>,
        environment: Arc<VmEnvironment>,
        vm: VmHandle,
        disks: disks::DisksHandle,
        interfaces: nics::InterfacesHandle,
        files: VolumeFiles,
    ) -> VmiSync {
        VmiSync {
            plan,
            environment,
            vm,
            disks,
            interfaces,
            files,
            queue: Semaphore::new(CALLS),
            in_progress: Mutex::new(()),
        }
    }

    /// Applies a VMI. Calls are serialised.
    pub(super) async fn sync(&self, request: SyncVmiRequest) -> Result<SyncVmiResponse, VmError> {
        let busy = |_| VmError::limit_reached("too many calls of SyncVmi are waiting");
        let _queued = self.queue.try_acquire().map_err(busy)?;
        let _in_progress = self.in_progress.lock().await;
        let state = request.run_state();
        let SyncVmiRequest {
            vmi,
            paths,
            fds,
            partial,
            ..
        } = request;
        let given = volumes::CallerVolumeData { paths, fds };
        let plan = self.plan.clone();
        // Parsing the largest manifest takes a while.
        let wanted = spawn_blocking(move || wanted(&vmi, &plan)).await;
        let (vmi, live) = wanted.map_err(|error| VmError::internal(error.to_string()))??;
        if !partial && !live.restart_required.is_empty() {
            return Err(VmError::wrong_state(lines(&live.restart_required)));
        }
        given.check(&vmi)?;
        if self.vm.running().is_none() {
            // It is being started, or has ended.
            return Err(VmError::unavailable("the VM is not running"));
        }
        if self.vm.status().borrow().stopping {
            return Err(VmError::wrong_state("the VM is being shut down"));
        }
        let applied = self.apply(&vmi, live, state, &given).await;
        applied.map_err(|error| match self.vm.running() {
            Some(_) if error != VmError::ended() => error,
            _ => VmError::unavailable("the VM is not running"),
        })
    }

    async fn apply(
        &self,
        vmi: &Vmi,
        live: LiveUpdate,
        state: RunState,
        given: &volumes::CallerVolumeData,
    ) -> Result<SyncVmiResponse, VmError> {
        let mut done = SyncProgress::default();
        let restart_required = live.restart_required.iter().take(LINES);
        let restart_required = restart_required.map(|error| RestartRequired {
            field: short(&error.field),
            reason: short(&error.message),
        });
        let restart_required = restart_required.collect();
        // A paused guest releases no device. So it is resumed first and paused last.
        if state == RunState::Running && self.is_paused() {
            self.vm.resume().await?;
            done.note(Kind::Resumed, "");
        }
        let mut network = SyncProgress::default();
        let (volumes, interfaces) = tokio::join!(
            self.volumes(vmi, live.volumes, given, &mut done),
            self.interfaces(live.interfaces, &mut network)
        );
        done.changes.append(&mut network.changes);
        if state == RunState::Paused {
            let was_paused = self.is_paused();
            // Also if it is: it would go on when the other reason ends.
            self.vm.pause().await?;
            if !was_paused {
                done.note(Kind::Paused, "");
            }
        }
        let (mut volumes, interfaces) = (volumes?, interfaces?);
        // This is last: the errors are lost in a call that fails. A volume's present state precedes its error.
        volumes.append(&mut self.lost_writes().await?);
        volumes.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(SyncVmiResponse {
            changes: done.changes,
            volumes,
            interfaces,
            paused: self.is_paused(),
            complete: !done.waits && !network.waits,
            restart_required,
        })
    }

    fn is_paused(&self) -> bool {
        self.vm.status().borrow().paused
    }

    fn release_timeout(&self) -> Duration {
        if self.is_paused() {
            RELEASE_TIMEOUT_PAUSED
        } else {
            RELEASE_TIMEOUT
        }
    }
}

/// Parses a VMI and computes its changes to a VM of that plan.
fn wanted(text: &str, plan: &VmPlan) -> Result<(Vmi, LiveUpdate), VmError> {
    let loaded = load(text).map_err(|error| VmError::invalid_argument(short(&error.to_string())))?;
    // Other objects of the manifest are for a cluster, as at the start of the VM.
    let mut vmis = loaded.into_iter().filter_map(|loaded| match loaded {
        Loaded::Vmi(vmi) => Some(vmi),
        Loaded::Other { .. } => None,
    });
    let (Some(mut vmi), None) = (vmis.next(), vmis.next()) else {
        return Err(VmError::invalid_argument("expected one VirtualMachineInstance"));
    };
    // A VMI without a namespace is in the VM's, as at the start of the VM.
    if vmi.namespace == "default" {
        vmi.namespace.clone_from(&plan.namespace);
    }
    husk_vmi::validate(&vmi).map_err(|errors| VmError::invalid_argument(lines(&errors)))?;
    let live = plan.live(&vmi);
    let live = live.map_err(|errors| VmError::wrong_state(lines(&errors)))?;
    Ok((*vmi, live))
}

/// The errors, a line each.
fn lines(errors: &[FieldError]) -> String {
    let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
    short(&lines.join("\n"))
}

/// Shortens a text to what fits in a gRPC status, by whole lines where possible.
#[must_use]
pub fn short(text: &str) -> String {
    let count = text.lines().count();
    let cut = |line: &str| match line.char_indices().find(|(at, _)| *at >= LINE_BYTES) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line.to_owned(),
    };
    let mut lines: Vec<String> = text.lines().take(LINES).map(cut).collect();
    if count > LINES {
        lines.push(format!("and {} more", count - LINES));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_text_fits_in_a_header() {
        assert_eq!(short("one\ntwo"), "one\ntwo");
        let long = "ä".repeat(10_000);
        let text = short(&vec![long; 1000].join("\n"));
        assert!(text.len() < (LINES + 1) * (LINE_BYTES + 8), "{}", text.len());
        assert!(text.ends_with("\nand 984 more"));
    }
}
