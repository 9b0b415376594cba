//! Controllers, addresses, device types and settings.

use super::planned;
use husk_vmi::{
    BlockSize, BootPlan, CacheMode, Controller, DeviceType, DiskPlan, DiskSource, ErrorPolicy, FormatPolicy,
    ScsiAddress, ScsiController,
};
use serde_json::{Value, json};

const LIST: &str = "domain/devices/disks";

/// The plan of the base's one disk, which has these fields beside its name.
fn one(disk: Value) -> DiskPlan {
    let mut disk = disk;
    disk["name"] = json!("root");
    let plan = planned(&[(LIST, json!([disk]))]).unwrap_or_else(|errors| panic!("{errors:?}"));
    plan.disks.into_iter().next().unwrap()
}

fn scsi(lun: u16) -> Controller {
    Controller::VirtioScsi(ScsiAddress { target: 0, lun })
}

#[test]
fn the_bus_decides_the_controller() {
    for (disk, controller, target) in [
        (json!({"disk": {"bus": "virtio"}}), Controller::VirtioBlk, "vda"),
        (json!({"disk": {"bus": "scsi"}}), scsi(0), "sda"),
        (json!({"disk": {"bus": "sata"}}), scsi(0), "sda"),
        (json!({"disk": {}}), scsi(0), "sda"),
        (json!({}), scsi(0), "sda"),
        (json!({"cdrom": {"bus": "sata"}}), scsi(0), "sda"),
        (json!({"cdrom": {}}), scsi(0), "sda"),
        (json!({"lun": {"bus": "scsi"}}), scsi(0), "sda"),
        (json!({"lun": {"bus": "virtio"}}), scsi(0), "sda"),
    ] {
        let plan = one(disk.clone());
        assert_eq!(
            (plan.controller, plan.target.as_str()),
            (controller, target),
            "{disk}"
        );
    }
}

#[test]
fn luns_are_the_letters_of_kubevirts_names_in_the_manifests_order() {
    let disk = |name: &str, target: Value| {
        let mut disk = target;
        disk["name"] = json!(name);
        disk
    };
    let names = ["a", "b", "c", "d", "e", "f"];
    let volumes: Vec<Value> = names
        .map(|name| json!({"name": name, "emptyDisk": {"capacity": "1Mi"}}))
        .into();
    let manifest = super::with(&[
        ("volumes", json!(volumes)),
        (
            LIST,
            json!([
                disk("a", json!({"disk": {"bus": "scsi"}})),
                disk("b", json!({"disk": {"bus": "virtio"}})),
                disk("c", json!({"cdrom": {"bus": "sata"}})),
                disk("d", json!({"disk": {"bus": "virtio"}})),
                disk("e", json!({"disk": {"bus": "scsi"}})),
            ]),
        ),
    ]);
    let plan = husk_vmi::plan(&super::vmi(&manifest), &super::resources(&[])).unwrap();
    let found: Vec<_> = plan
        .disks
        .iter()
        .map(|disk| (disk.name.as_str(), disk.target.as_str(), disk.controller))
        .collect();
    assert_eq!(
        found,
        [
            ("a", "sda", scsi(0)),
            ("b", "vda", Controller::VirtioBlk),
            ("c", "sdb", scsi(1)),
            ("d", "vdb", Controller::VirtioBlk),
            ("e", "sdc", scsi(2)),
            ("f", "sdd", scsi(3)),
        ]
    );
    // What is plugged next gets the next letter, whatever leaves meanwhile.
    let used = plan.disks.iter().filter_map(DiskPlan::scsi_address);
    assert_eq!(ScsiAddress::free(used).unwrap().name(), "sde");
}

#[test]
fn the_scsi_controller_is_there_unless_nobody_can_need_it() {
    let controller = |changes: &[(&str, Value)]| planned(changes).unwrap().scsi;
    let one_queue = Some(ScsiController { queues: 1 });
    let fixed = ("domain/devices/disableHotplug", json!(true));
    assert_eq!(controller(&[]), one_queue);
    assert_eq!(controller(std::slice::from_ref(&fixed)), None);
    let bus = ("domain/devices/disks/0/disk/bus", json!("scsi"));
    assert_eq!(controller(&[fixed, bus]), one_queue);
}

#[test]
fn device_types_have_their_own_rules() {
    let cdrom = one(json!({"cdrom": {"bus": "sata", "tray": "open"}}));
    assert_eq!(cdrom.device, DeviceType::Cdrom { tray_open: true });
    assert!(cdrom.read_only && !cdrom.overlay);
    let open = json!([{"name": "root", "cdrom": {"tray": "open"}}]);
    let warnings = planned(&[(LIST, open)]).unwrap().warnings;
    let field = "spec.domain.devices.disks[0].cdrom.tray";
    assert!(
        warnings.iter().any(|warning| warning.field == field),
        "{warnings:?}"
    );
    let lun = one(json!({"lun": {"bus": "scsi"}, "blockSize": {"matchVolume": {}}}));
    assert_eq!(
        (lun.device, lun.block_size),
        (DeviceType::Lun { reservation: false }, BlockSize::Default)
    );
    let lun = one(json!({"lun": {"reservation": true}}));
    assert_eq!(lun.device, DeviceType::Lun { reservation: true });
    assert!(!lun.read_only);
    assert!(one(json!({"lun": {"readonly": true}})).read_only);
    assert!(planned(&[(LIST, json!([{"name": "root", "cdrom": {"tray": "ajar"}}]))]).is_err());
}

#[test]
fn a_drive_may_be_empty_and_is_not_booted() {
    let disks = json!([
        {"name": "drive", "bootOrder": 1, "cdrom": {"bus": "sata"}},
        {"name": "root", "bootOrder": 2, "disk": {"bus": "virtio"}},
    ]);
    let plan = planned(&[(LIST, disks)]).unwrap();
    assert_eq!(plan.disks[0].source, DiskSource::Empty);
    assert_eq!(plan.disks[0].target, "sda");
    let BootPlan::Disks { order, .. } = &plan.boot else {
        panic!("{:?}", plan.boot)
    };
    assert_eq!(order, &["root"]);
    let disks = json!([{"name": "drive", "cdrom": {}}, {"name": "root", "disk": {"bus": "virtio"}}]);
    let plan = planned(&[(LIST, disks)]).unwrap();
    assert!(matches!(&plan.boot, BootPlan::Disks { order, .. } if order == &["root"]));
}

#[test]
fn without_a_boot_order_a_disc_is_only_booted_if_there_is_no_disk() {
    let disc = json!({"name": "root", "cdrom": {}});
    let volume = json!({"name": "root", "persistentVolumeClaim": {"claimName": "root"}});
    let seed = json!({"name": "seed", "cloudInitNoCloud": {"userData": "a"}});
    let order = |disks: Value| {
        let volumes = json!([volume, seed]);
        let plan = planned(&[(LIST, disks), ("volumes", volumes)]).unwrap();
        match plan.boot {
            BootPlan::Disks { order, .. } => order,
            other => panic!("{other:?}"),
        }
    };
    let disk = json!({"name": "seed", "disk": {"bus": "virtio"}});
    assert_eq!(order(json!([disc, disk])), ["seed"]);
    assert_eq!(order(json!([disk, disc])), ["seed"]);
    assert_eq!(order(json!([disc, {"name": "seed", "cdrom": {}}])), ["root"]);
}

#[test]
fn settings_are_carried_over() {
    let plan = one(json!({
        "disk": {"bus": "virtio", "readonly": true},
        "serial": "D-1", "cache": "writeback", "errorPolicy": "enospace", "bootOrder": 7,
        "blockSize": {"custom": {"logical": 512, "physical": 4096, "discardGranularity": 65536}},
    }));
    assert_eq!(
        (plan.serial.as_deref(), plan.cache),
        (Some("D-1"), CacheMode::WriteBack)
    );
    assert_eq!(plan.error_policy, ErrorPolicy::Enospace);
    assert_eq!(plan.boot_order, Some(7));
    assert!(plan.read_only && !plan.overlay);
    let sizes = BlockSize::Custom {
        logical: 512,
        physical: 4096,
        discard_granularity: Some(65536),
    };
    assert_eq!(plan.block_size, sizes);
    let plan = one(json!({"blockSize": {"matchVolume": {}}}));
    assert_eq!(plan.block_size, BlockSize::MatchVolume);
    let plan = one(json!({"blockSize": {"matchVolume": {"enabled": false}}}));
    assert_eq!(plan.block_size, BlockSize::Default);
    let plan = one(json!({}));
    assert_eq!(
        (plan.cache, plan.error_policy),
        (CacheMode::Auto, ErrorPolicy::Stop)
    );
    assert_eq!(
        (plan.format, plan.queues, plan.io_thread),
        (FormatPolicy::Raw, 1, None)
    );
}

#[test]
fn shareable_disks_are_not_cached() {
    assert_eq!(one(json!({"shareable": true})).cache, CacheMode::None);
    assert_eq!(
        one(json!({"shareable": true, "cache": "none"})).cache,
        CacheMode::None
    );
    for cache in ["writethrough", "writeback"] {
        let disk = json!([{"name": "root", "shareable": true, "cache": cache}]);
        let errors = planned(&[(LIST, disk)]).unwrap_err();
        let line = format!(
            "spec.domain.devices.disks[0].cache: Invalid value: a sharable disk requires cache = none got: {cache}"
        );
        assert_eq!(errors[0].to_string(), line);
        // KubeVirt has this rule for disks only.
        for kind in ["lun", "cdrom"] {
            one(json!({kind: {"bus": "scsi"}, "shareable": true, "cache": cache}));
        }
    }
    let drive = one(json!({"cdrom": {"bus": "scsi"}, "shareable": true}));
    assert_eq!(drive.cache, CacheMode::Auto);
}

#[test]
fn queues_are_one_or_one_for_each_vcpu() {
    let plan = planned(&[
        ("domain/devices/blockMultiQueue", json!(true)),
        ("domain/cpu/cores", json!(3)),
    ])
    .unwrap();
    assert_eq!(plan.disks[0].queues, 3);
    assert_eq!(plan.scsi, Some(ScsiController { queues: 3 }));
}

/// The I/O threads of four disks, of which those named have their own.
fn threads(policy: Option<&str>, own: &[&str], vcpus: u32) -> Vec<Option<u32>> {
    let names = ["a", "b", "c", "d"];
    let volumes = names.map(|name| json!({"name": name, "emptyDisk": {"capacity": "1Mi"}}));
    let disks = names.map(
        |name| json!({"name": name, "disk": {"bus": "virtio"}, "dedicatedIOThread": own.contains(&name)}),
    );
    let manifest = super::with(&[
        ("volumes", json!(volumes)),
        (LIST, json!(disks)),
        ("domain/cpu/cores", json!(vcpus)),
        ("domain/ioThreadsPolicy", json!(policy)),
    ]);
    let plan = husk_vmi::plan(&super::vmi(&manifest), &super::resources(&[])).unwrap();
    plan.disks.iter().map(|disk| disk.io_thread).collect()
}

#[test]
fn io_threads_are_shared_out_as_the_policy_says() {
    let some = |threads: [u32; 4]| threads.map(Some).to_vec();
    assert_eq!(threads(None, &[], 1), [None; 4]);
    assert_eq!(threads(None, &["b"], 1), some([1, 2, 1, 1]));
    assert_eq!(threads(Some("shared"), &[], 1), some([1, 1, 1, 1]));
    assert_eq!(threads(Some("shared"), &["a", "d"], 1), some([2, 1, 1, 3]));
    // Two threads for each vCPU, but never more than there are disks.
    assert_eq!(threads(Some("auto"), &[], 1), some([1, 2, 1, 2]));
    assert_eq!(threads(Some("auto"), &[], 8), some([1, 2, 3, 4]));
    assert_eq!(threads(Some("auto"), &["a"], 1), some([2, 1, 1, 1]));
    assert_eq!(threads(Some("auto"), &["a", "b", "c"], 1), some([2, 3, 4, 1]));
}
