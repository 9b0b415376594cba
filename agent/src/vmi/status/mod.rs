//! The status of a VMI, computed from its present status and the state of its VM.

mod conditions;
mod guest;
mod interfaces;
mod volumes;

pub use conditions::credentials_event;
pub use guest::os_info;
pub use volumes::events as volume_events;

use husk_proto::shim::v1::{Phase, Status, SyncVmiResponse};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::object::Vmi;
use super::pod::PodState;

/// The machine type of every VM; the node has a label for it.
const MACHINE_TYPE: &str = "q35";
/// `selinuxContext` on a node without SELinux. virt-controller makes no attachment pod while the field is empty.
const NO_SELINUX: &str = "none";

/// The state from which [`next`] computes a status.
#[derive(Debug)]
pub struct Observed<'a> {
    /// The state of the pod's VM.
    pub state: &'a PodState,
    /// The last answer of the shim to the VMI.
    pub synced: Option<&'a SyncVmiResponse>,
    /// A SyncVmi is under way, which may still plug a volume.
    pub syncing: bool,
    /// Error of the last attempt to bring the VM to the VMI; `None` if it succeeded or there was none.
    pub error: Option<&'a str>,
    /// The present time.
    pub now: Timestamp,
}

/// The phase that follows from the state of the VM (virt-handler's rules): Scheduled until the VM runs; without a VM a
/// VMI that had one is Failed.
pub fn phase<'a>(vmi: &'a Vmi, state: &PodState) -> &'a str {
    let present = vmi.phase();
    match (present, state) {
        ("Scheduled" | "Running", PodState::Running(_)) => "Running",
        ("Scheduled" | "Running", PodState::Ended(status)) => match status.phase() {
            Phase::Succeeded => "Succeeded",
            // Without a grace period the guest was not asked to power off, so its kill is no failure.
            _ if status.reason == "Killed" && vmi.grace_seconds() == 0 => "Succeeded",
            _ => "Failed",
        },
        ("Scheduled" | "Running", PodState::Lost) | ("Running", PodState::Waiting) => "Failed",
        _ => present,
    }
}

/// The new status of `vmi`. Parts that others write, and parts without a change, are as they were.
pub fn next(vmi: &Vmi, observed: &Observed<'_>) -> Value {
    let mut status = vmi.status().clone();
    if !status.is_object() {
        status = json!({});
    }
    let phase = phase(vmi, observed.state);
    if phase != vmi.phase() {
        set_phase(&mut status, phase, observed.now);
    }
    conditions::update(&mut status, observed);
    match observed.state {
        PodState::Running(running) => describe(&mut status, vmi, running, observed),
        // virt-controller attaches these volumes before the VM starts.
        PodState::Waiting if !vmi.hotpluggable().is_empty() => {
            status["selinuxContext"] = json!(NO_SELINUX);
        }
        _ => {}
    }
    status
}

/// Writes what is known of a running VM.
fn describe(status: &mut Value, vmi: &Vmi, running: &Status, observed: &Observed<'_>) {
    status["machine"] = json!({"type": MACHINE_TYPE});
    status["selinuxContext"] = json!(NO_SELINUX);
    status["migrationMethod"] = json!(volumes::migration_method(status));
    let reported = running.guest.iter().flat_map(|guest| &guest.interfaces);
    let interfaces = interfaces::merged(&status["interfaces"], vmi.spec(), &running.interfaces, reported);
    if let Some(status) = status.as_object_mut() {
        // An empty list is not written, as KubeVirt's types have it.
        match interfaces.is_empty() {
            true => _ = status.remove("interfaces"),
            false => _ = status.insert("interfaces".to_owned(), interfaces.into()),
        }
    }
    if let Some(guest) = &running.guest {
        guest::update(status, guest);
    }
    volumes::update(status, vmi, &running.disks, observed);
}

fn set_phase(status: &mut Value, phase: &str, now: Timestamp) {
    status["phase"] = json!(phase);
    let stamps = &mut status["phaseTransitionTimestamps"];
    if !stamps.is_array() {
        *stamps = json!([]);
    }
    if let Some(stamps) = stamps.as_array_mut()
        && !stamps.iter().any(|stamp| stamp["phase"] == phase)
    {
        stamps.push(json!({"phase": phase, "phaseTransitionTimestamp": time(now)}));
    }
}

/// A time as the API has it: RFC 3339 in whole seconds.
fn time(now: Timestamp) -> String {
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests;
