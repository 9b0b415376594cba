//! The conditions that the agent writes. A condition that does not change keeps its times: virt-controller patches the
//! status with a test of the present conditions.

use husk_proto::shim::v1::Status;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::{Observed, time};
use crate::vmi::pod::PodState;

const NOT_MIGRATABLE: &str = "cannot migrate VMI: Husk does not support live migration";

/// A condition of a VMI.
#[derive(Debug)]
struct Condition<'a> {
    kind: &'a str,
    status: &'a str,
    reason: &'a str,
    message: &'a str,
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
        ("LiveMigratable", "HuskNotLiveMigratable"),
        ("StorageLiveMigratable", "NotMigratable"),
    ] {
        let condition = Condition {
            kind,
            status: "False",
            reason,
            message: NOT_MIGRATABLE,
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
}

fn paused(running: &Status) -> Condition<'static> {
    let (reason, message) = match running.reason.as_str() {
        "PausedIOError" => ("PausedIOError", "VMI was paused, low-level IO error detected"),
        _ => ("PausedByUser", "VMI was paused by user"),
    };
    Condition {
        kind: "Paused",
        status: "True",
        reason,
        message,
    }
}

fn set(conditions: &mut Vec<Value>, condition: &Condition<'_>, now: Timestamp) {
    let present = conditions
        .iter_mut()
        .find(|present| present["type"] == condition.kind);
    if let Some(present) = &present
        && present["status"] == condition.status
        && present["reason"] == condition.reason
        && present["message"] == condition.message
    {
        return;
    }
    let new = json!({
        "type": condition.kind,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "lastProbeTime": null,
        "lastTransitionTime": time(now),
    });
    match present {
        Some(present) => *present = new,
        None => conditions.push(new),
    }
}
