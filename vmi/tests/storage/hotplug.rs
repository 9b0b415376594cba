//! Volumes that are plugged into a VM that runs.

use super::planned;
use husk_vmi::{
    CacheMode, Controller, DiskPlan, DiskSource, NewVolume, PlugError, PlugPlan, ScsiAddress, VmPlan,
};
use serde_json::json;

fn volume(name: &str, path: &str) -> NewVolume {
    NewVolume {
        name: name.into(),
        source: DiskSource::File(path.into()),
        ..NewVolume::default()
    }
}

fn vm() -> VmPlan {
    planned(&[]).unwrap()
}

/// Plugs a volume at a LUN of target 0, as a VMM would.
fn plug(vm: &mut VmPlan, volume: &NewVolume, lun: u16) -> DiskPlan {
    let PlugPlan::New(mut disk) = vm.plug(volume).unwrap() else {
        panic!("it is new")
    };
    disk.assign(ScsiAddress { target: 0, lun });
    vm.disks.push(*disk.clone());
    *disk
}

#[test]
fn a_volume_is_named_after_its_lun_and_has_its_name_as_serial() {
    let mut vm = vm();
    let PlugPlan::New(disk) = vm.plug(&volume("one", "/one")).unwrap() else {
        panic!("it is new")
    };
    assert_eq!(
        (disk.controller, disk.scsi_address()),
        (Controller::VirtioScsiUnassigned, None)
    );
    for (name, lun, target) in [("one", 0, "sda"), ("two", 1, "sdb"), ("three", 26, "sdaa")] {
        let disk = plug(&mut vm, &volume(name, &format!("/{name}")), lun);
        assert_eq!((&disk.target[..], disk.serial.as_deref()), (target, Some(name)));
        assert_eq!(disk.scsi_address(), Some(ScsiAddress { target: 0, lun }));
    }
}

#[test]
fn the_same_volume_again_is_there_and_another_is_refused() {
    let mut vm = vm();
    let asked = volume("data", "/data");
    let disk = plug(&mut vm, &asked, 3);
    assert_eq!(vm.plug(&asked), Ok(PlugPlan::Present(Box::new(disk))));
    let taken = Err(PlugError::NameTaken("data".into()));
    for change in [
        |volume: &mut NewVolume| volume.source = DiskSource::File("/other".into()),
        |volume: &mut NewVolume| volume.serial = "S".into(),
        |volume: &mut NewVolume| volume.read_only = true,
        |volume: &mut NewVolume| volume.cache = CacheMode::None,
    ] {
        let mut other = asked.clone();
        change(&mut other);
        assert_eq!(vm.plug(&other), taken);
    }
    assert_eq!(
        vm.plug(&volume("root", "/other")).unwrap_err().to_string(),
        "Unable to add volume [root] because volume with that name already exists"
    );
    assert_eq!(
        vm.plug(&volume("more", "/data")).unwrap_err().to_string(),
        "Unable to add volume source [/data] because it already exists"
    );
}

#[test]
fn a_volume_of_a_drives_name_is_its_disc() {
    let disks = json!([
        {"name": "root", "disk": {"bus": "virtio"}},
        {"name": "cd", "cdrom": {"bus": "scsi"}, "serial": "S"},
    ]);
    let mut vm = planned(&[("domain/devices/disks", disks)]).unwrap();
    let empty = vm.disks.last().unwrap().clone();
    assert!(empty.is_empty_drive());
    let asked = volume("cd", "/cd.iso");
    let PlugPlan::Disc(loaded) = vm.plug(&asked).unwrap() else {
        panic!("it is a disc")
    };
    let disc = DiskPlan {
        source: asked.source.clone(),
        ..empty.clone()
    };
    assert_eq!(*loaded, disc);
    *vm.disks.last_mut().unwrap() = *loaded;
    assert_eq!(vm.plug(&asked), Ok(PlugPlan::Present(Box::new(disc))));
    let taken = Err(PlugError::NameTaken("cd".into()));
    assert_eq!(vm.plug(&volume("cd", "/other.iso")), taken);
    let elsewhere = vm.plug(&volume("more", "/cd.iso"));
    assert_eq!(elsewhere, Err(PlugError::SourceTaken("/cd.iso".into())));
    vm.disks.last_mut().unwrap().eject();
    assert_eq!(vm.disks.last(), Some(&empty));
}

#[test]
fn unsuitable_volumes_are_not_plugged() {
    let vm = vm();
    for name in ["", "A", "-a", "a/b", &"a".repeat(64)] {
        assert!(matches!(vm.plug(&volume(name, "/a")), Err(PlugError::Name(..))));
    }
    let relative = vm.plug(&volume("a", "b"));
    assert_eq!(relative.unwrap_err(), PlugError::Path("b".into()));
    for serial in ["a b", &"s".repeat(257)] {
        let mut volume = volume("a", "/a");
        volume.serial = serial.into();
        assert!(matches!(vm.plug(&volume), Err(PlugError::Serial(_))));
    }
    let without = planned(&[
        ("domain/devices/disableHotplug", json!(true)),
        ("domain/devices/disks/0/disk/bus", json!("virtio")),
    ]);
    assert_eq!(
        without.unwrap().plug(&volume("a", "/a")),
        Err(PlugError::Disabled)
    );
}
