//! Making a VM what its VMI says, as far as that can be had while it runs.
//!
//! Nothing is remembered from one call to the next: what there is and what is wanted are compared anew, so that a call
//! that was cut short is made good by the next.

mod interfaces;
mod volumes;

use std::sync::Arc;
use std::time::Duration;

use husk_proto::shim::v1::change::Kind;
use husk_proto::shim::v1::sync_vmi_request::RunState;
use husk_proto::shim::v1::{Change, SyncVmiRequest, SyncVmiResponse};
use husk_vmi::{FieldError, LiveUpdate, Loaded, VmPlan, Vmi, load};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::spawn_blocking;

use super::handle::VmHandle;
use super::{disks, interfaces as nics};
use crate::monitor::vm_error::VmError;
use crate::vm_environment::VmEnvironment;

/// Calls that may wait for those before them, each with a manifest.
const CALLS: usize = 8;
/// How long a guest is waited for that shall let go of something: of a disk it has 5 s, and what it wrote must become
/// stable.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// The same if the VM is paused.
const RELEASE_TIMEOUT_PAUSED: Duration = Duration::from_secs(1);
/// The most lines of a refusal, and of a line's bytes: a status travels in a header.
const LINES: usize = 16;
const LINE_BYTES: usize = 300;

/// What makes a VM follow its VMI.
#[derive(Debug)]
pub(super) struct VmiSync {
    plan: Arc<VmPlan>,
    environment: Arc<VmEnvironment>,
    vm: VmHandle,
    disks: disks::DisksHandle,
    interfaces: nics::InterfacesHandle,
    queue: Semaphore,
    in_progress: Mutex<()>,
}

/// What has been done, and whether that is all.
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
    ) -> VmiSync {
        VmiSync {
            plan,
            environment,
            vm,
            disks,
            interfaces,
            queue: Semaphore::new(CALLS),
            in_progress: Mutex::new(()),
        }
    }

    /// Makes it so. One call after the other.
    pub(super) async fn sync(&self, request: SyncVmiRequest) -> Result<SyncVmiResponse, VmError> {
        let busy = |_| VmError::limit_reached("too many calls of SyncVmi wait for their turn");
        let _queued = self.queue.try_acquire().map_err(busy)?;
        let _in_progress = self.in_progress.lock().await;
        let state = request.run_state();
        let SyncVmiRequest { vmi, paths, .. } = request;
        let plan = self.plan.clone();
        // A manifest of the largest size takes a moment.
        let wanted = spawn_blocking(move || wanted(&vmi, &plan)).await;
        let (vmi, live) = wanted.map_err(|error| VmError::internal(error.to_string()))??;
        if let Some(name) = paths.keys().find(|name| vmi.spec.volume(name).is_none()) {
            return Err(VmError::invalid_argument(format!(
                "the VMI has no volume {name:?}"
            )));
        }
        if self.vm.running().is_none() {
            return Err(VmError::not_running());
        }
        if self.vm.status().borrow().stopping {
            return Err(VmError::wrong_state("the VM is being shut down"));
        }
        self.apply(&vmi, live, state, &paths).await
    }

    async fn apply(
        &self,
        vmi: &Vmi,
        live: LiveUpdate,
        state: RunState,
        paths: &volumes::VolumePaths,
    ) -> Result<SyncVmiResponse, VmError> {
        let mut done = SyncProgress::default();
        // A guest that stands still lets go of nothing, and so is resumed first and paused last.
        if state == RunState::Running && self.is_paused() {
            self.vm.resume().await?;
            done.note(Kind::Resumed, "");
        }
        let mut network = SyncProgress::default();
        let (volumes, interfaces) = tokio::join!(
            self.volumes(vmi, live.volumes, paths, &mut done),
            self.interfaces(live.interfaces, &mut network)
        );
        done.changes.append(&mut network.changes);
        if state == RunState::Paused && !self.is_paused() {
            self.vm.pause().await?;
            done.note(Kind::Paused, "");
        }
        Ok(SyncVmiResponse {
            changes: done.changes,
            volumes: volumes?,
            interfaces: interfaces?,
            paused: self.is_paused(),
            complete: !done.waits && !network.waits,
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

/// The VMI of a text, and what it wants of a VM of that plan.
fn wanted(text: &str, plan: &VmPlan) -> Result<(Vmi, LiveUpdate), VmError> {
    let loaded = load(text).map_err(|error| VmError::invalid_argument(short(&error.to_string())))?;
    // What else a manifest holds is for a cluster, as it was at the start.
    let mut vmis = loaded.into_iter().filter_map(|loaded| match loaded {
        Loaded::Vmi(vmi) => Some(vmi),
        Loaded::Other { .. } => None,
    });
    let (Some(mut vmi), None) = (vmis.next(), vmis.next()) else {
        return Err(VmError::invalid_argument("one VirtualMachineInstance is wanted"));
    };
    // One that does not say is where the VM is, as it was when the VM started.
    if vmi.namespace == "default" {
        vmi.namespace.clone_from(&plan.namespace);
    }
    let lines = |errors: Vec<FieldError>| {
        let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
        short(&lines.join("\n"))
    };
    husk_vmi::validate(&vmi).map_err(|errors| VmError::invalid_argument(lines(errors)))?;
    let live = plan.live(&vmi);
    let live = live.map_err(|errors| VmError::wrong_state(lines(errors)))?;
    Ok((*vmi, live))
}

/// As much of a text as fits a status, by whole lines as far as they do.
fn short(text: &str) -> String {
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
    fn a_refusal_is_no_longer_than_a_header_may_be() {
        assert_eq!(short("one\ntwo"), "one\ntwo");
        let long = "ä".repeat(10_000);
        let text = short(&vec![long; 1000].join("\n"));
        assert!(text.len() < (LINES + 1) * (LINE_BYTES + 8), "{}", text.len());
        assert!(text.ends_with("\nand 984 more"));
    }
}
