use husk_proto::shim::v1::{Disk, Interface, VolumeStatus};

use super::*;
use crate::vmi::testing::scheduled;

const NOW: Timestamp = Timestamp::UNIX_EPOCH;

fn vmi(change: impl FnOnce(&mut Value)) -> Vmi {
    let mut vmi = scheduled("vm");
    vmi["status"]["phase"] = json!("Running");
    change(&mut vmi);
    Vmi(serde_json::from_value(vmi).unwrap())
}

fn running(change: impl FnOnce(&mut Status)) -> PodState {
    let mut status = Status {
        phase: Phase::Running.into(),
        ..Status::default()
    };
    change(&mut status);
    PodState::from(status)
}

fn new_status(vmi: &Vmi, state: &PodState, synced: Option<&SyncVmiResponse>) -> Value {
    let observed = Observed {
        state,
        synced,
        error: None,
        now: NOW,
    };
    next(vmi, &observed)
}

#[test]
fn phases_follow_the_vm() {
    let ended = |phase: Phase| {
        PodState::from(Status {
            phase: phase.into(),
            ..Status::default()
        })
    };
    for (present, state, expected) in [
        ("Scheduled", PodState::Waiting, "Scheduled"),
        ("Scheduled", running(|_| {}), "Running"),
        ("Scheduled", ended(Phase::Failed), "Failed"),
        ("Scheduled", PodState::Lost, "Failed"),
        ("Running", running(|status| status.paused = true), "Running"),
        ("Running", ended(Phase::Succeeded), "Succeeded"),
        ("Running", ended(Phase::Failed), "Failed"),
        ("Running", PodState::Waiting, "Failed"),
        ("Running", PodState::Unknown, "Running"),
        ("Scheduling", running(|_| {}), "Scheduling"),
        ("Succeeded", running(|_| {}), "Succeeded"),
        ("Failed", ended(Phase::Succeeded), "Failed"),
    ] {
        let vmi = vmi(|vmi| vmi["status"]["phase"] = json!(present));
        assert_eq!(phase(&vmi, &state), expected, "{present}, {state:?}");
    }
}

#[test]
fn same_state_gives_the_same_status() {
    let state = running(|status| {
        status.paused = true;
        status.disks = vec![Disk {
            name: "root".to_owned(),
            target: "vda".to_owned(),
            ..Disk::default()
        }];
    });
    let first = new_status(&vmi(|_| {}), &state, None);
    let again = vmi(|vmi| vmi["status"] = first.clone());
    let later = Observed {
        state: &state,
        synced: None,
        error: None,
        now: Timestamp::from_second(1_000_000).unwrap(),
    };
    assert_eq!(next(&again, &later), first);
}

#[test]
fn interfaces_keep_what_others_wrote_and_the_pods_network_is_first() {
    let vmi = vmi(|vmi| {
        vmi["spec"]["networks"] = json!([
            {"name": "lan", "multus": {"networkName": "lan"}},
            {"name": "default", "pod": {}},
        ]);
        vmi["status"]["interfaces"] = json!([
            {"name": "lan", "infoSource": "multus-status", "podInterfaceName": "pod7e0"},
            {"name": "later", "infoSource": "multus-status"},
        ]);
    });
    let interface = |name: &str, addresses: &[&str]| Interface {
        name: name.to_owned(),
        addresses: addresses.iter().map(ToString::to_string).collect(),
        queues: 2,
        ..Interface::default()
    };
    let state = running(|status| {
        status.interfaces = vec![
            interface("lan", &[]),
            interface("default", &["10.0.0.5", "fd00::5"]),
        ];
    });
    let interfaces = new_status(&vmi, &state, None)["interfaces"].clone();
    assert_eq!(
        interfaces,
        json!([
            {
                "name": "default", "mac": "", "queueCount": 2, "linkState": "down", "infoSource": "domain",
                "ipAddress": "10.0.0.5", "ipAddresses": ["10.0.0.5", "fd00::5"],
            },
            {
                "name": "lan", "mac": "", "queueCount": 2, "linkState": "down",
                "infoSource": "domain, multus-status", "podInterfaceName": "pod7e0",
            },
            {"name": "later", "infoSource": "multus-status"},
        ])
    );
}

#[test]
fn hotpluggable_volume_goes_through_its_phases() {
    let entry = |phase: &str| json!({"name": "data", "phase": phase, "target": "", "hotplugVolume": {}});
    let volume = json!({"name": "data", "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}});
    let attached = running(|status| {
        status.disks = vec![Disk {
            name: "data".to_owned(),
            target: "sda".to_owned(),
            ..Disk::default()
        }];
    });
    let reported = |phase: &str| SyncVmiResponse {
        volumes: vec![VolumeStatus {
            name: "data".to_owned(),
            phase: phase.to_owned(),
            ..VolumeStatus::default()
        }],
        ..SyncVmiResponse::default()
    };
    let detached = running(|_| {});
    let empty_drive = running(|status| {
        status.disks = vec![Disk {
            name: "data".to_owned(),
            target: "sda".to_owned(),
            bytes: Some(0),
            ..Disk::default()
        }];
    });
    let none = SyncVmiResponse::default();
    for (present, wanted, state, synced, expected) in [
        ("Bound", true, &detached, &none, "Bound"),
        (
            "AttachedToNode",
            true,
            &detached,
            &reported("MountedToPod"),
            "AttachedToNode",
        ),
        ("AttachedToNode", true, &attached, &reported("Ready"), "Ready"),
        ("MountedToPod", true, &attached, &reported("Ready"), "Ready"),
        ("Ready", true, &attached, &reported("Ready"), "Ready"),
        ("Ready", false, &attached, &reported("Detaching"), "Ready"),
        ("Ready", false, &detached, &reported("Detaching"), "Ready"),
        ("Ready", false, &detached, &none, "UnMountedFromPod"),
        (
            "Ready",
            false,
            &detached,
            &reported("UnMountedFromPod"),
            "UnMountedFromPod",
        ),
        ("Detaching", false, &detached, &none, "Detaching"),
        // The disc of a drive.
        ("AttachedToNode", true, &empty_drive, &none, "AttachedToNode"),
        ("Ready", false, &empty_drive, &none, "UnMountedFromPod"),
    ] {
        let vmi = vmi(|vmi| {
            if wanted {
                vmi["spec"]["volumes"]
                    .as_array_mut()
                    .unwrap()
                    .push(volume.clone());
            }
            vmi["status"]["volumeStatus"]
                .as_array_mut()
                .unwrap()
                .push(entry(present));
        });
        let status = new_status(&vmi, state, Some(synced));
        assert_eq!(
            status["volumeStatus"][1]["phase"], expected,
            "{present}, wanted: {wanted}"
        );
    }
}

#[test]
fn migration_method_is_that_of_the_volumes() {
    let shared = json!({"name": "a", "persistentVolumeClaimInfo": {"accessModes": ["ReadWriteMany"]}});
    let own = json!({"name": "b", "persistentVolumeClaimInfo": {"accessModes": ["ReadWriteOnce"]}});
    let method = |volumes: &[&Value]| volumes::migration_method(&json!({"volumeStatus": volumes}));
    assert_eq!(method(&[]), "LiveMigration");
    assert_eq!(method(&[&shared]), "LiveMigration");
    assert_eq!(method(&[&shared, &own]), "BlockMigration");
}
