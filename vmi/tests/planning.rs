//! Defaults, limits and sources of the plan.

mod common;

use std::path::PathBuf;

use common::{vmi, with};
use husk_vmi::{
    BootPlan, CacheMode, Controller, DiskSource, FieldError, KernelFile, KernelOverride, Memory,
    PodResources, Topology, VmPlan, WatchdogAction, plan,
};
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
    assert_eq!(
        (plan.hostname.as_str(), plan.subdomain.as_deref()),
        ("testvmi", None)
    );
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
fn a_watchdog_resets_unless_it_has_another_action() {
    let watchdog = |value: Value| planned(&[("domain/devices/watchdog", value)]).unwrap().watchdog;
    assert_eq!(planned(&[]).unwrap().watchdog, None);
    for value in [
        json!({"name": "a"}),
        json!({"name": "a", "i6300esb": {}}),
        json!({"name": "a", "i6300esb": {"action": ""}}),
        json!({"name": "a", "i6300esb": {"action": "reset"}}),
    ] {
        assert_eq!(watchdog(value), Some(WatchdogAction::Reset));
    }
    for (name, action) in [
        ("poweroff", WatchdogAction::Poweroff),
        ("shutdown", WatchdogAction::Shutdown),
        ("pause", WatchdogAction::Pause),
    ] {
        assert_eq!(
            watchdog(json!({"name": "a", "i6300esb": {"action": name}})),
            Some(action)
        );
    }
    let field = "spec.domain.devices.watchdog.i6300esb.action";
    refused(
        &[(
            "domain/devices/watchdog",
            json!({"name": "a", "i6300esb": {"action": "none"}}),
        )],
        &format!(
            "{field}: Unsupported value: {field} 'none' is not supported: use reset, poweroff, shutdown or pause"
        ),
    );
}

#[test]
fn downward_metrics_are_a_read_only_disk_on_virtio() {
    for disks in [
        json!([]),
        json!([{"name": "m"}]),
        json!([{"name": "m", "disk": {}}]),
    ] {
        let plan = planned(&[
            ("domain/devices/disks", disks),
            (
                "volumes",
                json!([
                    {"name": "root", "persistentVolumeClaim": {"claimName": "c"}},
                    {"name": "m", "downwardMetrics": {}},
                ]),
            ),
        ]);
        let plan = plan.unwrap_or_else(|errors| panic!("{errors:?}"));
        let disk = plan.disks.iter().find(|disk| disk.name == "m").unwrap();
        assert_eq!(disk.source, DiskSource::DownwardMetrics);
        assert!(
            disk.read_only && disk.controller == Controller::VirtioBlk,
            "{disk:?}"
        );
        assert!(
            plan.warnings
                .iter()
                .all(|warning| !warning.field.contains("volumes[1]")),
            "{:?}",
            plan.warnings
        );
    }
}

#[test]
fn settings_of_the_manifest_are_planned() {
    let plan = planned(&[
        ("domain/devices/rng", json!({})),
        ("domain/devices/downwardMetrics", json!({})),
        ("domain/devices/autoattachMemBalloon", json!(false)),
        ("domain/devices/autoattachSerialConsole", json!(false)),
        ("domain/features/acpi", json!({"enabled": false})),
        ("domain/firmware/serial", json!("SN-1")),
        ("terminationGracePeriodSeconds", json!(0)),
        ("hostname", json!("guest")),
        ("subdomain", json!("group")),
        ("startStrategy", json!("Paused")),
        ("domain/devices/disks/0/io", json!("threads")),
        ("domain/devices/disks/0/errorPolicy", json!("report")),
        ("domain/devices/disks/0/serial", json!("D-1")),
        ("domain/devices/disks/0/shareable", json!(true)),
        ("volumes/0/persistentVolumeClaim/readOnly", json!(true)),
    ])
    .unwrap();
    assert!(plan.rng && plan.downward_metrics);
    assert!(!plan.balloon && !plan.serial_console && !plan.acpi && plan.start_paused);
    assert_eq!(plan.serial.as_deref(), Some("SN-1"));
    assert_eq!(plan.grace_period_seconds, 0);
    assert_eq!(
        (plan.hostname.as_str(), plan.subdomain.as_deref()),
        ("guest", Some("group"))
    );
    let disk = &plan.disks[0];
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
    let no_request = json!({"requests": {"memory": "0"}, "limits": {"memory": "4Gi"}});
    assert_eq!(
        memory(json!({"resources": no_request, "memory": {}})),
        normal(4 << 30)
    );
    let nothing = json!({"requests": {"memory": "0"}, "limits": {"memory": 0}});
    assert_eq!(
        memory(json!({"resources": nothing, "memory": {"hugepages": {"pageSize": "1Gi"}}})).guest_bytes,
        1 << 30
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
        "spec.domain.memory.hugepages.pageSize: Unsupported value: spec.domain.memory.hugepages.pageSize '64Ki' is not \
         supported; use 2Mi or 1Gi",
    );
    assert!(planned(&[("domain/memory/guest", json!("-1Gi"))]).is_err());
    refused(
        &[("domain/memory/guest", json!("8E"))],
        "spec.domain.memory.guest: Invalid value: spec.domain.memory.guest '8E': the maximum is 64Ti",
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
fn something_must_boot() {
    refused_without_volumes(
        "spec.domain.devices.disks: Required value: spec.domain.devices.disks has no disk to boot from: add one, \
         firmware.kernelBoot or --kernel",
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

#[test]
fn a_kernel_boots_from_the_manifest_or_from_the_caller() {
    let container = json!({"image": "i", "kernelPath": "/boot/vmlinuz", "initrdPath": "/boot/initrd"});
    let manifest = with(&[(
        "domain/firmware/kernelBoot",
        json!({"kernelArgs": "quiet", "container": container}),
    )]);
    let vmi = vmi(&manifest);
    let errors = plan(&vmi, &given()).unwrap_err();
    assert_eq!(errors[0].field, "spec.domain.firmware.kernelBoot.container");

    let mut given = given();
    let kernels = ("kernel-boot-volume".to_owned(), PathBuf::from("/kernels"));
    given.volumes.extend([kernels]);
    let planned = plan(&vmi, &given).unwrap();
    let BootPlan::Kernel {
        kernel: KernelFile::Beneath(kernel),
        initrd: Some(_),
        command_line,
        append: None,
    } = &planned.boot
    else {
        panic!("{:?}", planned.boot)
    };
    assert_eq!(
        (kernel.dir.to_str(), kernel.path.to_str()),
        (Some("/kernels"), Some("boot/vmlinuz"))
    );
    assert_eq!(command_line, "quiet");

    given.kernel = Some(KernelOverride {
        kernel: Some("/my/bzImage".into()),
        initrd: None,
        append: Some("console=ttyS0".into()),
    });
    let planned = plan(&vmi, &given).unwrap();
    let boot = BootPlan::Kernel {
        kernel: KernelFile::Path("/my/bzImage".into()),
        initrd: None,
        command_line: "console=ttyS0".into(),
        append: None,
    };
    assert_eq!(planned.boot, boot);
    let warnings: Vec<String> = planned.warnings.iter().map(ToString::to_string).collect();
    assert!(warnings.contains(&"spec.domain.firmware.kernelBoot: is overridden by --kernel".to_owned()));
}

#[test]
fn with_a_kernel_the_boot_order_of_an_interface_is_noted() {
    let vmi = vmi(&with(&[
        (
            "domain/devices/interfaces",
            json!([{"name": "default", "bridge": {}, "bootOrder": 1}]),
        ),
        ("networks", json!([{"name": "default", "pod": {}}])),
        (
            "domain/firmware/kernelBoot",
            json!({"container": {"image": "i", "kernelPath": "/boot/vmlinuz"}}),
        ),
    ]));
    let mut given = given();
    let kernels = ("kernel-boot-volume".to_owned(), PathBuf::from("/kernels"));
    given.volumes.extend([kernels]);
    let own = KernelOverride {
        kernel: Some("/my/bzImage".into()),
        ..KernelOverride::default()
    };
    for kernel in [None, Some(own)] {
        given.kernel = kernel;
        let warnings: Vec<String> = plan(&vmi, &given)
            .unwrap()
            .warnings
            .iter()
            .map(ToString::to_string)
            .collect();
        let warning = "spec.domain.devices.interfaces[0].bootOrder: is ignored: booting from the network is not supported; \
                    the kernel is booted";
        assert!(warnings.contains(&warning.to_owned()), "{warnings:?}");
    }
}

#[test]
fn vhost_vsock_has_the_cid_of_the_status() {
    let planned = |autoattach: bool, status: Value| {
        let mut manifest = with(&[("domain/devices/autoattachVSOCK", json!(autoattach))]);
        manifest["status"] = status;
        let planned = plan(&vmi(&manifest), &given());
        planned.map(|plan| plan.vhost_vsock_cid).map_err(|mut errors| {
            assert_eq!(errors.len(), 1);
            errors.remove(0).to_string()
        })
    };
    for cid in [3, 1234, u32::MAX - 1] {
        assert_eq!(planned(true, json!({"VSOCKCID": cid})), Ok(Some(cid)));
    }
    assert_eq!(planned(false, json!({"VSOCKCID": 1234})), Ok(None));
    let needed = "spec.domain.devices.autoattachVSOCK: Invalid value: spec.domain.devices.autoattachVSOCK needs a \
                  VirtualMachineInstance with status.VSOCKCID, which virt-controller sets under the feature gate VSOCK; leave the field out: every VM then has a vsock \
                  device of its own";
    for status in [Value::Null, json!({}), json!({"VSOCKCID": null}), json!([])] {
        assert_eq!(planned(true, status), Err(needed.into()));
    }
    for bad in [
        json!(0),
        json!(2),
        json!(-3),
        json!(3.5),
        json!("3"),
        json!(u32::MAX),
        json!(u64::MAX),
    ] {
        let text = format!(
            "status.VSOCKCID: Invalid value: status.VSOCKCID '{bad}' is not a number from 3 to 4294967294"
        );
        assert_eq!(planned(true, json!({"VSOCKCID": bad})), Err(text));
    }
}
