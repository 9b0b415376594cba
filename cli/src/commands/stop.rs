//! `husk stop`.

use husk_monitor::state::{RuntimeDir, VmDir};
use husk_objects::{ObjectError, StoredObject};
use husk_vmi::objects::RunStrategy;

use super::apply::wait::Waits;
use crate::failure::{Failure, chain, print_warning};
use crate::live_vm;
use crate::machine::systemd::{Systemd, Unit};
use crate::machine::{FirstStart, LocalStores, vm};
use crate::shutdown::{StopMode, stop_all};
use crate::vm_ref::VmRef;

/// Shut down VMs and wait until they have ended
///
/// Presses the ACPI power button and kills the VM if it is still running after the grace period, which is
/// terminationGracePeriodSeconds of the manifest. A VM of `husk apply` with the run strategy Always gets the strategy
/// Halted, as with `virtctl stop`. Ctrl-C ends the wait, not the shutdown.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if all VMs have ended, gracefully or not; 1 also if the run
strategy of one could not be changed.

Examples:
  husk stop demo
  husk stop demo --grace-period 120
  husk stop demo --force")]
pub(crate) struct Args {
    /// The VMs: NAME or NAMESPACE/NAME
    #[arg(value_name = "VM", required = true)]
    vms: Vec<VmRef>,

    /// Grace period in seconds, instead of that of the manifest; 0 kills at once. It only shortens that of a VM of
    /// `husk apply`
    #[arg(short, long, value_name = "SECONDS")]
    grace_period: Option<u64>,

    /// Kill the VMs at once; data not yet written to their disks is lost
    #[arg(short, long, conflicts_with = "grace_period")]
    force: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let mode = if args.force {
        StopMode::Force
    } else {
        StopMode::Graceful(args.grace_period)
    };
    stop(
        &LocalStores::locate()?,
        Systemd::find().ok(),
        &RuntimeDir::locate()?,
        &args.vms,
        mode,
    )
}

fn stop(
    stores: &LocalStores,
    systemd: Option<Systemd>,
    runtime: &RuntimeDir,
    vms: &[VmRef],
    mode: StopMode,
) -> Result<(), Failure> {
    let mut waits = Waits::default();
    let mut running = Vec::new();
    for name in vms {
        match begin(stores, systemd, runtime, name) {
            Ok(Some(Stopping { unit, unsaved })) => {
                running.extend(asked(runtime, name, &unit, mode).map(Ok));
                running.extend(unsaved.map(Err));
                waits.stops.push(name.clone());
            }
            Ok(None) => running.push(live_vm::find(name)),
            // It is reported when the others have ended.
            Err(failure) => running.push(Err(failure)),
        }
    }
    let stopped = live_vm::block_on(stop_all(running, mode));
    match systemd {
        Some(systemd) if !waits.stops.is_empty() => {
            let names = waits.stops.clone();
            let waited = waits.wait_in(stores, systemd, runtime);
            // Else `husk apply` would start one that has failed before.
            names.iter().for_each(|name| systemd.forget(name));
            stopped.and(waited)
        }
        _ => stopped,
    }
}

/// The VM to which `stop` itself sends a request: another VM of this name, which `husk run` started; or the VM of the
/// store if the command line sets the grace period, because systemd uses that of the manifest.
fn asked(runtime: &RuntimeDir, name: &VmRef, unit: &Unit, mode: StopMode) -> Option<VmDir> {
    let found = runtime.find(&name.namespace, &name.name).ok()?;
    let by_systemd = found.monitor_pid().is_none_or(|pid| unit.is(pid));
    (!by_systemd || !matches!(mode, StopMode::Graceful(None))).then_some(found)
}

/// A VM of `husk apply` whose unit stops.
struct Stopping {
    unit: Unit,
    /// The error, if the store still says that the VM is to run.
    unsaved: Option<Failure>,
}

/// Stops and disables the unit of a VM of `husk apply`. `None` if systemd does not run a VM of this name.
fn begin(
    stores: &LocalStores,
    systemd: Option<Systemd>,
    runtime: &RuntimeDir,
    name: &VmRef,
) -> Result<Option<Stopping>, Failure> {
    let Some(systemd) = systemd else {
        return Ok(None);
    };
    let unit = systemd.vm(name)?;
    if !unit.runs() && !unit.is_stopping() && runtime.find(&name.namespace, &name.name).is_ok() {
        return Ok(None);
    }
    let stored = match stores.vm(name) {
        Ok(stored) => Some(stored),
        Err(ObjectError::NotFound(_)) if !unit.runs() && !unit.is_stopping() && !unit.enabled => {
            return Ok(None);
        }
        // The store was removed, or is not mounted.
        Err(ObjectError::NotFound(_)) => None,
        Err(damaged @ ObjectError::Damaged { .. }) => {
            print_warning(&format!("{damaged}: the run strategy of {name} stays"));
            None
        }
        Err(error) => return Err(error.into()),
    };
    // A VM stops also if the disk is full.
    let unsaved = save(stores, name, stored.as_ref()).err();
    systemd.stop_for_good(name, &unit)?;
    Ok(Some(Stopping { unit, unsaved }))
}

/// Stores that a VM is not to run.
fn save(stores: &LocalStores, name: &VmRef, stored: Option<&StoredObject>) -> Result<(), Failure> {
    if let Some(stored) = stored.filter(|stored| vm::run_strategy(stored) == RunStrategy::Always) {
        let edited = stores
            .objects
            .edit(&stored.key, |object| vm::set_runs(object, false));
        edited.map_err(|error| {
            let error = chain(&error);
            Failure::Runtime(format!(
                "{name} stops, but keeps the run strategy Always, by which `husk apply` starts it again: {error}"
            ))
        })?;
    }
    for key in vm::keys(name) {
        FirstStart::of(stores, &key).clear()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::machine::fake_systemd::FakeSystemd;
    use crate::machine::test_manifests;

    #[test]
    fn a_vm_whose_file_is_damaged_stops_as_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let [a, b] = ["a", "b"].map(|name| {
            let vm = test_manifests::vm(name, "Always");
            stores.objects.apply(&vm).unwrap().object.key
        });
        fs::write(stores.objects.file(&b), "kind:").unwrap();
        let units = [&a, &b].map(|key| (Systemd::vm_unit(&vm::name(key)), "active"));
        let systemd = FakeSystemd {
            units: units.into(),
            ends: true,
            ..FakeSystemd::default()
        }
        .install();
        let runtime = RuntimeDir::at(folder.path().join("run"));
        let names = [&a, &b].map(vm::name);
        stop(&stores, Some(systemd), &runtime, &names, StopMode::Graceful(None)).unwrap();
        let expected = ["a", "b"]
            .map(|name| ["disable", "stop"].map(|verb| format!("{verb} husk@default:{name}.service")));
        assert_eq!(FakeSystemd::changes(), expected.concat());
        let stored = stores.objects.get(&a).unwrap();
        assert_eq!(vm::run_strategy(&stored), RunStrategy::Halted);
    }

    #[test]
    fn a_vm_stops_on_a_full_disk() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let vm = test_manifests::vm("demo", "Always");
        let key = stores.objects.apply(&vm).unwrap().object.key;
        // No new file can be written.
        fs::create_dir(stores.objects.file(&key).with_file_name(".demo.new")).unwrap();
        let systemd = FakeSystemd {
            units: [("husk@default:demo.service".to_owned(), "active")].into(),
            ends: true,
            ..FakeSystemd::default()
        }
        .install();
        let runtime = RuntimeDir::at(folder.path().join("run"));
        let mode = StopMode::Graceful(None);
        let stopped = stop(&stores, Some(systemd), &runtime, &[vm::name(&key)], mode);
        let changes = ["disable", "stop"].map(|verb| format!("{verb} husk@default:demo.service"));
        assert_eq!(FakeSystemd::changes(), changes);
        let Err(Failure::Runtime(text)) = stopped else {
            panic!("{stopped:?}")
        };
        assert!(
            text.starts_with("demo stops, but keeps the run strategy Always"),
            "{text}"
        );
    }

    #[test]
    fn a_vm_that_waits_for_a_store_that_is_gone_stops() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let systemd = FakeSystemd {
            units: [("husk@default:demo.service".to_owned(), "active")].into(),
            ends: true,
            ..FakeSystemd::default()
        }
        .install();
        let runtime = RuntimeDir::at(folder.path().join("run"));
        let stop = |name: &str| {
            let mode = StopMode::Graceful(None);
            stop(&stores, Some(systemd), &runtime, &[name.parse().unwrap()], mode)
        };
        stop("demo").unwrap();
        let changes = ["disable", "stop"].map(|verb| format!("{verb} husk@default:demo.service"));
        assert_eq!(FakeSystemd::changes(), changes);
        assert!(stop("other").is_err());
    }

    #[test]
    fn a_vm_of_a_machine_without_the_unit_file_is_stopped() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let vmi = test_manifests::vmi("demo");
        let name = vm::name(&stores.objects.apply(&vmi).unwrap().object.key);
        let systemd = FakeSystemd {
            lacks_unit_file: true,
            ..FakeSystemd::default()
        }
        .install();
        let runtime = RuntimeDir::at(folder.path().join("run"));
        let mode = StopMode::Graceful(None);
        stop(&stores, Some(systemd), &runtime, &[name], mode).unwrap();
    }

    #[test]
    fn stop_also_reaches_a_vm_of_husk_run_with_the_same_name() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::at(folder.path());
        let _runs = runtime.claim("default", "demo").unwrap();
        let is_asked = |pid: u32, mode| {
            let unit = Unit {
                pid: pid.to_string(),
                ..Unit::default()
            };
            asked(&runtime, &"demo".parse().unwrap(), &unit, mode).is_some()
        };
        let (own, other) = (std::process::id(), std::process::id() + 1);
        assert!(is_asked(other, StopMode::Graceful(None)));
        assert!(!is_asked(own, StopMode::Graceful(None)));
        assert!(is_asked(own, StopMode::Graceful(Some(5))) && is_asked(own, StopMode::Force));
    }
}
