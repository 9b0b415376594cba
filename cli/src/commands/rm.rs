//! `husk rm`.

use husk_monitor::state::RuntimeDir;
use husk_objects::Kind;

use crate::failure::{Failure, RUNTIME};
use crate::live_vm;
use crate::machine::systemd::Systemd;
use crate::machine::{LocalStores, delete_command};
use crate::shutdown::{StopMode, stop_all};
use crate::vm_ref::VmRef;

/// Stop VMs and remove their state
///
/// Like `kubectl delete vmi`: a running VM is shut down within its grace period. A VM that has ended leaves no state,
/// unless its monitor was killed; `husk rm` removes that state too. Disk images are not touched, except emptyDisks and
/// overlays, which are removed with their VM.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if no state of the VMs is left, 1 if a VM does not exist (without
--force) or could not be stopped; the other VMs are removed in any case. 2 if
one is a VM of `husk apply`; then none is removed.

Examples:
  husk rm demo test/other
  husk rm --force demo")]
pub(crate) struct Args {
    /// The VMs: NAME or NAMESPACE/NAME
    #[arg(value_name = "VM", required = true)]
    vms: Vec<VmRef>,

    /// Kill running VMs at once, and ignore VMs that do not exist
    #[arg(short, long)]
    force: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    for name in &args.vms {
        if is_supervised(name) {
            return Err(Failure::Usage(refusal(&LocalStores::locate()?, name)));
        }
    }
    let runtime = RuntimeDir::locate()?;
    let is_live = |vm: &VmRef| runtime.find(&vm.namespace, &vm.name).is_ok();
    let lived: Vec<_> = args.vms.iter().map(is_live).collect();
    let removed: Vec<_> = runtime.remove_abandoned()?.iter().map(live_vm::vm_ref).collect();
    let (mut running, mut done) = (Vec::new(), Ok(()));
    for (vm, lived) in args.vms.iter().zip(lived) {
        if let Ok(dir) = runtime.find(&vm.namespace, &vm.name) {
            running.push(Ok(dir));
        } else if let Err(error) = runtime.clear(&vm.namespace, &vm.name) {
            Failure::from(error).report();
            done = Err(Failure::Ended(RUNTIME));
        } else if removed.contains(vm) {
            eprintln!("{vm}: removed the state left by a dead monitor");
        } else if !lived && !args.force {
            // Reports that the VM does not exist, unless it ended just now.
            if let Err(failure) = live_vm::find(vm) {
                failure.report();
                done = Err(Failure::Ended(RUNTIME));
            }
        }
    }
    let mode = if args.force {
        StopMode::Force
    } else {
        StopMode::Graceful(None)
    };
    live_vm::block_on(stop_all(running, mode))?;
    done
}

/// Says how to end a VM that systemd runs.
fn refusal(stores: &LocalStores, name: &VmRef) -> String {
    let kind = match stores.vm(name) {
        Ok(vm) if vm.key.kind == Kind::VirtualMachineInstance => "vmi",
        _ => "vm",
    };
    let delete = delete_command(kind, &name.namespace, &[&name.name]);
    format!("{name} is a VM of `husk apply`: `husk stop {name}` stops it, {delete} deletes it")
}

/// True if systemd runs the VM.
fn is_supervised(name: &VmRef) -> bool {
    let unit = Systemd::find().and_then(|systemd| systemd.vm(name));
    unit.is_ok_and(|unit| unit.runs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::test_manifests;

    #[test]
    fn the_command_that_deletes_a_vm_of_the_store_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let vmi = test_manifests::vmi("demo");
        stores.objects.apply(&vmi).unwrap();
        for (name, command) in [
            ("demo", "`husk delete vmi demo`"),
            ("test/demo", "`husk delete vm demo -n test`"),
        ] {
            let text = refusal(&stores, &name.parse().unwrap());
            assert!(text.ends_with(&format!(", {command} deletes it")), "{text}");
        }
    }
}
