//! Brings a VM to what its object says: starts it, stops it, or changes it while it runs.

use std::collections::HashMap;

use husk_monitor::client;
use husk_monitor::state::RuntimeDir;
use husk_objects::{Applied, Key, Kind, ObjectError, Outcome};
use husk_proto::shim::v1::{SyncVmiRequest, SyncVmiResponse};
use husk_vmi::objects::RunStrategy;
use serde_json::Value;
use tonic::Code;

use super::super::sync::change_text;
use super::files::InputObject;
use crate::failure::{Failure, one_line, print_warning};
use crate::live_vm;
use crate::machine::systemd::{Systemd, Unit};
use crate::machine::vm::{self, ExpandedVm};
use crate::machine::{FirstStart, LocalStores, claim_of, refuse_deleted, status};
use crate::vm_ref::VmRef;

/// The change that [`reconcile`] began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reconciled {
    Starts,
    /// It starts again after the process of this id.
    Restarts(String),
    Stops,
    /// It runs, and [`sync`] is to change its devices.
    Syncs,
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
struct VmObservation<'a> {
    strategy: RunStrategy,
    /// The object was created or changed by this command.
    changed: bool,
    /// It is new, or has a new run strategy, and was not started since.
    is_due: bool,
    unit: &'a Unit,
    /// Its guest runs.
    has_guest: bool,
}

impl VmObservation<'_> {
    /// True if the run strategy starts the VM unless it runs.
    fn starts(&self) -> bool {
        match self.strategy {
            RunStrategy::Always => true,
            // A guest that powered off stays so.
            RunStrategy::RerunOnFailure => self.is_due || self.unit.enabled || self.unit.active == "failed",
            RunStrategy::Once => self.is_due,
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

/// Begins what the run strategy of a VM asks for.
pub(super) fn reconcile(
    stores: &LocalStores,
    systemd: Systemd,
    runtime: &RuntimeDir,
    applied: &Applied,
) -> Result<Reconciled, Failure> {
    let name = vm::name(&applied.object.key);
    let strategy = vm::run_strategy(&applied.object);
    let unit = systemd.vm(&name)?;
    let mark = FirstStart::of(stores, &applied.object.key);
    let seen = VmObservation {
        strategy,
        changed: applied.outcome != Outcome::Unchanged,
        is_due: is_new_strategy(applied) || mark.is_due(strategy),
        unit: &unit,
        has_guest: unit.active == "active" && !status::starts(&unit) && has_guest(runtime, &name),
    };
    // Another command has deleted it: a unit that is enabled without an object would fail at each boot.
    if stores.is_gone(&applied.object) {
        return Ok(Reconciled::Nothing);
    }
    let enabled = seen.starts() && strategy != RunStrategy::Once;
    if enabled != unit.enabled {
        systemd.enable(&name, enabled)?;
    }
    let step = seen.step();
    match step {
        Step::Start => systemd.start(&name)?,
        Step::Stop => systemd.stop(&name)?,
        Step::Restart => systemd.restart(&name)?,
        Step::Sync | Step::Wait | Step::Nothing => {}
    }
    // Else the VM's process removes it when the guest runs.
    if matches!(step, Step::Sync | Step::Stop | Step::Nothing) {
        mark.clear()?;
    }
    Ok(match step {
        Step::Start if !unit.is_stopping() => Reconciled::Starts,
        Step::Start | Step::Restart => Reconciled::Restarts(unit.pid),
        Step::Stop => Reconciled::Stops,
        Step::Sync => Reconciled::Syncs,
        Step::Wait => Reconciled::Starts,
        Step::Nothing => Reconciled::Nothing,
    })
}

/// Marks the VMs that are to start because they are new, or get a new run strategy, before that is stored.
pub(super) fn mark_starts(
    stores: &LocalStores,
    systemd: Systemd,
    given: &[InputObject],
) -> Result<(), Failure> {
    for given in given {
        if !given.key().is_some_and(|key| key.kind.is_vm()) {
            continue;
        }
        let applied = stores.objects.compare(&given.object.value)?;
        let key = &applied.object.key;
        if let Some(strategy) = first_start(&applied)
            && !systemd.vm(&vm::name(key))?.runs()
        {
            FirstStart::of(stores, key).mark(strategy)?;
        }
    }
    Ok(())
}

/// The run strategy of a VM that it starts now, and not again once the VM has ended.
fn first_start(applied: &Applied) -> Option<RunStrategy> {
    let strategy = vm::run_strategy(&applied.object);
    let starts_once = matches!(strategy, RunStrategy::RerunOnFailure | RunStrategy::Once);
    (starts_once && is_new_strategy(applied)).then_some(strategy)
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

/// The volumes to plug into a running VM that are not filled yet.
///
/// # Errors
/// Nothing fills one of them, or one is being deleted.
pub(super) fn unfilled(
    stores: &LocalStores,
    vm: &VmRef,
    expanded: &ExpandedVm,
) -> Result<Vec<VmRef>, Failure> {
    let mut volumes = Vec::new();
    for (_, claim) in plugged(expanded) {
        let volume = VmRef {
            namespace: vm.namespace.clone(),
            name: claim.to_owned(),
        };
        refuse_deleted(stores, &volume).map_err(|error| Failure::Runtime(format!("{vm}: {}", error.text)))?;
        if stores.claims.has(&volume.namespace, &volume.name) {
            continue;
        }
        let key = Key::new(Kind::DataVolume, &volume.namespace, &volume.name);
        match stores.objects.get(&key) {
            Ok(_) => volumes.push(volume),
            Err(ObjectError::NotFound(_)) => {
                return Err(Failure::Runtime(format!(
                    "{vm}: PVC {claim} not found: apply it, or `husk volume create {volume} --size SIZE`"
                )));
            }
            Err(damaged) => return Err(damaged.into()),
        }
    }
    Ok(volumes)
}

/// Names and claims of the volumes that can be plugged while the VM runs.
fn plugged(expanded: &ExpandedVm) -> impl Iterator<Item = (&str, &str)> {
    let volumes = expanded.vmi.spec.volumes.iter();
    volumes
        .filter(|volume| volume.is_hotpluggable())
        .filter_map(|volume| Some((volume.name.as_str(), claim_of(volume)?)))
}

fn has_guest(runtime: &RuntimeDir, vm: &VmRef) -> bool {
    runtime.find(&vm.namespace, &vm.name).is_ok()
}

/// As [`sync`], for a VM whose volumes were filled meanwhile. Does nothing if their import failed, if the VM has ended,
/// or if another command has changed its object.
pub(super) fn sync_later(
    stores: &LocalStores,
    runtime: &RuntimeDir,
    applied: &Applied,
    expanded: &ExpandedVm,
) -> Result<(), Failure> {
    let key = &applied.object.key;
    let name = vm::name(key);
    let now = stores.objects.get(key);
    let is_same = now.is_ok_and(|now| now.value() == applied.object.value());
    if is_same && has_guest(runtime, &name) && unfilled(stores, &name, expanded)?.is_empty() {
        sync(stores, applied, expanded)?;
    }
    Ok(())
}

/// Applies what can change in a running VM, and says what needs a restart. Says nothing if the VM is as its object.
pub(super) fn sync(stores: &LocalStores, applied: &Applied, expanded: &ExpandedVm) -> Result<(), Failure> {
    let name = &vm::name(&applied.object.key);
    let paths = plugged(expanded).map(|(volume, claim)| {
        let path = stores.claims.image(&name.namespace, claim);
        (volume.to_owned(), path.to_string_lossy().into_owned())
    });
    let paths: HashMap<_, _> = paths.collect();
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
                    print_warning(&format!("{name}: {}", one_line(line)));
                }
                print_warning(&format!(
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
            print_warning(&format!("{name}: {text}"));
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
    use crate::machine::fake_systemd::FakeSystemd;
    use crate::machine::test_manifests;
    use husk_claims::NewClaim;
    use husk_proto::shim::v1::{InterfaceStatus, VolumeStatus};
    use husk_vmi::objects::read_objects;
    use serde_json::json;

    fn unit(active: &str) -> Unit {
        Unit {
            active: active.to_owned(),
            ..Unit::default()
        }
    }

    fn unchanged(strategy: RunStrategy, unit: &Unit) -> VmObservation<'_> {
        VmObservation {
            strategy,
            changed: false,
            is_due: false,
            unit,
            has_guest: false,
        }
    }

    fn vm(strategy: &str) -> Value {
        test_manifests::vm("demo", strategy)
    }

    #[test]
    fn a_running_vm_is_synchronised_also_if_its_object_did_not_change() {
        let active = unit("active");
        for changed in [true, false] {
            let seen = VmObservation {
                changed,
                has_guest: true,
                ..unchanged(RunStrategy::Manual, &active)
            };
            assert_eq!(seen.step(), Step::Sync);
        }
    }

    #[test]
    fn a_vm_that_was_stored_and_not_started_is_started_by_the_next_apply() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let mark = |applied: &Applied| FirstStart::of(&stores, &applied.object.key);
        let apply = |manifest: &Value| {
            let object = read_objects(&manifest.to_string()).unwrap().pop().unwrap();
            let compared = stores.objects.compare(&object.value).unwrap();
            if let Some(strategy) = first_start(&compared) {
                mark(&compared).mark(strategy).unwrap();
            }
            stores.objects.apply(&object.value).unwrap()
        };
        let inactive = unit("");
        let step = |applied: &Applied| {
            let strategy = vm::run_strategy(&applied.object);
            let seen = VmObservation {
                is_due: mark(applied).is_due(strategy),
                ..unchanged(strategy, &inactive)
            };
            seen.step()
        };
        let vmi = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": {"name": "other"},
            "spec": {"domain": {"devices": {}}},
        });
        for manifest in [vm("RerunOnFailure"), vm("Once"), vmi] {
            apply(&manifest);
            // The first command ended here.
            let applied = apply(&manifest);
            assert_eq!(applied.outcome, Outcome::Unchanged);
            assert_eq!(step(&applied), Step::Start, "{manifest}");
            // It was started, and has ended.
            mark(&applied).clear().unwrap();
            assert_eq!(step(&apply(&manifest)), Step::Nothing, "{manifest}");
        }
        assert_eq!(step(&apply(&vm("Manual"))), Step::Nothing);
    }

    #[test]
    fn a_vm_whose_start_has_failed_is_started_by_the_next_apply() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let runtime = RuntimeDir::at(folder.path().join("run"));
        let start = |number: u32, active| {
            let mut manifest = vm("Once");
            manifest["metadata"]["labels"] = json!({"number": number.to_string()});
            let systemd = FakeSystemd {
                units: [("husk@default:demo.service".to_owned(), active)].into(),
                text: "Starting",
                ..FakeSystemd::default()
            };
            let systemd = systemd.install();
            let given = read_objects(&manifest.to_string()).unwrap().into_iter();
            let given = given.map(|object| InputObject {
                prefix: String::new(),
                object,
            });
            mark_starts(&stores, systemd, &given.collect::<Vec<_>>()).unwrap();
            let applied = stores.objects.apply(&manifest).unwrap();
            reconcile(&stores, systemd, &runtime, &applied).unwrap();
            FakeSystemd::changes()
        };
        assert_eq!(start(1, "inactive"), ["start husk@default:demo.service"]);
        assert_eq!(start(2, "failed"), ["start husk@default:demo.service"]);
        // Its process is about to fail again, and holds the VM's directory.
        let starting = runtime.claim("default", "demo").unwrap();
        assert_eq!(start(3, "active"), ["restart husk@default:demo.service"]);
        assert_eq!(start(3, "active"), [""; 0]);
        drop(starting);
        assert_eq!(start(3, "failed"), ["start husk@default:demo.service"]);
    }

    #[test]
    fn a_vm_that_was_deleted_meanwhile_is_not_started() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let systemd = FakeSystemd::default().install();
        let runtime = RuntimeDir::at(folder.path().join("run"));
        let applied = stores.objects.apply(&vm("Always")).unwrap();
        let key = &applied.object.key;
        let reconcile = || reconcile(&stores, systemd, &runtime, &applied).unwrap();
        stores.objects.begin_deletion(key).unwrap();
        assert_eq!(reconcile(), Reconciled::Nothing);
        stores.objects.remove(key).unwrap();
        assert_eq!(reconcile(), Reconciled::Nothing);
        // Another object of this name.
        stores.objects.apply(&vm("Always")).unwrap();
        assert_eq!(reconcile(), Reconciled::Nothing);
        assert_eq!(FakeSystemd::changes(), [""; 0]);
    }

    #[test]
    fn a_deferred_sync_skips_a_stopped_or_changed_vm() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let runtime = RuntimeDir::at(folder.path().join("run"));
        let mut manifest = vm("Manual");
        manifest["spec"]["template"]["spec"] = json!({
            "domain": {
                "memory": {"guest": "64Mi"},
                "devices": {"disks": [{"name": "data", "disk": {"bus": "scsi"}}]},
            },
            "volumes": [{"name": "data", "dataVolume": {"name": "data", "hotpluggable": true}}],
        });
        let data = json!({
            "apiVersion": "cdi.kubevirt.io/v1beta1",
            "kind": "DataVolume",
            "metadata": {"name": "data"},
            "spec": {"source": {"blank": {}}, "storage": {"resources": {"requests": {"storage": "1Mi"}}}},
        });
        stores.objects.apply(&data).unwrap();
        let applied = stores.objects.apply(&manifest).unwrap();
        let expanded = vm::expanded(&applied.object.object, &[]).unwrap();
        // A change would fail: no monitor answers.
        let later = || sync_later(&stores, &runtime, &applied, &expanded).unwrap();
        let runs = runtime.claim("default", "demo").unwrap();
        later();
        stores
            .claims
            .create(&NewClaim::new("default", "data", 1 << 20))
            .unwrap();
        drop(runs);
        later();
        let _runs = runtime.claim("default", "demo").unwrap();
        manifest["metadata"]["labels"] = json!({"a": "b"});
        stores.objects.apply(&manifest).unwrap();
        later();
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
                ..unit("active")
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
