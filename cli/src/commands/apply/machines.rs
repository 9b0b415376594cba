//! Brings a VM to what its object says: starts it, stops it, or changes it while it runs.

use std::collections::HashMap;

use husk_monitor::client;
use husk_monitor::state::RuntimeDir;
use husk_objects::{Applied, Outcome};
use husk_proto::shim::v1::{SyncVmiRequest, SyncVmiResponse};
use husk_vmi::objects::RunStrategy;
use serde_json::Value;
use tonic::Code;

use super::super::sync::change_text;
use crate::failure::{Failure, note, one_line};
use crate::live_vm;
use crate::machine::systemd::{Systemd, Unit};
use crate::machine::vm::{self, ExpandedVm};
use crate::machine::{Machine, claim_of, status};
use crate::vm_ref::VmRef;

/// The change that [`reconcile`] began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reconciled {
    Starts,
    /// It starts again after the process of this id.
    Restarts(String),
    Stops,
    Nothing,
}

/// The next step of a VM towards its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Start,
    Stop,
    /// Ends the process, and starts it again with the objects as they are now.
    Restart,
    /// Changes the guest's devices.
    Sync,
    /// Its process is starting it.
    Wait,
    Nothing,
}

/// A VM as it is after its object was applied.
#[derive(Debug)]
struct Seen<'a> {
    strategy: RunStrategy,
    /// The object was created or changed by this command.
    changed: bool,
    is_new_strategy: bool,
    unit: &'a Unit,
    /// Its guest runs.
    has_guest: bool,
}

impl Seen<'_> {
    /// True if the run strategy starts the VM unless it runs.
    fn starts(&self) -> bool {
        match self.strategy {
            RunStrategy::Always => true,
            // A guest that powered off stays so.
            RunStrategy::RerunOnFailure => {
                self.is_new_strategy || self.unit.enabled || self.unit.active == "failed"
            }
            RunStrategy::Once => self.is_new_strategy,
            RunStrategy::Manual | RunStrategy::Halted => false,
        }
    }

    fn step(&self) -> Step {
        match (self.unit.runs(), self.strategy) {
            (true, RunStrategy::Halted) => Step::Stop,
            (false, _) if self.starts() => Step::Start,
            (false, _) => Step::Nothing,
            // Also without a change: an earlier command may have been interrupted, or refused by the guest.
            (true, _) if self.has_guest => Step::Sync,
            // The process reads the objects when it starts again, and one that waits would go on to wait.
            (true, _) if self.changed || status::waits(self.unit) => Step::Restart,
            (true, _) => Step::Wait,
        }
    }
}

/// Begins what the run strategy of a VM asks for, and applies changes to the VM if it runs.
pub(super) fn reconcile(
    machine: &Machine,
    systemd: Systemd,
    applied: &Applied,
    expanded: &ExpandedVm,
) -> Result<Reconciled, Failure> {
    let name = vm::name(&applied.object.key);
    let strategy = vm::run_strategy(&applied.object);
    let unit = systemd.vm(&name)?;
    let seen = Seen {
        strategy,
        changed: applied.outcome != Outcome::Unchanged,
        is_new_strategy: is_new_strategy(applied),
        unit: &unit,
        has_guest: unit.active == "active" && RuntimeDir::locate()?.find(&name.namespace, &name.name).is_ok(),
    };
    let enabled = seen.starts() && strategy != RunStrategy::Once;
    if enabled != unit.enabled {
        systemd.enable(&name, enabled)?;
    }
    Ok(match seen.step() {
        Step::Start => {
            systemd.start(&name)?;
            match unit.is_stopping() {
                true => Reconciled::Restarts(unit.pid),
                false => Reconciled::Starts,
            }
        }
        Step::Stop => {
            systemd.stop(&name)?;
            Reconciled::Stops
        }
        Step::Restart => {
            systemd.restart(&name)?;
            Reconciled::Restarts(unit.pid)
        }
        Step::Sync => {
            sync(machine, applied, expanded)?;
            Reconciled::Nothing
        }
        Step::Wait => Reconciled::Starts,
        Step::Nothing => Reconciled::Nothing,
    })
}

/// True if the object is new, or had another run strategy before.
fn is_new_strategy(applied: &Applied) -> bool {
    let was = applied.before.as_ref().and_then(strategy_text);
    was != strategy_text(applied.object.value())
}

/// The run strategy of a manifest, given as `spec.runStrategy` or `spec.running`.
fn strategy_text(object: &Value) -> Option<String> {
    let spec = &object["spec"];
    if object["kind"] == "VirtualMachineInstance" {
        return Some("Once".to_owned());
    }
    Some(match spec.get("running") {
        Some(running) => if running == true { "Always" } else { "Halted" }.to_owned(),
        None => spec.get("runStrategy")?.as_str()?.to_owned(),
    })
}

/// Applies what can change in a running VM, and says what needs a restart. Says nothing if the VM is as its object.
fn sync(machine: &Machine, applied: &Applied, expanded: &ExpandedVm) -> Result<(), Failure> {
    let name = &vm::name(&applied.object.key);
    let volumes = expanded
        .vmi
        .spec
        .volumes
        .iter()
        .filter(|volume| volume.is_hotpluggable());
    let mut paths = HashMap::new();
    for volume in volumes {
        let Some(claim) = claim_of(volume) else { continue };
        if !machine.claims.has(&name.namespace, claim) {
            let objects = machine.read()?;
            let claim = VmRef {
                namespace: name.namespace.clone(),
                name: claim.to_owned(),
            };
            crate::machine::import(machine, &objects, &claim, &mut |text| {
                eprintln!("{name}: {}", one_line(text))
            })
            .map_err(|error| Failure::Runtime(format!("{name}: {}", error.text)))?;
        }
        let path = machine.claims.image(&name.namespace, claim);
        paths.insert(volume.name.clone(), path.to_string_lossy().into_owned());
    }
    let mut vmi = expanded.manifest.clone();
    // A manifest from a cluster has another one.
    vmi["metadata"]["uid"] = applied.object.uid().into();
    let request = SyncVmiRequest {
        vmi: vmi.to_string(),
        paths,
        ..SyncVmiRequest::default()
    };
    live_vm::block_on(async {
        let mut client = client::connect(&live_vm::find(name)?).await?;
        let done = match client.sync_vmi(request).await {
            Ok(done) => done.into_inner(),
            // Fields that cannot change while the VM runs.
            Err(refused)
                if refused.code() == Code::FailedPrecondition && refused.message().starts_with("spec.") =>
            {
                for line in refused.message().lines() {
                    note(&format!("{name}: {}", one_line(line)));
                }
                note(&format!(
                    "{name}: the change takes effect at the next start: `husk restart {name}`"
                ));
                return Ok(());
            }
            Err(refused) => {
                return Err(Failure::Runtime(format!(
                    "{name}: {}",
                    one_line(refused.message())
                )));
            }
        };
        for change in &done.changes {
            eprintln!("{name}: {}", change_text(change));
        }
        for text in pending(&done, applied.outcome != Outcome::Unchanged) {
            note(&format!("{name}: {text}"));
        }
        Ok(())
    })
}

/// The volumes and interfaces that are not as the object says yet. A VM that was started without a network gets none
/// before its end: that is said with a changed object only.
fn pending(done: &SyncVmiResponse, changed: bool) -> Vec<String> {
    let volumes = done
        .volumes
        .iter()
        .map(|volume| (&volume.name, volume.phase.as_str(), &volume.message));
    let interfaces = done
        .interfaces
        .iter()
        .map(|interface| (&interface.name, interface.phase.as_str(), &interface.message));
    let is_done = |phase: &str| matches!(phase, "" | "Ready" | "Absent") || phase == "NoNetwork" && !changed;
    volumes
        .chain(interfaces)
        .filter(|(_, phase, _)| !is_done(phase))
        .map(|(entry, _, message)| format!("{}: {}", one_line(entry), one_line(message)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use husk_proto::shim::v1::{InterfaceStatus, VolumeStatus};
    use serde_json::json;

    fn unit(active: &str) -> Unit {
        Unit {
            active: active.to_owned(),
            ..Unit::default()
        }
    }

    fn unchanged(strategy: RunStrategy, unit: &Unit) -> Seen<'_> {
        Seen {
            strategy,
            changed: false,
            is_new_strategy: false,
            unit,
            has_guest: false,
        }
    }

    #[test]
    fn a_running_vm_is_synchronised_also_if_its_object_did_not_change() {
        let active = unit("active");
        for changed in [true, false] {
            let seen = Seen {
                changed,
                has_guest: true,
                ..unchanged(RunStrategy::Manual, &active)
            };
            assert_eq!(seen.step(), Step::Sync);
        }
    }

    #[test]
    fn a_vm_that_waits_is_tried_at_once() {
        for (text, step) in [
            (
                "ErrorPvcNotFound: PVC data not found; next attempt in 250 s",
                Step::Restart,
            ),
            ("Provisioning: importing data: 5.0 %", Step::Wait),
            ("Starting", Step::Wait),
            ("", Step::Wait),
        ] {
            let waiting = Unit {
                text: text.to_owned(),
                ..unit("activating")
            };
            assert_eq!(unchanged(RunStrategy::Always, &waiting).step(), step, "{text}");
        }
    }

    #[test]
    fn only_what_is_pending_is_told() {
        let volume = |name: &str, phase: &str, message: &str| VolumeStatus {
            name: name.into(),
            phase: phase.into(),
            message: message.into(),
            ..VolumeStatus::default()
        };
        let no_network = InterfaceStatus {
            name: "default".into(),
            phase: "NoNetwork".into(),
            message: "the VM was started without a network".into(),
            ..InterfaceStatus::default()
        };
        let mut done = SyncVmiResponse {
            volumes: vec![volume("root", "", ""), volume("data", "Ready", "attached")],
            interfaces: vec![no_network],
            ..SyncVmiResponse::default()
        };
        assert_eq!(pending(&done, false), [""; 0]);
        assert_eq!(
            pending(&done, true),
            ["default: the VM was started without a network"]
        );
        done.volumes
            .push(volume("old", "Detaching", "the guest has not released it"));
        assert_eq!(pending(&done, false), ["old: the guest has not released it"]);
    }

    #[test]
    fn both_spellings_of_a_strategy_are_compared() {
        let strategy = |spec| strategy_text(&json!({"kind": "VirtualMachine", "spec": spec}));
        assert_eq!(
            strategy(json!({"running": true})),
            strategy(json!({"runStrategy": "Always"}))
        );
        assert_eq!(strategy(json!({"running": false})), Some("Halted".into()));
        let vmi = json!({"kind": "VirtualMachineInstance", "spec": {}});
        assert_eq!(strategy_text(&vmi), Some("Once".into()));
    }
}
