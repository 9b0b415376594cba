//! Brings a VM to what its object says: starts it, stops it, or changes it while it runs.

use std::collections::HashMap;

use husk_monitor::client;
use husk_monitor::state::RuntimeDir;
use husk_objects::{Applied, Outcome};
use husk_proto::shim::v1::SyncVmiRequest;
use husk_vmi::objects::RunStrategy;
use serde_json::Value;
use tonic::Code;

use super::super::sync::change_text;
use crate::failure::{Failure, note, one_line};
use crate::live_vm;
use crate::machine::systemd::Systemd;
use crate::machine::vm::{self, ExpandedVm};
use crate::machine::{Machine, claim_of};
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
    let changed = applied.outcome != Outcome::Unchanged;
    let was = applied.before.as_ref().and_then(strategy_text);
    let is_new_strategy = was != strategy_text(applied.object.value());
    let starts = match strategy {
        RunStrategy::Always => true,
        // A guest that powered off stays so.
        RunStrategy::RerunOnFailure => is_new_strategy || unit.enabled || unit.active == "failed",
        RunStrategy::Once => is_new_strategy,
        RunStrategy::Manual | RunStrategy::Halted => false,
    };
    let enabled = starts && strategy != RunStrategy::Once;
    if enabled != unit.enabled {
        systemd.enable(&name, enabled)?;
    }
    if strategy == RunStrategy::Halted {
        if !unit.runs() {
            return Ok(Reconciled::Nothing);
        }
        systemd.stop(&name)?;
        return Ok(Reconciled::Stops);
    }
    if !unit.runs() {
        if !starts {
            return Ok(Reconciled::Nothing);
        }
        systemd.start(&name)?;
        return Ok(match unit.is_stopping() {
            true => Reconciled::Restarts(unit.pid),
            false => Reconciled::Starts,
        });
    }
    let runtime = RuntimeDir::locate()?;
    match runtime.find(&name.namespace, &name.name) {
        Ok(_) if unit.active == "active" => {
            if changed {
                sync(machine, &name, expanded)?;
            }
            Ok(Reconciled::Nothing)
        }
        // The guest does not run now. The process reads the changed object when it starts again.
        _ if changed => {
            systemd.restart(&name)?;
            Ok(Reconciled::Restarts(unit.pid))
        }
        _ => Ok(Reconciled::Starts),
    }
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

/// Applies what can change in a running VM, and says what needs a restart.
fn sync(machine: &Machine, name: &VmRef, expanded: &ExpandedVm) -> Result<(), Failure> {
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
    let request = SyncVmiRequest {
        vmi: expanded.manifest.to_string(),
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
        let volumes = done
            .volumes
            .iter()
            .map(|volume| (&volume.name, &volume.phase, &volume.message));
        let interfaces = done.interfaces.iter();
        let interfaces = interfaces.map(|interface| (&interface.name, &interface.phase, &interface.message));
        for (entry, phase, message) in volumes.chain(interfaces) {
            if !matches!(phase.as_str(), "" | "Ready" | "Absent") {
                note(&format!("{name}: {}: {}", one_line(entry), one_line(message)));
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
