//! Volumes that are plugged into a VM that runs.

use super::planned;
use husk_vmi::{CacheMode, Controller, DiskSource, NewVolume, PlugError, PlugPlan, ScsiAddress, VmPlan};
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

#[test]
fn a_volume_takes_the_lowest_free_lun_and_its_name_as_serial() {
    let mut vm = vm();
    let mut names = Vec::new();
    for name in ["one", "two"] {
        match vm.plug(&volume(name, &format!("/{name}")), &[]).unwrap() {
            PlugPlan::New(disk) => {
                names.push((disk.target.clone(), disk.serial.clone().unwrap()));
                vm.disks.push(*disk);
            }
            other => panic!("{other:?}"),
        }
    }
    let wanted = [("sda", "one"), ("sdb", "two")].map(|(target, name)| (target.into(), name.into()));
    assert_eq!(names, wanted);

    vm.disks.retain(|disk| disk.name != "one");
    let free = ScsiAddress { target: 0, lun: 0 };
    for (avoid, lun) in [(&[][..], 0), (&[free][..], 2)] {
        match vm.plug(&volume("three", "/three"), avoid).unwrap() {
            PlugPlan::New(disk) => {
                assert_eq!(
                    disk.controller,
                    Controller::VirtioScsi(ScsiAddress { target: 0, lun })
                );
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn the_same_volume_again_is_there_and_another_is_refused() {
    let mut vm = vm();
    let asked = volume("data", "/data");
    let PlugPlan::New(disk) = vm.plug(&asked, &[]).unwrap() else {
        panic!("it is new")
    };
    vm.disks.push(*disk.clone());
    assert_eq!(vm.plug(&asked, &[]), Ok(PlugPlan::Present(disk)));
    let taken = Err(PlugError::NameTaken("data".into()));
    for change in [
        |volume: &mut NewVolume| volume.source = DiskSource::File("/other".into()),
        |volume: &mut NewVolume| volume.serial = "S".into(),
        |volume: &mut NewVolume| volume.read_only = true,
        |volume: &mut NewVolume| volume.cache = CacheMode::None,
    ] {
        let mut other = asked.clone();
        change(&mut other);
        assert_eq!(vm.plug(&other, &[]), taken);
    }
    assert_eq!(
        vm.plug(&volume("root", "/other"), &[]).unwrap_err().to_string(),
        "Unable to add volume [root] because volume with that name already exists"
    );
    assert_eq!(
        vm.plug(&volume("more", "/data"), &[]).unwrap_err().to_string(),
        "Unable to add volume source [/data] because it already exists"
    );
}

#[test]
fn what_cannot_be_plugged_is_refused() {
    let vm = vm();
    for name in ["", "A", "-a", "a/b", &"a".repeat(64)] {
        assert!(matches!(
            vm.plug(&volume(name, "/a"), &[]),
            Err(PlugError::Name(..))
        ));
    }
    let relative = vm.plug(&volume("a", "b"), &[]);
    assert_eq!(relative.unwrap_err(), PlugError::Path("b".into()));
    for serial in ["a b", &"s".repeat(257)] {
        let mut volume = volume("a", "/a");
        volume.serial = serial.into();
        assert!(matches!(vm.plug(&volume, &[]), Err(PlugError::Serial(_))));
    }
    let all: Vec<ScsiAddress> = (0..ScsiAddress::LUNS)
        .map(|lun| ScsiAddress { target: 0, lun })
        .collect();
    assert_eq!(vm.plug(&volume("a", "/a"), &all), Err(PlugError::Full));
    let without = planned(&[
        ("domain/devices/disableHotplug", json!(true)),
        ("domain/devices/disks/0/disk/bus", json!("virtio")),
    ]);
    assert_eq!(
        without.unwrap().plug(&volume("a", "/a"), &[]),
        Err(PlugError::Disabled)
    );
}
