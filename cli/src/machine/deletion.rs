//! Deletes objects with what belongs to them. A deletion that was cut off is ended by the next command.

use std::time::Duration;

use husk_claims::ClaimError;
use husk_objects::{Key, Kind, ObjectError, Objects, StoredObject};

use super::systemd::Systemd;
use super::{FirstStart, Machine, data_volume, vm};
use crate::failure::{Failure, note};

/// Interval of looking whether a VM has ended.
const LOOK: Duration = Duration::from_millis(200);

/// Deletes an object, and waits until nothing of it is left: a VM is shut down, and its DataVolumes go with it; the
/// claim of a DataVolume goes with that.
///
/// # Errors
/// A running VM uses the data, or the store cannot be written.
pub(crate) fn delete(machine: &Machine, systemd: Option<Systemd>, key: &Key) -> Result<(), Failure> {
    match machine.objects.get(key) {
        Ok(object) => {
            // Once the deletion has begun, later commands end it.
            check(machine, systemd, &object)?;
            end(machine, systemd, &machine.objects.begin_deletion(key)?)
        }
        Err(ObjectError::Damaged { .. }) => {
            stop(systemd, key)?;
            FirstStart::of(machine, key).clear()?;
            machine.objects.remove(key)?;
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// Fails if an object cannot be deleted now.
fn check(machine: &Machine, systemd: Option<Systemd>, object: &StoredObject) -> Result<(), Failure> {
    let name = vm::name(&object.key);
    match object.key.kind {
        Kind::VirtualMachine | Kind::VirtualMachineInstance => reach(systemd).map(drop),
        Kind::DataVolume if data_volume::owns_claim(machine, object) => {
            match machine.claims.get(&name.namespace, &name.name)?.in_use {
                true => Err(ClaimError::InUse(name.to_string()).into()),
                false => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

/// The manager that may run VMs; none if systemd is not this machine's init.
///
/// # Errors
/// There is one that cannot be reached from here.
fn reach(systemd: Option<Systemd>) -> Result<Option<Systemd>, Failure> {
    match systemd {
        None if Systemd::is_init() => Systemd::find().map(Some),
        found => Ok(found),
    }
}

/// Ends the deletions that were begun, and removes what power cuts have left.
pub(crate) fn finish_deletions(machine: &Machine, systemd: Option<Systemd>) -> Result<(), Failure> {
    machine.objects.remove_leftovers()?;
    let objects = machine.objects.read()?;
    for object in objects.objects.iter().filter(|object| object.is_deleting()) {
        if let Err(Failure::Runtime(text)) = end(machine, systemd, object) {
            note(&format!("{}: its deletion is not complete: {text}", object.key));
        }
    }
    remove_orphaned_imports(machine, &objects);
    Ok(())
}

fn end(machine: &Machine, systemd: Option<Systemd>, object: &StoredObject) -> Result<(), Failure> {
    match object.key.kind {
        Kind::VirtualMachine | Kind::VirtualMachineInstance => {
            stop(systemd, &object.key)?;
            FirstStart::of(machine, &object.key).clear()?;
            for owned in machine
                .objects
                .read_kinds(|kind| kind == Kind::DataVolume)?
                .objects
            {
                if owned.is_owned_by(object.uid()) && owned.key.namespace == object.key.namespace {
                    delete(machine, systemd, &owned.key)?;
                }
            }
        }
        Kind::DataVolume => {
            let name = vm::name(&object.key);
            if let Some(systemd) = systemd {
                systemd.stop_import(&name)?;
            }
            machine.claims.abandon_import(&name.namespace, &name.name)?;
            if data_volume::owns_claim(machine, object) {
                match machine.claims.remove(&name.namespace, &name.name) {
                    Ok(()) | Err(ClaimError::Unknown(_)) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        _ => {}
    }
    match machine.objects.remove(&object.key) {
        // Another command was faster.
        Ok(()) | Err(ObjectError::NotFound(_)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Shuts a VM down, so that it does not start again, and waits for its end.
fn stop(systemd: Option<Systemd>, key: &Key) -> Result<(), Failure> {
    if !key.kind.is_vm() {
        return Ok(());
    }
    let Some(systemd) = reach(systemd)? else {
        return Ok(());
    };
    let name = vm::name(key);
    systemd.enable(&name, false)?;
    systemd.stop(&name)?;
    loop {
        let unit = systemd.vm(&name)?;
        if !unit.runs() && !unit.is_stopping() {
            systemd.forget(&name);
            return Ok(());
        }
        std::thread::sleep(LOOK);
    }
}

/// Removes what imports have left whose DataVolumes are gone.
fn remove_orphaned_imports(machine: &Machine, objects: &Objects) {
    for (namespace, name) in machine.claims.imports() {
        if objects
            .get(&Key::new(Kind::DataVolume, &namespace, &name))
            .is_none()
        {
            // It fails while a process fills the volume.
            let _ = machine.claims.abandon_import(&namespace, &name);
        }
    }
}
