//! `husk delete`.

use std::path::PathBuf;

use husk_objects::{Key, Kind, ObjectError};
use husk_vmi::objects::ObjectKind;

use super::apply::files;
use crate::failure::{Failure, RUNTIME, one_line};
use crate::machine::systemd::{Systemd, Unit, Units};
use crate::machine::{LocalStores, delete, finish_deletions, unit};
use crate::output;
use crate::vm_ref::{self, DEFAULT_NAMESPACE};

/// Delete objects, by their manifests or by kind and name
///
/// A running VM is shut down first, within its grace period. Its dataVolumeTemplates go with it, with their data; other
/// volumes stay until they are deleted themselves. Returns when nothing is left.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if all objects are gone, 1 if one does not exist (without
--ignore-not-found) or could not be deleted.

Examples:
  husk delete -f vm.yaml
  husk delete vm demo other
  husk delete pvc data -n test")]
pub(crate) struct Args {
    /// KIND and NAMES of the objects, such as: vm demo
    #[arg(value_name = "KIND NAME", num_args = 2.., required_unless_present = "files")]
    names: Vec<String>,

    /// A manifest, or a folder of manifests; `-` reads stdin
    #[arg(short, long = "filename", value_name = "FILE|DIR", conflicts_with = "names", value_hint = clap::ValueHint::AnyPath)]
    files: Vec<PathBuf>,

    /// Namespace of the objects
    #[arg(short, long, value_name = "NAMESPACE", value_parser = vm_ref::namespace)]
    namespace: Option<String>,

    /// Objects that do not exist are no error
    #[arg(long)]
    ignore_not_found: bool,
}

/// An object or claim to delete.
enum Target {
    Object(Key),
    /// Namespace and name of a claim.
    Claim(String, String),
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let stores = LocalStores::locate()?;
    let targets = match args.files.is_empty() {
        true => named(args)?,
        false => of_files(args)?,
    };
    let systemd = Systemd::find().ok();
    finish_deletions(&stores, systemd)?;
    let mut done = Ok(());
    for target in &targets {
        let (name, deleted) = match target {
            Target::Object(key) => (key.to_string(), delete(&stores, systemd, key)),
            Target::Claim(namespace, name) => {
                let space = if namespace == DEFAULT_NAMESPACE {
                    ""
                } else {
                    &format!("{namespace}/")
                };
                let removed = stores.claims.remove(namespace, name).map_err(Failure::from);
                (format!("persistentvolumeclaim/{space}{name}"), removed)
            }
        };
        match deleted {
            Ok(()) => output::print(&format!("{} deleted\n", one_line(&name)))?,
            Err(_) if args.ignore_not_found && !exists(&stores, target) => {}
            Err(failure) => {
                failure.report();
                done = Err(Failure::Ended(RUNTIME));
            }
        }
    }
    if let Some(systemd) = systemd
        && was_last(&stores, &targets, || systemd.units())?
    {
        unit::remove(systemd)?;
    }
    done
}

/// True if a VM was deleted, and no other needs the unit file, which VMs of several data directories share.
fn was_last(
    stores: &LocalStores,
    targets: &[Target],
    units: impl FnOnce() -> Result<Units, Failure>,
) -> Result<bool, Failure> {
    let deletes_vm = targets
        .iter()
        .any(|target| matches!(target, Target::Object(key) if key.kind.is_vm()));
    if !deletes_vm || has_vm(stores)? {
        return Ok(false);
    }
    let needs = |unit: &Unit| unit.runs() || unit.is_stopping() || unit.has_job || unit.enabled;
    Ok(!units()?.vms.values().any(needs))
}

/// True if a VM of `husk apply` is left that needs the unit file. One whose file cannot be read may run.
fn has_vm(stores: &LocalStores) -> Result<bool, Failure> {
    let vms = stores.objects.read_kinds(Kind::is_vm)?;
    Ok(!vms.objects.is_empty() || !vms.damaged.is_empty())
}

fn exists(stores: &LocalStores, target: &Target) -> bool {
    match target {
        Target::Object(key) => !matches!(stores.objects.get(key), Err(ObjectError::NotFound(_))),
        Target::Claim(namespace, name) => stores.claims.has(namespace, name),
    }
}

/// The objects of `KIND NAME…`.
fn named(args: &Args) -> Result<Vec<Target>, Failure> {
    let namespace = args.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
    let Some((word, names)) = args.names.split_first() else {
        return Ok(Vec::new());
    };
    let claim = is_claim(word);
    let kind = Kind::of_word(word);
    if kind.is_none() && !claim {
        return Err(Failure::Usage(unknown_kind(word)));
    }
    names
        .iter()
        .map(|name| {
            let name = format!("{namespace}/{name}")
                .parse::<vm_ref::VmRef>()
                .map_err(Failure::Usage)?;
            Ok(match kind {
                Some(kind) => Target::Object(Key::new(kind, &name.namespace, &name.name)),
                None => Target::Claim(name.namespace, name.name),
            })
        })
        .collect()
}

/// True for the words of a PersistentVolumeClaim.
pub(super) fn is_claim(word: &str) -> bool {
    let word = word.to_ascii_lowercase();
    matches!(
        word.as_str(),
        "pvc" | "persistentvolumeclaim" | "persistentvolumeclaims"
    )
}

pub(super) fn unknown_kind(word: &str) -> String {
    format!(
        "there are no objects of the kind {word:?}: the kinds are vm, vmi, dv, pvc, secret, configmap, \
         virtualmachineinstancetype, virtualmachinepreference and their cluster-wide ones"
    )
}

/// The objects of `-f`, VMs first: their data is in use until they have ended.
fn of_files(args: &Args) -> Result<Vec<Target>, Failure> {
    let given = files::read(&args.files, args.namespace.as_deref())?;
    let mut objects: Vec<Key> = given.iter().filter_map(files::InputObject::key).collect();
    objects.sort_by_key(|key| Kind::ALL.iter().rev().position(|kind| *kind == key.kind));
    let claims = given.iter().filter_map(|given| match &given.object.kind {
        ObjectKind::PersistentVolumeClaim(claim) => Some(Target::Claim(
            claim.metadata.namespace.clone(),
            claim.metadata.name.clone(),
        )),
        _ => None,
    });
    Ok(objects.into_iter().map(Target::Object).chain(claims).collect())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_vm_whose_file_is_damaged_keeps_its_unit_file() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let damage = |kind| {
            let file = stores.objects.file(&Key::new(kind, "default", "broken"));
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "kind:").unwrap();
        };
        damage(Kind::Secret);
        assert!(!has_vm(&stores).unwrap());
        damage(Kind::VirtualMachineInstance);
        assert!(has_vm(&stores).unwrap());
    }

    #[test]
    fn vms_of_another_data_directory_keep_the_unit_file() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let target = |kind| [Target::Object(Key::new(kind, "default", "demo"))];
        let was_last = |kind, unit: Unit| {
            let units = || {
                let vms = [("other".parse().unwrap(), unit)].into();
                Ok(Units {
                    vms,
                    ..Units::default()
                })
            };
            was_last(&stores, &target(kind), units).unwrap()
        };
        let unit = |active: &str, enabled| Unit {
            active: active.to_owned(),
            enabled,
            ..Unit::default()
        };
        for (active, enabled, expected) in [
            ("active", false, false),
            ("deactivating", false, false),
            ("inactive", true, false),
            ("inactive", false, true),
            ("failed", false, true),
        ] {
            let last = was_last(Kind::VirtualMachine, unit(active, enabled));
            assert_eq!(last, expected, "{active} {enabled}");
        }
        assert!(!was_last(Kind::Secret, Unit::default()));
    }
}
