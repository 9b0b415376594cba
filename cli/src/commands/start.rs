//! `husk start` and `husk restart`.

use husk_objects::{ObjectError, StoredObject};
use husk_vmi::objects::RunStrategy;

use super::apply::wait::Waits;
use crate::failure::{Failure, RUNTIME};
use crate::machine::systemd::Systemd;
use crate::machine::{LocalStores, unit, vm};
use crate::vm_ref::VmRef;

/// Start VMs of `husk apply`
///
/// A VM whose run strategy is Halted gets the strategy Always, as with `virtctl start`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if all VMs run, 1 if one does not.

Example:
  husk start demo test/other")]
pub(crate) struct StartArgs {
    /// The VMs: NAME or NAMESPACE/NAME
    #[arg(value_name = "VM", required = true)]
    vms: Vec<VmRef>,

    /// Return before they run
    #[arg(long)]
    no_wait: bool,
}

/// Shut down VMs of `husk apply` and start them again
///
/// Changes of a VM that cannot be made while it runs take effect.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if all VMs run again, 1 if one does not.

Example:
  husk restart demo")]
pub(crate) struct RestartArgs {
    /// The VMs: NAME or NAMESPACE/NAME
    #[arg(value_name = "VM", required = true)]
    vms: Vec<VmRef>,

    /// Return before they run
    #[arg(long)]
    no_wait: bool,
}

pub(super) fn start(args: &StartArgs) -> Result<(), Failure> {
    each(
        &LocalStores::locate()?,
        Systemd::find()?,
        &args.vms,
        args.no_wait,
        begin_start,
    )
}

pub(super) fn restart(args: &RestartArgs) -> Result<(), Failure> {
    each(
        &LocalStores::locate()?,
        Systemd::find()?,
        &args.vms,
        args.no_wait,
        |_, systemd, name, stored| begin_restart(systemd, name, stored),
    )
}

fn begin_start(
    stores: &LocalStores,
    systemd: Systemd,
    name: &VmRef,
    stored: &StoredObject,
) -> Result<String, Failure> {
    let unit = systemd.vm(name)?;
    if unit.runs() {
        return Err(Failure::Runtime(format!(
            "{name} runs already, or is being started"
        )));
    }
    let strategy = vm::run_strategy(stored);
    if strategy == RunStrategy::Halted {
        stores
            .objects
            .edit(&stored.key, |object| vm::set_runs(object, true))?;
    }
    if matches!(
        strategy,
        RunStrategy::Halted | RunStrategy::Always | RunStrategy::RerunOnFailure
    ) {
        systemd.enable(name, true)?;
    }
    systemd.start(name)?;
    Ok(unit.pid)
}

fn begin_restart(systemd: Systemd, name: &VmRef, stored: &StoredObject) -> Result<String, Failure> {
    let unit = systemd.vm(name)?;
    if !unit.runs() {
        return Err(Failure::Runtime(format!(
            "{name} does not run: `husk start {name}`"
        )));
    }
    // Its new process would end at once.
    if vm::run_strategy(stored) == RunStrategy::Halted {
        return Err(Failure::Runtime(format!(
            "{name}: the run strategy Halted does not start it again"
        )));
    }
    systemd.restart(name)?;
    Ok(unit.pid)
}

/// Does something with each VM, and waits until all run. `begin` returns the id of a process that ends before.
fn each(
    stores: &LocalStores,
    systemd: Systemd,
    vms: &[VmRef],
    no_wait: bool,
    begin: impl Fn(&LocalStores, Systemd, &VmRef, &StoredObject) -> Result<String, Failure>,
) -> Result<(), Failure> {
    let mut waits = Waits::default();
    let mut failed = false;
    for name in vms {
        let begun = stored(stores, name).and_then(|stored| {
            // It sets the data directory of all VMs, so not with a directory that lacks this one.
            unit::install(systemd)?;
            begin(stores, systemd, name, &stored)
        });
        match begun {
            Ok(pid) => waits.restart(name.clone(), pid),
            Err(failure) => {
                failure.report();
                failed = true;
            }
        }
    }
    if !no_wait {
        waits.wait(stores, systemd)?;
    }
    match failed {
        true => Err(Failure::Ended(RUNTIME)),
        false => Ok(()),
    }
}

/// The stored VM of this name, which may run.
fn stored(stores: &LocalStores, name: &VmRef) -> Result<StoredObject, Failure> {
    match stores.vm(name) {
        // A unit that is enabled without an object would fail at each boot.
        Ok(stored) if stored.is_deleting() => Err(ObjectError::Deleting(stored.key).into()),
        Err(ObjectError::NotFound(_)) => Err(Failure::Runtime(format!(
            "`husk apply` has stored no VM {name}: `husk get vm --all-namespaces` shows those that it has"
        ))),
        found => Ok(found?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::fake_systemd::FakeSystemd;
    use crate::machine::test_manifests;

    /// A store with the VM `demo`.
    fn stores(strategy: &str) -> (tempfile::TempDir, LocalStores) {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let vm = test_manifests::vm("demo", strategy);
        stores.objects.apply(&vm).unwrap();
        (folder, stores)
    }

    /// A systemd with the VM's unit.
    fn systemd(active: &'static str) -> Systemd {
        FakeSystemd {
            units: [("husk@default:demo.service".to_owned(), active)].into(),
            ..FakeSystemd::default()
        }
        .install()
    }

    #[test]
    fn a_restart_does_not_end_a_vm_that_would_not_start_again() {
        let demo = "demo".parse().unwrap();
        let (_folder, stores) = stores("Halted");
        let stored = stored(&stores, &demo).unwrap();
        let refused = begin_restart(systemd("active"), &demo, &stored).unwrap_err();
        assert!(
            matches!(&refused, Failure::Runtime(text) if text.contains("Halted")),
            "{refused:?}"
        );
        assert_eq!(FakeSystemd::changes(), [""; 0]);
    }

    #[test]
    fn a_vm_that_is_being_deleted_does_not_start() {
        let demo = "demo".parse().unwrap();
        let (_folder, stores) = stores("Always");
        let key = stores.vm(&demo).unwrap().key;
        stores.objects.begin_deletion(&key).unwrap();
        let refused = stored(&stores, &demo).unwrap_err();
        assert!(
            matches!(&refused, Failure::Runtime(text) if text.contains("is being deleted")),
            "{refused:?}"
        );
        let vms = [demo];
        let start = each(&stores, systemd("deactivating"), &vms, true, begin_start);
        let starts = FakeSystemd::changes();
        let restart = each(
            &stores,
            systemd("active"),
            &vms,
            true,
            |_, systemd, name, stored| begin_restart(systemd, name, stored),
        );
        assert!(start.is_err() && restart.is_err());
        assert_eq!((starts, FakeSystemd::changes()), (vec![], vec![]));
    }

    #[test]
    fn the_unit_file_is_written_for_a_vm_of_the_store_only() {
        let (folder, stores) = stores("Manual");
        let units = folder.path().join("units");
        let start = |name: &str| {
            let systemd = FakeSystemd {
                unit_directory: Some(units.clone()),
                ..FakeSystemd::default()
            };
            let vms = [name.parse().unwrap()];
            each(&stores, systemd.install(), &vms, true, begin_start).is_ok()
        };
        assert!(!start("typo") && !units.exists());
        assert!(start("demo") && units.join("husk@.service").exists());
        let expected = ["daemon-reload", "start husk@default:demo.service"];
        assert_eq!(FakeSystemd::changes(), expected);
    }
}
