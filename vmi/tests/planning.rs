//! Defaults, limits and sources of the plan.

mod common;

use std::path::PathBuf;

use common::{vmi, with};
use husk_vmi::{BootPlan, CacheMode, DiskSource, FieldError, Memory, PodResources, Topology, VmPlan, plan};
use serde_json::{Value, json};

fn given() -> PodResources {
    PodResources {
        volumes: [("root".to_owned(), PathBuf::from("/r.img"))].into(),
        uuid: "11111111-2222-4333-8444-555555555555".parse().unwrap(),
        now_unix_seconds: 1_782_864_000, // 2026-07-01
        ..PodResources::default()
    }
}

fn planned(changes: &[(&str, Value)]) -> Result<VmPlan, Vec<FieldError>> {
    plan(&vmi(&with(changes)), &given())
}

#[track_caller]
fn refused(changes: &[(&str, Value)], line: &str) {
    let errors: Vec<String> = planned(changes)
        .unwrap_err()
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(errors, [line]);
}

#[test]
fn defaults_are_those_of_kubevirt() {
    let plan = planned(&[]).unwrap();
    assert_eq!(plan.namespace, "default");
    assert_eq!(plan.uuid, given().uuid);
    assert_eq!(
        plan.topology,
        Topology {
            sockets: 1,
            cores: 1,
            threads: 1
        }
    );
    assert_eq!(
        plan.memory,
        Memory {
            guest_bytes: 128 << 20,
            hugepage_bytes: None
        }
    );
    assert!(!plan.rng && plan.balloon && plan.serial_console && plan.acpi && !plan.start_paused);
    assert_eq!((plan.grace_period_seconds, plan.rtc_offset_seconds), (30, 0));
    let disk = &plan.disks[0];
    assert_eq!(disk.cache, CacheMode::Auto);
    assert_eq!(
        plan.boot,
        BootPlan::Disks {
            order: vec!["root".into()],
            append: None
        }
    );
}

#[test]
fn what_is_given_is_planned() {
    let plan = planned(&[
        ("domain/devices/rng", json!({})),
        ("domain/devices/autoattachMemBalloon", json!(false)),
        ("domain/devices/autoattachSerialConsole", json!(false)),
        ("domain/features/acpi", json!({"enabled": false})),
        ("domain/firmware/serial", json!("SN-1")),
        ("terminationGracePeriodSeconds", json!(0)),
        ("startStrategy", json!("Paused")),
        ("domain/devices/disks/0/cache", json!("writeback")),
        ("domain/devices/disks/0/io", json!("threads")),
        ("domain/devices/disks/0/errorPolicy", json!("report")),
        ("domain/devices/disks/0/serial", json!("D-1")),
        ("domain/devices/disks/0/shareable", json!(true)),
        ("volumes/0/persistentVolumeClaim/readOnly", json!(true)),
    ])
    .unwrap();
    assert!(plan.rng && !plan.balloon && !plan.serial_console && !plan.acpi && plan.start_paused);
    assert_eq!(plan.serial.as_deref(), Some("SN-1"));
    assert_eq!(plan.grace_period_seconds, 0);
    let disk = &plan.disks[0];
    assert_eq!(disk.cache, CacheMode::WriteBack);
    assert!(disk.read_only && disk.shareable);
    assert_eq!(disk.serial.as_deref(), Some("D-1"));
}

#[test]
fn topology_comes_from_cpu_else_from_resources() {
    let topology = |changes: &[(&str, Value)]| planned(changes).unwrap().topology;
    let sockets = |sockets| Topology {
        sockets,
        cores: 1,
        threads: 1,
    };
    let requests = ("domain/resources/requests/cpu", json!("1500m"));
    assert_eq!(topology(std::slice::from_ref(&requests)), sockets(2));
    assert_eq!(
        topology(&[requests.clone(), ("domain/resources/limits/cpu", json!(3))]),
        sockets(3)
    );
    assert_eq!(
        topology(&[
            requests,
            ("domain/cpu/cores", json!(4)),
            ("domain/cpu/threads", json!(2))
        ]),
        Topology {
            sockets: 1,
            cores: 4,
            threads: 2
        }
    );
    assert_eq!(topology(&[("domain/cpu/sockets", json!(254))]).vcpus(), 254);
    refused(
        &[("domain/cpu", json!({"sockets": 2, "cores": 64, "threads": 2}))],
        "spec.domain.cpu: Invalid value: spec.domain.cpu asks for 2 sockets x 64 cores x 2 threads; a VM has at most 254 \
         vCPUs",
    );
    let most = u32::MAX;
    assert!(
        planned(&[(
            "domain/cpu",
            json!({"sockets": most, "cores": most, "threads": most})
        )])
        .is_err()
    );
    assert!(planned(&[("domain/resources/limits/cpu", json!("8E"))]).is_err());
}

#[test]
fn memory_comes_from_guest_else_request_else_limit_else_page() {
    let memory = |domain: Value| {
        let mut changes = vec![("domain/resources", domain["resources"].clone())];
        changes.push(("domain/memory", domain["memory"].clone()));
        planned(&changes).unwrap().memory
    };
    let normal = |guest_bytes| Memory {
        guest_bytes,
        hugepage_bytes: None,
    };
    let all = json!({"requests": {"memory": "2Gi"}, "limits": {"memory": "4Gi"}});
    assert_eq!(
        memory(json!({"resources": all, "memory": {"guest": "3Gi"}})),
        normal(3 << 30)
    );
    assert_eq!(memory(json!({"resources": all, "memory": {}})), normal(2 << 30));
    assert_eq!(
        memory(json!({"resources": {"limits": {"memory": "4Gi"}}, "memory": {}})),
        normal(4 << 30)
    );
    assert_eq!(
        memory(json!({"resources": {"requests": {"memory": "20000001"}}, "memory": {}})),
        normal(20_000_768)
    );
    assert_eq!(
        memory(json!({"resources": {}, "memory": {"hugepages": {"pageSize": "1Gi"}}})),
        Memory {
            guest_bytes: 1 << 30,
            hugepage_bytes: Some(1 << 30)
        }
    );
    assert_eq!(
        memory(
            json!({"resources": {"requests": {"memory": "64Mi"}}, "memory": {"hugepages": {"pageSize": "2Mi"}}})
        ),
        Memory {
            guest_bytes: 64 << 20,
            hugepage_bytes: Some(2 << 20)
        }
    );
    refused(
        &[("domain/resources/requests/memory", json!("8Mi"))],
        "spec.domain.resources.requests.memory: Invalid value: spec.domain.resources.requests.memory '8Mi': a guest \
         cannot start with less than 16Mi",
    );
    refused(
        &[(
            "domain/memory",
            json!({"guest": "33Mi", "hugepages": {"pageSize": "2Mi"}}),
        )],
        "spec.domain.memory.guest: Invalid value: spec.domain.memory.guest '33Mi' is not a multiple of the page size \
         spec.domain.hugepages.size '2Mi'",
    );
    refused(
        &[("domain/memory", json!({"hugepages": {"pageSize": "64Ki"}}))],
        "spec.domain.memory.hugepages.pageSize: Unsupported value: spec.domain.memory.hugepages.pageSize '64Ki' is not a \
         huge page; 2Mi and 1Gi are",
    );
    assert!(planned(&[("domain/memory/guest", json!("-1Gi"))]).is_err());
    refused(
        &[("domain/memory/guest", json!("8E"))],
        "spec.domain.memory.guest: Invalid value: spec.domain.memory.guest '8E': a guest has at most 64Ti",
    );
}

#[test]
fn the_clock_follows_the_time_zone_of_the_day() {
    let offset = |clock: Value| planned(&[("domain/clock", clock)]).unwrap().rtc_offset_seconds;
    assert_eq!(offset(json!({"utc": {}})), 0);
    assert_eq!(offset(json!({"utc": {"offsetSeconds": -3600}})), -3600);
    assert_eq!(offset(json!({"timezone": "Europe/Berlin"})), 7200);
    refused(
        &[("domain/clock/timezone", json!("Mars/Olympus"))],
        "spec.domain.clock.timezone: Invalid value: spec.domain.clock.timezone 'Mars/Olympus' is not a known time zone, \
         for example Europe/Berlin",
    );
    assert!(planned(&[("domain/clock/utc/offsetSeconds", json!(i64::MIN))]).is_err());
}

#[test]
fn a_volume_without_a_disk_is_given_one() {
    let plan = planned(&[(
        "volumes",
        json!([{"name": "scratch", "emptyDisk": {"capacity": "10Mi"}}, {"name": "root", "dataVolume": {"name": "root"}}]),
    )])
    .unwrap();
    let names: Vec<_> = plan
        .disks
        .iter()
        .map(|disk| (disk.name.as_str(), disk.target.as_str()))
        .collect();
    assert_eq!(names, [("root", "vda"), ("scratch", "vdb")]);
    assert!(plan.notes.iter().any(|note| note.field == "spec.volumes[0]"));
}

#[test]
fn sources_without_data_name_the_way_out() {
    for (source, kind, what) in [
        (
            json!({"persistentVolumeClaim": {"claimName": "c"}}),
            "persistentVolumeClaim",
            "a raw image or a block device",
        ),
        (
            json!({"dataVolume": {"name": "c"}}),
            "dataVolume",
            "a raw image or a block device",
        ),
        (
            json!({"containerDisk": {"image": "i"}}),
            "containerDisk",
            "an image file, or a directory with one in disk/",
        ),
    ] {
        let mut volume = source;
        volume["name"] = json!("data");
        let manifest = with(&[("volumes/0", volume), ("domain/devices/disks", json!([]))]);
        let errors = plan(&vmi(&manifest), &PodResources::default()).unwrap_err();
        let field = format!("spec.volumes[0].{kind}");
        let line =
            format!("{field}: Required value: {field} has no data here; give {what} with --volume data=PATH");
        assert_eq!(errors[0].to_string(), line);
    }
    let mut resources = given();
    resources.volumes.insert("typo".to_owned(), "/x".into());
    let errors = plan(&vmi(&with(&[])), &resources).unwrap_err();
    assert_eq!(
        errors[0].to_string(),
        "spec.volumes: Not found: no volume is named 'typo', which --volume gives a path to"
    );
}

fn source(volume: Value) -> Result<DiskSource, String> {
    let mut volume = volume;
    volume["name"] = json!("data");
    let manifest = with(&[("volumes/0", volume), ("domain/devices/disks", json!([]))]);
    match plan(&vmi(&manifest), &PodResources::default()) {
        Ok(mut plan) => Ok(plan.disks.remove(0).source),
        Err(errors) => Err(errors[0].to_string()),
    }
}

#[test]
fn made_disks_have_whole_mebibytes() {
    let empty = |capacity: &str| source(json!({"emptyDisk": {"capacity": capacity}}));
    assert_eq!(
        empty("10M"),
        Ok(DiskSource::EmptyDisk {
            capacity_bytes: 9 << 20
        })
    );
    assert_eq!(
        empty("1M").unwrap_err(),
        "spec.volumes[0].emptyDisk.capacity: Invalid value: the size for volume data is too low, must be at least 1MiB"
    );
    assert!(empty("-1Gi").is_err());
    let host = |path: &str, capacity: Value| {
        source(json!({"hostDisk": {"path": path, "type": "DiskOrCreate", "capacity": capacity}}))
    };
    let made = DiskSource::HostDisk {
        path: "/d/a.img".into(),
        create_bytes: Some(1 << 30),
    };
    assert_eq!(host("/d/a.img", json!("1Gi")), Ok(made));
    assert_eq!(
        host("/d/a.img", Value::Null).unwrap_err(),
        "spec.volumes[0].hostDisk.capacity: Required value: spec.volumes[0].hostDisk.capacity is required to make the disk"
    );
    assert_eq!(
        host("a.img", json!("1Gi")).unwrap_err(),
        "spec.volumes[0].hostDisk.path: Invalid value: spec.volumes[0].hostDisk.path 'a.img' must be an absolute path"
    );
}

#[test]
fn a_seed_has_the_instances_id_and_name() {
    let seed = |changes: &[(&str, Value)]| {
        let mut all = vec![
            (
                "volumes/0",
                json!({"name": "root", "cloudInitNoCloud": {"userDataBase64": "aGVs\nbG8=", "networkData": "version: 2"}}),
            ),
            (
                "domain/firmware/uuid",
                json!("5d307ca9-b3ef-428c-8861-06e72d69f223"),
            ),
        ];
        all.extend_from_slice(changes);
        let plan = plan(&vmi(&with(&all)), &PodResources::default()).unwrap();
        assert!(plan.disks[0].read_only);
        plan.disks[0].source.clone()
    };
    let DiskSource::CloudInitNoCloud {
        meta_data,
        user_data,
        network_config,
    } = seed(&[])
    else {
        panic!()
    };
    let meta_data: Value = serde_json::from_str(&meta_data).unwrap();
    assert_eq!(
        meta_data,
        json!({"instance-id": "5d307ca9-b3ef-428c-8861-06e72d69f223", "local-hostname": "testvmi"})
    );
    assert_eq!(user_data, b"hello");
    assert_eq!(network_config.as_deref(), Some(b"version: 2".as_slice()));
    let DiskSource::CloudInitNoCloud { meta_data, .. } = seed(&[("hostname", json!("other"))]) else {
        panic!()
    };
    assert!(meta_data.contains("\"local-hostname\":\"other\""));
}

#[test]
fn a_plan_with_any_bytes_survives_serialisation() {
    let seed = json!({"name": "root", "cloudInitNoCloud": {"userDataBase64": "/wD+", "networkData": "v: 2"}});
    let plan = plan(&vmi(&with(&[("volumes/0", seed)])), &PodResources::default()).unwrap();
    let text = serde_json::to_string(&plan).unwrap();
    assert!(
        text.contains(r#""userData":{"base64":"/wD+"}"#) && text.contains(r#""networkConfig":"v: 2""#),
        "{text}"
    );
    assert_eq!(serde_json::from_str::<VmPlan>(&text).unwrap(), plan);
}

#[test]
fn a_container_disk_keeps_its_path_inside_the_image() {
    let manifest = with(&[(
        "volumes/0",
        json!({"name": "root", "containerDisk": {"image": "i", "path": "/disk/a.qcow2"}}),
    )]);
    let plan = plan(&vmi(&manifest), &given()).unwrap();
    let source = DiskSource::ContainerDisk {
        path: "/r.img".into(),
        image_path: Some("disk/a.qcow2".into()),
    };
    assert_eq!(plan.disks[0].source, source);
}

#[test]
fn something_must_boot() {
    refused_without_volumes(
        "spec.domain.devices.disks: Required value: spec.domain.devices.disks is empty: the VM has nothing to boot; add a \
         disk, firmware.kernelBoot or --kernel",
    );
    let changes = [
        (
            "domain/devices/interfaces",
            json!([{"name": "default", "bridge": {}, "bootOrder": 1}]),
        ),
        ("networks", json!([{"name": "default", "pod": {}}])),
    ];
    refused(
        &changes,
        "spec.domain.devices.interfaces[0].bootOrder: Unsupported value: booting from the network is not supported; boot \
         a disk or a kernel",
    );
}

fn refused_without_volumes(line: &str) {
    let manifest = with(&[("volumes", json!([])), ("domain/devices/disks", json!([]))]);
    let errors = plan(&vmi(&manifest), &PodResources::default()).unwrap_err();
    assert_eq!(errors.iter().map(ToString::to_string).collect::<Vec<_>>(), [line]);
}
