//! `husk apply`.

mod claims;
pub(crate) mod files;
mod machines;
pub(crate) mod wait;

use std::path::PathBuf;

use husk_objects::{Applied, Key, Kind, Outcome};
use husk_vmi::objects::{Object, ObjectKind, PersistentVolumeClaim};

use crate::failure::{Failure, note, one_line};
use crate::machine::systemd::Systemd;
use crate::machine::vm::{ExpandedVm, KINDS, expanded};
use crate::machine::{Machine, finish_deletions, store_templates, unit, vm};
use crate::vm_ref::{self, VmRef};
use files::Given;

/// Longest name of a unit, and of a file.
const MAX_UNIT: usize = 255;

/// Create or change the objects of manifests, and run their VMs
///
/// Takes VirtualMachines, VirtualMachineInstances, Secrets, ConfigMaps, PersistentVolumeClaims, DataVolumes,
/// instance types and preferences. They are kept in the data directory, as manifests that can be read and edited. systemd
/// keeps the VMs running as their run strategies say, also after a boot of this machine; images are pulled and volumes
/// are filled. A change takes effect in the running VM, or is said to need a restart.
///
/// Shows the progress and returns when the VMs run. Ctrl-C ends that, and nothing else.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if all VMs that are to run do, 1 if one does not, 2 if a
manifest is wrong; then nothing is changed.

Examples:
  husk apply -f vm.yaml
  husk apply -f manifests/ --no-wait
  cat secret.yaml vm.yaml | husk apply -f -")]
pub(crate) struct Args {
    /// A manifest, or a folder of manifests; `-` reads stdin
    #[arg(short, long = "filename", value_name = "FILE|DIR", required = true, value_hint = clap::ValueHint::AnyPath)]
    files: Vec<PathBuf>,

    /// Namespace for objects whose manifest names none
    #[arg(short, long, value_name = "NAMESPACE", value_parser = vm_ref::namespace)]
    namespace: Option<String>,

    /// Return at once; `husk get vm` and `husk get dv` show the progress
    #[arg(long)]
    no_wait: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let given = files::read(&args.files, args.namespace.as_deref())?;
    let machine = Machine::locate()?;
    let vms = checked_vms(&machine, &given)?;
    let systemd = systemd_for(&given)?;
    finish_deletions(&machine, systemd)?;
    check(&machine, &given)?;
    for claim in given.iter().filter_map(claim) {
        claims::apply(&machine, claim)?;
    }
    let mut applied = apply_objects(&machine, &given)?;
    for (key, vm) in &vms {
        let of_vm = store_templates(&machine, &machine.objects.get(key)?, vm)?;
        of_vm
            .iter()
            .filter(|applied| applied.outcome != Outcome::Unchanged)
            .for_each(report);
        applied.extend(of_vm);
    }
    let Some(systemd) = systemd else {
        return Ok(());
    };
    unit::install(systemd)?;
    let mut waits = wait::Waits::default();
    for applied in &applied {
        let name = vm::name(&applied.object.key);
        if applied.object.key.kind == Kind::DataVolume && !machine.claims.has(&name.namespace, &name.name) {
            systemd
                .start_import(&name, &unit::program()?)
                .or_else(|failure| match systemd.import(&name)?.runs() {
                    true => Ok(()),
                    false => Err(failure),
                })?;
            waits.volumes.push(name);
        }
    }
    let mut failed = false;
    for applied in applied
        .iter()
        .filter(|applied| KINDS.contains(&applied.object.key.kind))
    {
        let expanded = vms
            .iter()
            .find(|(key, _)| *key == applied.object.key)
            .map(|(_, vm)| vm);
        let Some(expanded) = expanded else { continue };
        match machines::reconcile(&machine, systemd, applied, expanded) {
            Ok(machines::Reconciled::Starts) => waits.vms.push(vm::name(&applied.object.key)),
            Ok(machines::Reconciled::Restarts(pid)) => {
                waits.vms.push(vm::name(&applied.object.key));
                waits.restarts.insert(vm::name(&applied.object.key), pid);
            }
            Ok(machines::Reconciled::Stops) => waits.stops.push(vm::name(&applied.object.key)),
            Ok(machines::Reconciled::Nothing) => {}
            Err(failure) => {
                failure.report();
                failed = true;
            }
        }
    }
    if !args.no_wait {
        waits.until_done(&machine, systemd)?;
    }
    match failed {
        true => Err(Failure::Ended(crate::failure::RUNTIME)),
        false => Ok(()),
    }
}

fn claim(given: &Given) -> Option<&PersistentVolumeClaim> {
    match &given.object.kind {
        ObjectKind::PersistentVolumeClaim(claim) => Some(claim),
        _ => None,
    }
}

/// Checks that all objects can be stored, before one is.
fn check(machine: &Machine, given: &[Given]) -> Result<(), Failure> {
    let mut lines = Vec::new();
    for given in given {
        for text in &given.object.notes {
            note(&format!("{}{text}", given.prefix));
        }
        let fault = match claim(given) {
            Some(claim) => claims::fault(machine, claim),
            None => machine
                .objects
                .compare(&given.object.value)
                .err()
                .map(|error| error.to_string()),
        };
        lines.extend(fault.map(|fault| format!("{}{fault}", given.prefix)));
    }
    match lines.is_empty() {
        true => Ok(()),
        false => Err(Failure::Manifest(lines)),
    }
}

/// systemd, if an object needs it.
fn systemd_for(given: &[Given]) -> Result<Option<Systemd>, Failure> {
    let needs = given.iter().filter_map(Given::key).any(|key| {
        matches!(
            key.kind,
            Kind::VirtualMachine | Kind::VirtualMachineInstance | Kind::DataVolume
        )
    });
    match needs {
        true => {
            let systemd = Systemd::find()?;
            if systemd.is_user() && !lingers() {
                note(
                    "VMs of this user end with the last session, and do not start at boot: `loginctl enable-linger` changes that",
                );
            }
            Ok(Some(systemd))
        }
        false => Ok(Systemd::find().ok()),
    }
}

/// True if the user's systemd runs without a session.
fn lingers() -> bool {
    let user = std::env::var("USER").unwrap_or_default();
    !user.is_empty()
        && std::path::Path::new("/var/lib/systemd/linger")
            .join(user)
            .exists()
}

/// The VMs among the objects, expanded with the objects of the store and the other given ones.
///
/// # Errors
/// A line for each wrong field, before anything is stored.
pub(crate) fn checked_vms(machine: &Machine, given: &[Given]) -> Result<Vec<(Key, ExpandedVm)>, Failure> {
    let stored = machine.read()?;
    let new: Vec<Object> = given.iter().map(|given| given.object.clone()).collect();
    let known = machine.known(&stored, &new)?;
    let (mut vms, mut lines, mut names) = (Vec::new(), Vec::new(), Vec::new());
    for given in given {
        let Some(key) = given.key() else { continue };
        if names.contains(&key) {
            lines.push(format!("{}there are two objects {key}", given.prefix));
        }
        names.push(key.clone());
        if Systemd::vm_unit(&vm::name(&key)).len() > MAX_UNIT {
            lines.push(format!(
                "{}metadata.name: it is too long, together with the namespace",
                given.prefix
            ));
        }
        if !KINDS.contains(&key.kind) {
            continue;
        }
        let other = vm::keys(&vm::name(&key)).into_iter().find(|other| *other != key);
        if let Some(other) = other.filter(|other| stored.get(other).is_some() || names.contains(other)) {
            lines.push(format!(
                "{}metadata.name: {other} exists, and one VM has a name: choose another, or delete that",
                given.prefix
            ));
        }
        match expanded(&given.object, &known) {
            Ok(expanded) => {
                for text in husk_vmi::notes(&expanded.vmi) {
                    note(&format!("{}{text}", given.prefix));
                }
                vms.push((key, expanded));
            }
            Err(errors) => lines.extend(errors.iter().map(|error| format!("{}{error}", given.prefix))),
        }
    }
    match lines.is_empty() {
        true => Ok(vms),
        false => Err(Failure::Manifest(lines)),
    }
}

/// Stores the objects: what VMs need comes before them.
fn apply_objects(machine: &Machine, given: &[Given]) -> Result<Vec<Applied>, Failure> {
    let mut all = Vec::new();
    for kind in Kind::ALL {
        for given in given
            .iter()
            .filter(|given| given.key().is_some_and(|key| key.kind == kind))
        {
            let applied = machine.objects.apply(&given.object.value)?;
            report(&applied);
            all.push(applied);
        }
    }
    Ok(all)
}

/// Prints what was done, as kubectl does.
fn report(applied: &Applied) {
    let outcome = match applied.outcome {
        Outcome::Created => "created",
        Outcome::Configured => "configured",
        Outcome::Unchanged => "unchanged",
    };
    let _ = crate::output::print(&format!(
        "{} {outcome}\n",
        one_line(&applied.object.key.to_string())
    ));
}

/// `husk import-volume`, which systemd runs to fill a volume.
#[derive(Debug, clap::Args)]
pub(crate) struct ImportArgs {
    /// NAMESPACE:NAME of the DataVolume
    #[arg(value_parser = instance)]
    volume: VmRef,
}

/// Parses the instance of a unit.
pub(super) fn instance(text: &str) -> Result<VmRef, String> {
    crate::machine::systemd::instance(text).ok_or_else(|| "expected NAMESPACE:NAME".to_owned())
}

pub(super) fn run_import(args: &ImportArgs) -> Result<(), Failure> {
    use sd_notify::{NotifyState, notify};
    let machine = Machine::locate()?;
    let _ = notify(&[NotifyState::Ready]);
    let objects = machine.objects.read_kinds(&Kind::NEEDED)?;
    let mut report = |text: &str| {
        let _ = notify(&[NotifyState::Status(&one_line(text))]);
    };
    crate::machine::import(&machine, &objects, &args.volume, &mut report).map_err(|error| {
        let _ = notify(&[NotifyState::Status(&one_line(&error.text))]);
        Failure::Runtime(error.text)
    })
}
