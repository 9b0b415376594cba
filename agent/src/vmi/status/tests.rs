use husk_proto::shim::v1::{
    CredentialsState, Disk, GuestInterface, GuestOs, GuestState, Interface, VolumeStatus,
};

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
        syncing: false,
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
fn kill_without_a_grace_period_is_no_failure() {
    for (grace, reason, expected) in [
        (0, "Killed", "Succeeded"),
        (30, "Killed", "Failed"),
        (0, "GuestPanic", "Failed"),
    ] {
        let vmi = vmi(|vmi| vmi["spec"]["terminationGracePeriodSeconds"] = json!(grace));
        let state = PodState::from(Status {
            phase: Phase::Failed.into(),
            reason: reason.to_owned(),
            ..Status::default()
        });
        assert_eq!(phase(&vmi, &state), expected, "{grace}, {reason}");
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
        syncing: false,
        error: None,
        now: Timestamp::from_second(1_000_000).unwrap(),
    };
    assert_eq!(next(&again, &later), first);
}

#[test]
fn vmi_without_volumes_gets_no_list_of_them() {
    let first = vmi(|vmi| {
        let status = vmi["status"].as_object_mut().unwrap();
        status.remove("volumeStatus");
    });
    let status = new_status(&first, &running(|_| {}), None);
    assert_eq!(status.get("volumeStatus"), None);
    let again = vmi(|vmi| vmi["status"] = status.clone());
    assert_eq!(new_status(&again, &running(|_| {}), None), status);
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
        ])
    );
}

#[test]
fn the_entry_of_a_missing_interface_stays_only_while_it_is_plugged() {
    let entry = |source: &str| {
        json!({
            "name": "lan", "infoSource": source, "podInterfaceName": "pod7e0", "mac": "02:00:00:00:00:01",
            "queueCount": 1, "linkState": "up", "interfaceName": "eth1", "ipAddress": "10.1.0.5",
            "ipAddresses": ["10.1.0.5"],
        })
    };
    let status = |interfaces: Value, source: &str| {
        let vmi = vmi(|vmi| {
            vmi["spec"]["networks"] = json!([
                {"name": "default", "pod": {}},
                {"name": "lan", "multus": {"networkName": "lan"}},
            ]);
            vmi["spec"]["domain"]["devices"]["interfaces"] = interfaces;
            vmi["status"]["interfaces"] =
                json!([{"name": "default", "ipAddress": "10.0.0.5"}, entry(source)]);
        });
        let interfaces = new_status(&vmi, &running(|_| {}), None)["interfaces"].clone();
        assert_eq!(interfaces[0], json!({"name": "default", "ipAddress": "10.0.0.5"}));
        interfaces.as_array().unwrap()[1..].to_vec()
    };
    let everywhere = "domain, guest-agent, multus-status";
    let absent = json!([{"name": "lan", "bridge": {}, "state": "absent"}]);
    assert_eq!(status(absent, everywhere), [] as [Value; 0]);
    assert_eq!(status(json!([]), everywhere), [] as [Value; 0]);
    let wanted = || json!([{"name": "lan", "bridge": {}}]);
    assert_eq!(status(wanted(), "domain"), [] as [Value; 0]);
    let kept = json!({"name": "lan", "infoSource": "multus-status", "podInterfaceName": "pod7e0"});
    assert_eq!(status(wanted(), everywhere), [kept]);
}

#[test]
fn a_vm_without_interfaces_has_no_list_of_them() {
    let last = vmi(|vmi| vmi["status"]["interfaces"] = json!([{"name": "lan", "infoSource": "domain"}]));
    assert!(
        new_status(&last, &running(|_| {}), None)
            .get("interfaces")
            .is_none()
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
        ("Detaching", false, &attached, &none, "Ready"),
        ("Detaching", true, &attached, &none, "Ready"),
        ("UnMountedFromPod", true, &attached, &none, "Ready"),
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
fn memory_dumps_fail_once_their_claim_is_attached() {
    for (present, expected) in [
        ("Bound", "Bound"),
        ("AttachedToNode", "MemoryDumpFailed"),
        ("MemoryDumpFailed", "MemoryDumpFailed"),
        ("Detaching", "Detaching"),
    ] {
        let vmi = vmi(|vmi| {
            let entries = vmi["status"]["volumeStatus"].as_array_mut().unwrap();
            entries.push(json!({
                "name": "dump", "phase": present, "target": "", "hotplugVolume": {},
                "memoryDumpVolume": {"claimName": "dump"},
            }));
        });
        let status = new_status(&vmi, &running(|_| {}), None);
        assert_eq!(status["volumeStatus"][1]["phase"], expected, "{present}");
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

#[test]
fn the_agent_of_the_guest_is_a_condition_while_it_is_connected() {
    let conditions = |status: &Value| -> Vec<(String, Value)> {
        let conditions = status["conditions"].as_array().unwrap().iter();
        let of_agent =
            conditions.filter(|condition| condition["type"].as_str().unwrap().starts_with("Agent"));
        of_agent
            .map(|condition| {
                (
                    condition["type"].as_str().unwrap().to_owned(),
                    condition["reason"].clone(),
                )
            })
            .collect()
    };
    let state = |connected, unsupported: &str| {
        running(|status| {
            status.guest = Some(GuestState {
                connected,
                unsupported: unsupported.to_owned(),
                ..GuestState::default()
            });
        })
    };
    let without = vmi(|_| {});
    assert_eq!(conditions(&new_status(&without, &state(false, ""), None)), []);
    let status = new_status(&without, &state(true, "too old"), None);
    let expected = [
        ("AgentConnected".to_owned(), Value::Null),
        ("AgentVersionNotSupported".to_owned(), json!("too old")),
    ];
    assert_eq!(conditions(&status), expected);
    let times = &status["conditions"].as_array().unwrap().last().unwrap()["lastProbeTime"];
    assert_eq!(*times, json!("1970-01-01T00:00:00Z"));
    let with = vmi(|vmi| vmi["status"] = status.clone());
    assert_eq!(
        conditions(&new_status(&with, &state(true, ""), None)),
        expected[..1]
    );
    assert_eq!(conditions(&new_status(&with, &state(false, ""), None)), []);
    assert_eq!(conditions(&new_status(&with, &PodState::Lost, None)), []);
}

#[test]
fn conditions_have_no_empty_fields() {
    let state = running(|status| {
        status.guest = Some(GuestState {
            connected: true,
            credentials: Some(CredentialsState {
                synchronized: true,
                ..CredentialsState::default()
            }),
            ..GuestState::default()
        });
    });
    let status = new_status(&vmi(|_| {}), &state, None);
    let conditions = status["conditions"].as_array().unwrap();
    assert!(
        conditions
            .iter()
            .any(|condition| condition["type"] == "AccessCredentialsSynchronized")
    );
    for condition in conditions {
        let fields = condition.as_object().unwrap();
        assert!(fields.values().all(|value| value != ""), "{condition}");
    }
}

#[test]
fn what_the_guest_tells_stays_until_it_tells_something_else() {
    let told = |change: fn(&mut GuestState)| {
        let mut guest = GuestState {
            connected: true,
            ..GuestState::default()
        };
        change(&mut guest);
        running(|status| status.guest = Some(guest))
    };
    let os = |guest: &mut GuestState| {
        guest.os = Some(GuestOs {
            name: "Debian GNU/Linux".to_owned(),
            version_id: "13".to_owned(),
            ..GuestOs::default()
        });
        guest.frozen = Some(true);
    };
    let status = new_status(&vmi(|_| {}), &told(os), None);
    let expected = json!({"name": "Debian GNU/Linux", "versionId": "13"});
    assert_eq!(
        (&status["guestOSInfo"], &status["fsFreezeStatus"]),
        (&expected, &json!("frozen"))
    );
    let again = vmi(|vmi| vmi["status"] = status.clone());
    let silent = new_status(&again, &told(|_| {}), None);
    assert_eq!(
        (&silent["guestOSInfo"], &silent["fsFreezeStatus"]),
        (&expected, &json!("frozen"))
    );
    let thawed = new_status(&again, &told(|guest| guest.frozen = Some(false)), None);
    assert!(thawed.get("fsFreezeStatus").is_none());
}

#[test]
fn the_guests_addresses_complete_those_of_the_pod() {
    let mac = "02:00:00:00:00:01";
    let with_guest = |binding: &str, pod: &[&str], told: &[(&str, &str, &[&str])]| {
        let vmi = vmi(|vmi| {
            vmi["spec"]["networks"] = json!([{"name": "default", "pod": {}}]);
            vmi["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "default", binding: {}}]);
            vmi["status"]["interfaces"] = json!([
                {"name": "default", "infoSource": "domain, multus-status"},
                {"interfaceName": "gone0", "infoSource": "guest-agent"},
            ]);
        });
        let texts = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
        let state = running(|status| {
            status.interfaces = vec![Interface {
                name: "default".to_owned(),
                mac: mac.to_owned(),
                addresses: texts(pod),
                ..Interface::default()
            }];
            let interfaces = told.iter().map(|(name, mac, addresses)| GuestInterface {
                name: name.to_string(),
                mac: mac.to_string(),
                addresses: texts(addresses),
            });
            status.guest = Some(GuestState {
                connected: true,
                interfaces: interfaces.collect(),
                ..GuestState::default()
            });
        });
        let interfaces = new_status(&vmi, &state, None)["interfaces"].clone();
        interfaces.as_array().unwrap().clone()
    };
    let shown = with_guest(
        "bridge",
        &["10.0.0.5"],
        &[
            ("lo", "00:00:00:00:00:00", &["127.0.0.1/8"]),
            ("eth0", "02:00:00:00:00:01", &["10.0.0.6/24", "fe80::1/64"]),
            ("docker0", "02:42:00:00:00:01", &["fd00::1/64", "172.17.0.1/16"]),
        ],
    );
    assert_eq!(shown.len(), 2, "{shown:?}");
    assert_eq!(shown[0]["ipAddresses"], json!(["10.0.0.5", "fe80::1"]));
    assert_eq!(
        (&shown[0]["interfaceName"], &shown[0]["infoSource"]),
        (&json!("eth0"), &json!("domain, guest-agent, multus-status"))
    );
    assert_eq!(
        shown[1],
        json!({
            "mac": "02:42:00:00:00:01", "interfaceName": "docker0", "infoSource": "guest-agent",
            "ipAddress": "172.17.0.1", "ipAddresses": ["fd00::1", "172.17.0.1"],
        })
    );
    // A guest without an address cannot be reached.
    let down = with_guest("bridge", &["10.0.0.5"], &[("eth0", mac, &[])]);
    assert!(down[0].get("ipAddress").is_none(), "{down:?}");
    let inside = with_guest(
        "masquerade",
        &["10.0.0.5"],
        &[("eth0", mac, &["10.0.2.2/24", "fe80::1/64"])],
    );
    assert_eq!(inside[0]["ipAddresses"], json!(["10.0.0.5"]));
    // A port of a bridge or bond has no address, and its MAC address is also that of the bridge or bond.
    for (binding, told) in [("bridge", "10.0.0.5/24"), ("masquerade", "10.0.2.2/24")] {
        let ports = [("eth0", mac, &[][..]), ("br0", mac, &[told][..])];
        let bridged = with_guest(binding, &["10.0.0.5"], &ports);
        assert_eq!(bridged.len(), 1, "{bridged:?}");
        assert_eq!(bridged[0]["ipAddresses"], json!(["10.0.0.5"]), "{binding}");
        assert_eq!(bridged[0]["interfaceName"], "br0");
    }
    let vlan = [("eth0", mac, &["10.0.0.6/24"][..]), ("eth0.5", mac, &[][..])];
    assert_eq!(with_guest("bridge", &[], &vlan)[0]["ipAddress"], "10.0.0.6");
    let nameless = with_guest("bridge", &["10.0.0.5"], &[("", mac, &["10.0.0.5/24"])]);
    assert!(nameless[0].get("interfaceName").is_none(), "{nameless:?}");
    let silent = with_guest("bridge", &["10.0.0.5"], &[]);
    assert_eq!(silent[0]["infoSource"], "domain, multus-status");
    let tunnel = with_guest("bridge", &[], &[("tun0", "", &[])]);
    assert_eq!(
        tunnel[1],
        json!({"interfaceName": "tun0", "infoSource": "guest-agent"})
    );
    let many: Vec<_> = (0..50).map(|_| ("veth", "02:42:00:00:00:02", &[][..])).collect();
    assert_eq!(with_guest("bridge", &[], &many).len(), 11);
}
