//! The conditions that the agent writes. A condition that does not change keeps its times: virt-controller patches the
//! status with a test of the present conditions.

use husk_proto::shim::v1::{GuestState, Status};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::{Observed, time};
use crate::vmi::object::HUSK_REASON;
use crate::vmi::pod::PodState;

const NOT_MIGRATABLE: &str = "cannot migrate VMI: Husk does not support live migration";

const CREDENTIALS: &str = "AccessCredentialsSynchronized";

/// The event of access credentials that were propagated, or not, since the status `old`.
pub fn credentials_event(old: &Value, new: &Value) -> Option<(bool, String)> {
    let of = |status: &Value| -> Option<(bool, String)> {
        let mut conditions = status["conditions"].as_array()?.iter();
        let condition = conditions.find(|condition| condition["type"] == CREDENTIALS)?;
        let message = condition["message"].as_str().unwrap_or_default();
        Some((condition["status"] == "True", message.to_owned()))
    };
    of(new).filter(|new| of(old).as_ref() != Some(new))
}

/// A condition of a VMI.
#[derive(Debug)]
struct Condition<'a> {
    kind: &'a str,
    status: &'a str,
    reason: &'a str,
    message: &'a str,
    /// It has the time at which it was seen, not that of the change: so virt-handler writes it.
    probed: bool,
}

/// Writes all conditions of the agent.
pub fn update(status: &mut Value, observed: &Observed<'_>) {
    let present = &mut status["conditions"];
    if !present.is_array() {
        *present = json!([]);
    }
    let Some(conditions) = present.as_array_mut() else {
        return;
    };
    for (kind, reason) in [
        ("LiveMigratable", HUSK_REASON),
        ("StorageLiveMigratable", "NotMigratable"),
    ] {
        let condition = Condition {
            kind,
            status: "False",
            reason,
            message: NOT_MIGRATABLE,
            probed: false,
        };
        set(conditions, &condition, observed.now);
    }
    match observed.error {
        Some(error) => {
            let condition = Condition {
                kind: "Synchronized",
                status: "False",
                reason: "Synchronizing with the Domain failed.",
                message: error,
                probed: false,
            };
            set(conditions, &condition, observed.now);
        }
        // virt-controller writes this condition too, with reasons of its own, until the VMI is scheduled.
        None => conditions.retain(|condition| condition["type"] != "Synchronized"),
    }
    match observed.state {
        PodState::Running(running) if running.paused => {
            set(conditions, &paused(running), observed.now);
        }
        PodState::Running(_) | PodState::Ended(_) | PodState::Lost => {
            conditions.retain(|condition| condition["type"] != "Paused");
        }
        PodState::Unknown | PodState::Waiting => {}
    }
    if let PodState::Running(running) = observed.state
        && let Some(state) = running
            .guest
            .as_ref()
            .and_then(|guest| guest.credentials.as_ref())
    {
        let condition = Condition {
            kind: CREDENTIALS,
            status: if state.synchronized { "True" } else { "False" },
            reason: "",
            message: &state.message,
            probed: false,
        };
        set(conditions, &condition, observed.now);
    }
    match observed.state {
        PodState::Running(running) => agent(conditions, running.guest.as_ref(), observed.now),
        PodState::Ended(_) | PodState::Lost => agent(conditions, None, observed.now),
        PodState::Unknown | PodState::Waiting => {}
    }
}

/// Writes the conditions of the guest's agent, which are absent in place of false. They have the fields that
/// virt-handler writes.
fn agent(conditions: &mut Vec<Value>, guest: Option<&GuestState>, now: Timestamp) {
    let connected = guest.filter(|guest| guest.connected);
    let unsupported = connected.map(|guest| guest.unsupported.as_str());
    for (kind, reason) in [
        ("AgentConnected", connected.map(|_| "")),
        (
            "AgentVersionNotSupported",
            unsupported.filter(|reason| !reason.is_empty()),
        ),
    ] {
        match reason {
            Some(reason) => {
                let condition = Condition {
                    kind,
                    status: "True",
                    reason,
                    message: "",
                    probed: true,
                };
                set(conditions, &condition, now);
            }
            None => conditions.retain(|condition| condition["type"] != kind),
        }
    }
}

fn paused(running: &Status) -> Condition<'static> {
    let (reason, message) = match running.reason.as_str() {
        "PausedIOError" => ("PausedIOError", "VMI was paused, low-level IO error detected"),
        // KubeVirt has no condition then, and so refuses to unpause the VMI.
        "PausedWatchdog" => ("PausedWatchdog", "VMI was paused, its watchdog ran out"),
        _ => ("PausedByUser", "VMI was paused by user"),
    };
    Condition {
        kind: "Paused",
        status: "True",
        reason,
        message,
        probed: false,
    }
}

fn set(conditions: &mut Vec<Value>, condition: &Condition<'_>, now: Timestamp) {
    let present = conditions
        .iter_mut()
        .find(|present| present["type"] == condition.kind);
    let fields = [
        ("status", condition.status),
        ("reason", condition.reason),
        ("message", condition.message),
    ];
    let same = |present: &Value| {
        let text = |field| present[field].as_str().unwrap_or_default();
        fields.iter().all(|(field, value)| text(*field) == *value)
    };
    if present.as_deref().is_some_and(same) {
        return;
    }
    let now = json!(time(now));
    let (probed, changed) = match condition.probed {
        true => (now, Value::Null),
        false => (Value::Null, now),
    };
    let mut new = json!({"type": condition.kind, "lastProbeTime": probed, "lastTransitionTime": changed});
    // virt-controller's patch tests the conditions as its Go types write them: without empty fields.
    for (field, value) in fields.into_iter().filter(|(_, value)| !value.is_empty()) {
        new[field] = json!(value);
    }
    match present {
        Some(present) => *present = new,
        None => conditions.push(new),
    }
}
