//! `husk apply`.

mod claims;
pub(crate) mod files;
mod machines;
pub(crate) mod wait;

use std::path::PathBuf;

use husk_monitor::state::RuntimeDir;
use husk_objects::{Applied, Key, Kind, ObjectError, Outcome};
use husk_vmi::objects::{Object, ObjectKind, PersistentVolumeClaim};
use serde_json::Value;

use crate::failure::{Failure, RUNTIME, one_line, print_warning};
use crate::machine::systemd::Systemd;
use crate::machine::vm::{ExpandedVm, expanded};
use crate::machine::{LocalStores, finish_deletions, store_templates, unit, vm};
use crate::vm_ref::{self, VmRef};
use files::InputObject;
use machines::Reconciled;
use wait::Waits;

/// Longest name of a unit, and of a file.
const MAX_UNIT: usize = 255;
/// Maximum that instance types and preferences may add to all VMs of a call, in bytes of JSON. They are in memory once
/// for each VM, and take a multiple of this there.
const MAX_ADDED: usize = 4 << 20;

/// Create or change the objects of manifests, and run their VMs
///
/// Takes VirtualMachines, VirtualMachineInstances, Secrets, ConfigMaps, PersistentVolumeClaims, DataVolumes,
/// instance types and preferences. They are kept in the data directory, as manifests that can be read and edited.
/// systemd keeps the VMs running as their run strategies say, also after a boot of this machine; images are pulled and
/// volumes are filled. A change takes effect in the running VM; if it needs a restart, a warning says so.
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
    let stores = LocalStores::locate()?;
    let vms = checked_vms(&stores, &given)?;
    let systemd = systemd_for(&given)?;
    finish_deletions(&stores, systemd)?;
    check(&stores, &given, &vms)?;
    apply_claims(&stores, &given)?;
    if let Some(systemd) = systemd {
        machines::mark_starts(&stores, systemd, &given)?;
    }
    let mut applied = apply_objects(&stores, &given)?;
    let (templates, stored) = templates(&stores, &applied, &vms);
    let new = templates
        .iter()
        .filter(|applied| applied.outcome != Outcome::Unchanged);
    new.for_each(report);
    applied.extend(templates);
    if let Some(systemd) = systemd {
        // Only the deletion of the last VM removes the file, so DataVolumes alone must not write it.
        if !vms.is_empty() {
            unit::install(systemd)?;
        }
        start(args, &stores, systemd, &RuntimeDir::locate()?, &applied, &vms)?;
    }
    stored
}

/// Stores the DataVolumes of VMs' templates. An error is reported at once and makes the result an error, but the other
/// VMs go on.
fn templates(
    stores: &LocalStores,
    applied: &[Applied],
    vms: &[(Key, ExpandedVm)],
) -> (Vec<Applied>, Result<(), Failure>) {
    let (mut templates, mut done) = (Vec::new(), Ok(()));
    for Applied { object, before, .. } in applied {
        let Some((_, vm)) = vms.iter().find(|(key, _)| *key == object.key) else {
            continue;
        };
        match store_templates(stores, object, before.as_ref(), vm) {
            Ok(stored) => templates.extend(stored),
            Err(failure) => {
                failure.report();
                done = Err(Failure::Ended(RUNTIME));
            }
        }
    }
    (templates, done)
}

/// Fills the volumes of DataVolumes, brings VMs to what their objects say, and waits for both.
fn start(
    args: &Args,
    stores: &LocalStores,
    systemd: Systemd,
    runtime: &RuntimeDir,
    applied: &[Applied],
    vms: &[(Key, ExpandedVm)],
) -> Result<(), Failure> {
    let mut waits = Waits::default();
    let mut failed = false;
    let mut fail = |failure: Failure| {
        failure.report();
        failed = true;
    };
    for applied in applied {
        let object = &applied.object;
        let name = vm::name(&object.key);
        if object.key.kind == Kind::DataVolume && !stores.claims.has(&name.namespace, &name.name) {
            let before = applied.before.as_ref();
            // An import that runs has read the DataVolume as it was.
            let stopped = match before.is_some_and(|before| before["spec"] != object.value()["spec"]) {
                true => systemd.stop_import(&name),
                false => Ok(()),
            };
            match stopped.and_then(|()| start_import(systemd, &name)) {
                Ok(()) => waits.volumes.push(name),
                // VMs start all the same, and fill their volumes themselves.
                Err(failure) => fail(failure),
            }
        }
    }
    let mut running = Vec::new();
    for applied in applied {
        let key = &applied.object.key;
        let Some((_, expanded)) = vms.iter().find(|(of_vm, _)| of_vm == key) else {
            continue;
        };
        let name = vm::name(key);
        match machines::reconcile(stores, systemd, runtime, applied) {
            Ok(Reconciled::Starts) => waits.vms.push(name),
            Ok(Reconciled::Restarts(pid)) => waits.restart(name, pid),
            Ok(Reconciled::Stops) => waits.stops.push(name),
            Ok(Reconciled::Syncs) => running.push((applied, expanded)),
            Ok(Reconciled::Nothing) => {}
            Err(failure) => fail(failure),
        }
    }
    let mut later = Vec::new();
    for (applied, expanded) in running {
        match sync_or_fill(stores, systemd, &mut waits, applied, expanded) {
            Ok(unfilled) if unfilled.is_empty() => {}
            Ok(unfilled) => later.push((applied, expanded, unfilled)),
            Err(failure) => fail(failure),
        }
    }
    if args.no_wait {
        for (applied, _, unfilled) in later {
            let name = vm::name(&applied.object.key);
            for volume in unfilled {
                print_warning(&format!(
                    "{name} does not change yet, because the volume {volume} is being filled: apply again when it is"
                ));
            }
        }
    } else {
        if let Err(failure) = waits.wait(stores, systemd) {
            fail(failure);
        }
        for (applied, expanded, _) in later {
            if let Err(failure) = machines::sync_later(stores, runtime, applied, expanded) {
                fail(failure);
            }
        }
    }
    match failed {
        true => Err(Failure::Ended(RUNTIME)),
        false => Ok(()),
    }
}

/// Changes a running VM as its object says. If volumes of it are not filled yet, starts their imports instead, and
/// returns them.
fn sync_or_fill(
    stores: &LocalStores,
    systemd: Systemd,
    waits: &mut Waits,
    applied: &Applied,
    expanded: &ExpandedVm,
) -> Result<Vec<VmRef>, Failure> {
    let unfilled = machines::unfilled(stores, &vm::name(&applied.object.key), expanded)?;
    if unfilled.is_empty() {
        machines::sync(stores, applied, expanded)?;
    }
    for volume in &unfilled {
        if !waits.volumes.contains(volume) {
            start_import(systemd, volume)?;
            waits.volumes.push(volume.clone());
        }
    }
    Ok(unfilled)
}

/// Starts the unit that fills a volume, unless it runs.
fn start_import(systemd: Systemd, volume: &VmRef) -> Result<(), Failure> {
    match systemd.start_import(volume, &unit::program()?) {
        Err(failure) if !systemd.import(volume)?.runs() => Err(failure),
        _ => Ok(()),
    }
}

fn claim(given: &InputObject) -> Option<&PersistentVolumeClaim> {
    match &given.object.kind {
        ObjectKind::PersistentVolumeClaim(claim) => Some(claim),
        _ => None,
    }
}

/// Checks that all objects can be stored, before one is. Prints the warnings of those that change.
fn check(stores: &LocalStores, given: &[InputObject], vms: &[(Key, ExpandedVm)]) -> Result<(), Failure> {
    let mut lines = Vec::new();
    for given in given {
        let line = |text: &dyn std::fmt::Display| format!("{}{text}", given.prefix);
        let changes = match claim(given) {
            Some(claim) => {
                lines.extend(claims::fault(stores, claim).map(|fault| line(&fault)));
                true
            }
            None => match stores.objects.compare(&given.object.value) {
                Ok(applied) => applied.outcome != Outcome::Unchanged,
                // Nothing is wrong with the manifest.
                Err(error @ (ObjectError::Deleting(_) | ObjectError::Io { .. })) => return Err(error.into()),
                Err(error) => {
                    lines.push(line(&error));
                    false
                }
            },
        };
        if changes {
            let vm = vms.iter().find(|(key, _)| given.key().as_ref() == Some(key));
            let of_vm = vm.map(|(_, vm)| husk_vmi::warnings(&vm.vmi)).unwrap_or_default();
            for text in given.object.warnings.iter().chain(&of_vm) {
                print_warning(&line(text));
            }
        }
    }
    match lines.is_empty() {
        true => Ok(()),
        false => Err(Failure::Manifest(lines)),
    }
}

/// systemd, if an object needs it.
fn systemd_for(given: &[InputObject]) -> Result<Option<Systemd>, Failure> {
    let needs = given.iter().filter_map(InputObject::key).any(|key| {
        matches!(
            key.kind,
            Kind::VirtualMachine | Kind::VirtualMachineInstance | Kind::DataVolume
        )
    });
    match needs {
        true => {
            let systemd = Systemd::find()?;
            if systemd.is_user() && !lingers() {
                print_warning(
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
pub(crate) fn checked_vms(
    stores: &LocalStores,
    given: &[InputObject],
) -> Result<Vec<(Key, ExpandedVm)>, Failure> {
    let stored = stores.read()?;
    let new: Vec<Object> = given.iter().map(|given| given.object.clone()).collect();
    let known = stores.known(&stored, &new)?;
    let (mut vms, mut lines, mut names) = (Vec::new(), Vec::new(), Vec::new());
    let mut added = 0;
    for given in given {
        let Some(key) = given.key() else { continue };
        if names.contains(&key) {
            lines.push(format!("{}there are two objects {key}", given.prefix));
        }
        names.push(key.clone());
        let too_long = |field: &str| {
            format!(
                "{}{field}: it is too long, together with the namespace",
                given.prefix
            )
        };
        if unit_name(&key).len() > MAX_UNIT {
            lines.push(too_long("metadata.name"));
        }
        if !key.kind.is_vm() {
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
                for (index, volume) in expanded.data_volumes.iter().enumerate() {
                    let key = Key::new(Kind::DataVolume, &key.namespace, &volume.metadata.name);
                    if unit_name(&key).len() > MAX_UNIT {
                        lines.push(too_long(&format!(
                            "spec.dataVolumeTemplates[{index}].metadata.name"
                        )));
                    }
                }
                added += added_to(&given.object, &expanded);
                if added > MAX_ADDED {
                    lines.push(format!(
                        "{}spec.template: instance types and preferences add more than {} MiB to this VM and those \
                         before it: shorten their annotations, or apply fewer VMs at once",
                        given.prefix,
                        MAX_ADDED >> 20
                    ));
                    break;
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

/// Name of the unit of an object. Objects without one have the limit of a VM's.
fn unit_name(key: &Key) -> String {
    let name = vm::name(key);
    match key.kind {
        Kind::DataVolume => Systemd::import_unit(&name),
        _ => Systemd::vm_unit(&name),
    }
}

/// Bytes of JSON that an expanded VM has more than its object.
fn added_to(object: &Object, expanded: &ExpandedVm) -> usize {
    let size = |value: &Value| serde_json::to_vec(value).map_or(0, |json| json.len());
    size(&expanded.manifest).saturating_sub(size(&object.value))
}

/// Makes and changes the claims.
fn apply_claims(stores: &LocalStores, given: &[InputObject]) -> Result<(), Failure> {
    let claims = given
        .iter()
        .filter_map(|given| Some((given.prefix.as_str(), claim(given)?)));
    for (prefix, claim) in claims::ordered(claims.collect()) {
        claims::apply(stores, prefix, claim)?;
    }
    Ok(())
}

/// Stores the objects: what VMs need comes before them.
fn apply_objects(stores: &LocalStores, given: &[InputObject]) -> Result<Vec<Applied>, Failure> {
    let mut all = Vec::new();
    for kind in Kind::ALL {
        for given in given
            .iter()
            .filter(|given| given.key().is_some_and(|key| key.kind == kind))
        {
            let applied = stores.objects.apply(&given.object.value)?;
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

#[cfg(test)]
mod tests;
