//! `SyncVmi`, and the status of VMs.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use husk_proto::shim::v1::change::Kind;
use husk_proto::shim::v1::sync_vmi_request::RunState;
use husk_proto::shim::v1::{
    AddVolumeRequest, KillRequest, Phase, SyncVmiRequest, SyncVmiResponse, VolumeStatus, WatchStatusRequest,
};
use husk_shim_testing::pod::{Pod, ip};
use husk_vmi::{Loaded, PodResources, VmPlan};
use serde_json::{Value, json};
use tonic::{Code, Status};

use super::fixture::{Fixture, Vm, eventually};
use super::networks::on;
use super::snapshots::{begin, dir, restore, save};

pub const MIB: u64 = 1 << 20;

pub fn image(path: &Path, bytes: u64) {
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .unwrap();
    file.set_len(bytes).unwrap();
}

/// A VMI with a disk and these hotpluggable volumes.
pub fn vmi(name: &str, hotpluggable: &[&str]) -> Value {
    let mut volumes = vec![json!({"name": "root", "persistentVolumeClaim": {"claimName": "root"}})];
    for name in hotpluggable {
        volumes.push(json!({"name": name, "dataVolume": {"name": name, "hotpluggable": true}}));
    }
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": name, "uid": "u-1"},
        "spec": {
            "domain": {
                "memory": {"guest": "128Mi"},
                "devices": {
                    "autoattachPodInterface": false,
                    "disks": [{"name": "root", "disk": {"bus": "virtio"}}],
                },
            },
            "volumes": volumes,
        },
    })
}

/// The entry of a volume with a claim of this size in a VMI's status.
pub fn claim(name: &str, size: &str) -> Value {
    let storage = json!({"storage": size});
    json!({"name": name, "persistentVolumeClaimInfo": {
        "volumeMode": "Filesystem", "capacity": storage, "requests": storage, "filesystemOverhead": "0",
    }})
}

pub fn plan(f: &Fixture, vmi: &Value) -> VmPlan {
    let root = f.home().join("root.img");
    image(&root, MIB);
    let Loaded::Vmi(vmi) = husk_vmi::load(&vmi.to_string()).unwrap().remove(0) else {
        panic!("it is a VMI")
    };
    let mut resources = PodResources::default();
    resources.volumes.insert("root".into(), root);
    husk_vmi::plan(&vmi, &resources).unwrap()
}

pub fn sync(f: &Fixture, vm: &mut Vm<'_>, request: SyncVmiRequest) -> Result<SyncVmiResponse, Status> {
    f.wait(vm.client.sync_vmi(request))
        .map(tonic::Response::into_inner)
}

/// A request: the VMI, a run state and paths of volumes.
pub fn wants(vmi: &Value, state: RunState, paths: &[(&str, &Path)]) -> SyncVmiRequest {
    let paths = paths.iter();
    SyncVmiRequest {
        vmi: vmi.to_string(),
        run_state: state.into(),
        paths: paths
            .map(|(name, path)| (name.to_string(), path.to_str().unwrap().to_owned()))
            .collect(),
        ..SyncVmiRequest::default()
    }
}

pub fn changes(done: &SyncVmiResponse) -> Vec<(Kind, &str)> {
    let changes = done.changes.iter();
    changes
        .map(|change| (change.kind(), change.name.as_str()))
        .collect()
}

pub fn volume<'a>(done: &'a SyncVmiResponse, name: &str) -> &'a VolumeStatus {
    done.volumes.iter().find(|volume| volume.name == name).unwrap()
}

pub fn kill(vm: &mut Vm<'_>) {
    vm.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
}

pub fn sync_applies_the_vmi() {
    let f = Fixture::new();
    let data = f.home().join("data.img");
    image(&data, MIB);
    let plain = vmi("demo", &[]);
    let mut vm = f.start(plan(&f, &plain)).unwrap();
    let same = RunState::Unspecified;
    let done = sync(&f, &mut vm, wants(&plain, same, &[])).unwrap();
    assert!(
        done.changes.is_empty() && done.complete && !done.paused,
        "{done:?}"
    );
    let root = volume(&done, "root");
    assert_eq!((done.volumes.len(), root.phase.as_str()), (1, ""));
    let disk = root.disk.as_ref().unwrap();
    assert_eq!(
        (disk.target.as_str(), disk.plugged, disk.bytes),
        ("vda", false, Some(MIB))
    );

    // A volume without data is pending, and is plugged once it has data.
    let more = vmi("demo", &["data"]);
    let done = sync(&f, &mut vm, wants(&more, same, &[])).unwrap();
    assert!(done.changes.is_empty() && !done.complete, "{done:?}");
    let waits = volume(&done, "data");
    assert_eq!(
        (waits.phase.as_str(), waits.reason.as_str()),
        ("Pending", "VolumeNotMountedToPod")
    );
    for wanted in [&[(Kind::VolumeAdded, "data")][..], &[]] {
        let done = sync(&f, &mut vm, wants(&more, same, &[("data", &data)])).unwrap();
        assert_eq!(changes(&done), wanted);
        assert!(done.complete);
        let ready = volume(&done, "data");
        assert_eq!(
            (ready.phase.as_str(), ready.reason.as_str()),
            ("Ready", "VolumeReady")
        );
        assert_eq!(ready.message, "Successfully attach hotplugged volume data to VM");
        let disk = ready.disk.as_ref().unwrap();
        let scsi = disk.scsi.unwrap();
        assert_eq!((disk.target.as_str(), scsi.target, scsi.lun), ("sda", 0, 0));
        assert!(disk.plugged && !disk.read_only && !disk.removing);
    }
    assert!(vm.said().contains("added data data at 0:0 of 1048576 bytes\n"));

    // Its image and that of the root disk grow. The guest has the new sizes when the call returns.
    for path in [&data, &f.home().join("root.img")] {
        image(path, 3 * MIB);
    }
    let done = sync(&f, &mut vm, wants(&more, same, &[])).unwrap();
    for name in ["data", "root"] {
        assert_eq!(volume(&done, name).disk.as_ref().unwrap().bytes, Some(3 * MIB));
    }

    // Their claims grow, so the images do.
    let mut larger = more.clone();
    larger["status"] = json!({"volumeStatus": [claim("data", "6Mi"), claim("root", "5Mi")]});
    let done = sync(&f, &mut vm, wants(&larger, same, &[])).unwrap();
    for (name, bytes) in [("data", 6 * MIB), ("root", 5 * MIB)] {
        assert!(
            changes(&done).contains(&(Kind::DiskGrew, name)),
            "{:?}",
            done.changes
        );
        assert_eq!(volume(&done, name).disk.as_ref().unwrap().bytes, Some(bytes));
    }
    assert_eq!(std::fs::metadata(&data).unwrap().len(), 6 * MIB);

    for (state, wanted) in [
        (RunState::Paused, &[(Kind::Paused, "")][..]),
        (RunState::Paused, &[]),
        (same, &[]),
        (RunState::Running, &[(Kind::Resumed, "")]),
        (RunState::Running, &[]),
    ] {
        let done = sync(&f, &mut vm, wants(&more, state, &[])).unwrap();
        assert_eq!(changes(&done), wanted);
        assert_eq!(done.paused, vm.status().paused);
    }

    // It is unplugged when its entry is removed. A disk of the start is not.
    let done = sync(&f, &mut vm, wants(&plain, same, &[])).unwrap();
    assert_eq!(changes(&done), [(Kind::VolumeRemoved, "data")]);
    assert!(done.complete && done.volumes.len() == 1);
    assert_eq!(vm.info().disks.len(), 1);
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn sync_refuses_changes_that_need_a_restart() {
    let f = Fixture::new();
    let data = f.home().join("data.img");
    image(&data, MIB);
    let plain = vmi("demo", &[]);
    let mut vm = f.start(plan(&f, &plain)).unwrap();
    let mut refused = |vmi: &str, paths: &[(&str, &Path)]| {
        let mut request = wants(&json!({}), RunState::Paused, paths);
        request.vmi = vmi.to_owned();
        let status = sync(&f, &mut vm, request).unwrap_err();
        (status.code(), status.message().to_owned())
    };
    let mut other = vmi("demo", &["data"]);
    other["spec"]["domain"]["memory"]["guest"] = json!("256Mi");
    other["spec"]["domain"]["cpu"] = json!({"cores": 3});
    let (code, text) = refused(&other.to_string(), &[("data", &data)]);
    assert_eq!(code, Code::FailedPrecondition);
    let fields = |text: &str| -> Vec<String> {
        let fields = text.lines().filter_map(|line| line.split_once(':'));
        fields.map(|(field, _)| field.to_owned()).collect()
    };
    let both = ["spec.domain.cpu", "spec.domain.memory.guest"];
    assert_eq!(fields(&text), both, "{text}");
    let (code, text) = refused(&vmi("other", &[]).to_string(), &[]);
    assert_eq!(code, Code::FailedPrecondition);
    assert!(text.starts_with("metadata.name: "), "{text}");
    let mut without = plain.clone();
    without["spec"]["volumes"] = json!([{"name": "x", "emptyDisk": {"capacity": "1Gi"}}]);
    without["spec"]["domain"]["devices"]["disks"] = json!([]);
    let (code, text) = refused(&without.to_string(), &[]);
    assert_eq!(code, Code::FailedPrecondition);
    assert!(text.starts_with("spec.volumes[0]: "), "{text}");

    let (code, text) = refused(&plain.to_string(), &[("data", &data)]);
    assert_eq!(
        (code, text.as_str()),
        (Code::InvalidArgument, "the VMI has no volume \"data\"")
    );
    let mut wrong = plain.clone();
    wrong["spec"]["volumes"] = json!([]);
    let two = format!("{plain}\n---\n{plain}");
    let large = format!("{plain}{}", " ".repeat(husk_vmi::MANIFEST_LIMIT));
    let deep = "[".repeat(100_000);
    for text in ["", "{", "kind: Pod", &wrong.to_string(), &two, &large, &deep] {
        assert_eq!(refused(text, &[]).0, Code::InvalidArgument, "{:.80}", text);
    }
    // Nothing changed.
    let info = vm.info();
    assert!(info.disks.len() == 1 && !info.status.unwrap().paused);
    // On request, the other changes are made.
    let partial = SyncVmiRequest {
        partial: true,
        ..wants(&other, RunState::Unspecified, &[("data", &data)])
    };
    let done = sync(&f, &mut vm, partial).unwrap();
    assert_eq!(changes(&done), [(Kind::VolumeAdded, "data")]);
    let restart = done.restart_required.iter();
    let restart: Vec<_> = restart.map(|change| change.field.as_str()).collect();
    assert_eq!(restart, both);
    assert!(done.complete);
    // A disk that is to become another kind of device stays.
    let mut lun = other.clone();
    lun["spec"]["domain"]["devices"]["disks"] = json!([
        {"name": "root", "disk": {"bus": "virtio"}},
        {"name": "data", "lun": {"bus": "scsi"}},
    ]);
    let partial = SyncVmiRequest {
        partial: true,
        ..wants(&lun, RunState::Unspecified, &[])
    };
    let done = sync(&f, &mut vm, partial).unwrap();
    let last = done.restart_required.last().unwrap();
    assert_eq!(last.field, "spec.domain.devices.disks[1].lun");
    assert_eq!(changes(&done), []);
    assert_eq!(vm.info().disks.len(), 2);
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn sync_reports_pending_removals() {
    let f = Fixture::new();
    let data = f.home().join("data.img");
    image(&data, MIB);
    let (plain, more) = (vmi("demo", &[]), vmi("demo", &["data"]));
    let mut vm = f.start(plan(&f, &plain)).unwrap();
    let added = wants(&more, RunState::Paused, &[("data", &data)]);
    let done = sync(&f, &mut vm, added.clone()).unwrap();
    assert_eq!(changes(&done), [(Kind::VolumeAdded, "data"), (Kind::Paused, "")]);
    for _ in 0..2 {
        let done = sync(&f, &mut vm, wants(&plain, RunState::Unspecified, &[])).unwrap();
        assert!(done.changes.is_empty() && !done.complete, "{done:?}");
        let going = volume(&done, "data");
        assert_eq!(
            (going.phase.as_str(), going.reason.as_str()),
            ("Detaching", "VolumeInUse")
        );
        assert!(going.disk.as_ref().unwrap().removing);
    }
    // A volume is not plugged again before its removal has ended.
    let done = sync(&f, &mut vm, added.clone()).unwrap();
    assert_eq!(
        (volume(&done, "data").phase.as_str(), done.complete),
        ("Detaching", false)
    );
    let done = sync(&f, &mut vm, wants(&plain, RunState::Running, &[])).unwrap();
    assert_eq!(changes(&done)[0], (Kind::Resumed, ""));
    eventually("it goes", || vm.info().disks.len() == 1);
    let done = sync(
        &f,
        &mut vm,
        wants(&more, RunState::Unspecified, &[("data", &data)]),
    )
    .unwrap();
    assert_eq!(changes(&done), [(Kind::VolumeAdded, "data")]);
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn sync_pauses_a_vm_that_is_paused_for_a_snapshot() {
    let f = Fixture::new();
    let plain = vmi("saves-slowly", &[]);
    let mut vm = f.start(plan(&f, &plain)).unwrap();
    let mut steps = begin(&f, &vm, &dir(&f, "one"), false).unwrap();
    f.wait(steps.message()).unwrap().unwrap();
    let done = sync(&f, &mut vm, wants(&plain, RunState::Paused, &[])).unwrap();
    assert!(changes(&done).is_empty() && done.paused, "{done:?}");
    drop(steps);
    eventually("the snapshot ends", || {
        let refused = save(&f, &vm, f.home(), false).unwrap_err();
        refused.message().contains("is not empty")
    });
    assert!(vm.status().paused);
    let done = sync(&f, &mut vm, wants(&plain, RunState::Running, &[])).unwrap();
    assert_eq!(changes(&done), [(Kind::Resumed, "")]);
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn sync_calls_are_serialised() {
    let f = Fixture::new();
    let data = f.home().join("data.img");
    image(&data, MIB);
    let mut vm = f.start(plan(&f, &vmi("demo", &[]))).unwrap();
    let request = wants(&vmi("demo", &["data"]), RunState::Unspecified, &[("data", &data)]);
    let answers = f.wait(async {
        let calls: Vec<_> = (0..24)
            .map(|_| {
                let (mut client, request) = (vm.client.clone(), request.clone());
                tokio::task::spawn(async move { client.sync_vmi(request).await })
            })
            .collect();
        let mut answers = Vec::new();
        for call in calls {
            answers.push(call.await.unwrap());
        }
        answers
    });
    let mut added = 0;
    for answer in answers {
        match answer {
            Ok(done) => added += done.into_inner().changes.len(),
            Err(status) => assert_eq!(status.code(), Code::ResourceExhausted, "{status}"),
        }
    }
    assert_eq!(added, 1);
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn status_watch_includes_disks_and_metrics() {
    let f = Fixture::new();
    let data = f.home().join("data.img");
    image(&data, MIB);
    let mut vm = f.start(plan(&f, &vmi("demo", &[]))).unwrap();
    let mut client = vm.client.clone();
    let add = AddVolumeRequest {
        name: "data".into(),
        path: data.to_str().unwrap().into(),
        ..AddVolumeRequest::default()
    };
    f.wait(async {
        let request = WatchStatusRequest { metrics_seconds: 1 };
        let mut statuses = client.watch_status(request).await.unwrap().into_inner();
        let first = statuses.message().await.unwrap().unwrap();
        assert_eq!((first.phase(), first.disks.len()), (Phase::Running, 1));
        client.add_volume(add).await.unwrap();
        let (mut disks, mut metrics) = (false, None);
        while !disks || metrics.is_none() {
            let status = statuses.message().await.unwrap().unwrap();
            disks |= status
                .disks
                .iter()
                .any(|disk| disk.name == "data" && disk.plugged);
            metrics = status.metrics.or(metrics);
        }
        assert!(metrics.unwrap().resident_bytes.unwrap() > 0);
    });
    let metrics = vm.info().metrics.unwrap();
    // The fake VMM has no vCPUs and no balloon.
    assert_eq!((metrics.vcpu_run_ns.len(), metrics.balloon_bytes), (0, None));
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn sync_applies_interfaces() {
    let f = Fixture::new();
    let pod = Pod::with_address();
    let manifest = |default: Value, red: Option<Value>| {
        let mut vmi = vmi("demo", &[]);
        let mut networks = vec![json!({"name": "default", "pod": {}})];
        let mut interfaces = vec![default];
        if let Some(red) = red {
            networks.push(json!({"name": "red", "multus": {"networkName": "red"}}));
            interfaces.push(red);
        }
        vmi["spec"]["networks"] = json!(networks);
        vmi["spec"]["domain"]["devices"]["interfaces"] = json!(interfaces);
        vmi
    };
    let state = RunState::Unspecified;
    let default = |state: &str| json!({"name": "default", "bridge": {}, "state": state});
    let options = json!({"bootFileName": "pxe"});
    let red =
        |state: &str| Some(json!({"name": "red", "bridge": {}, "state": state, "dhcpOptions": options}));
    let plan = plan(&f, &manifest(default("up"), None));
    let mut vm = f.start_config(&on(&f, &pod, plan)).unwrap();
    let go = |vm: &mut Vm<'_>, default: Value, red: Option<Value>| {
        let done = sync(&f, vm, wants(&manifest(default, red), state, &[])).unwrap();
        let phases = done.interfaces.iter().map(|i| format!("{} {}", i.name, i.phase));
        let changes = changes(&done)
            .iter()
            .map(|(kind, name)| format!("{kind:?} {name}"))
            .collect::<Vec<_>>();
        (changes, phases.collect::<Vec<_>>(), done.complete)
    };
    let (changes, phases, complete) = go(&mut vm, default("up"), None);
    assert_eq!(
        (changes.len(), &phases[..], complete),
        (0, &["default Ready".to_owned()][..], true)
    );
    let (changes, _, _) = go(&mut vm, default("down"), None);
    assert_eq!(changes, ["LinkDown default"]);
    // Its device does not exist yet.
    let (changes, phases, complete) = go(&mut vm, default("up"), red(""));
    assert_eq!(
        (&changes[..], complete),
        (&["LinkUp default".to_owned()][..], false)
    );
    assert_eq!(phases, ["default Ready", "red Pending"]);
    let device = husk_network::secondary_nic("red");
    let mac = husk_network::MacAddr([2, 0, 0, 0, 0, 7]);
    let peer = husk_network::MacAddr([2, 0, 0, 0, 9, 7]);
    pod.add_veth("veth1", peer, &device, mac);
    ip(&pod.netns, &format!("addr add 10.9.0.5/24 brd + dev {device}"));
    let (changes, phases, complete) = go(&mut vm, default("up"), red(""));
    assert_eq!(
        (&changes[..], complete),
        (&["InterfaceAdded red".to_owned()][..], true)
    );
    assert_eq!(phases, ["default Ready", "red Ready"]);
    assert_eq!(go(&mut vm, default("up"), red("")).0, [""; 0]);
    let mut other = red("");
    other.as_mut().unwrap()["macAddress"] = json!("02:00:00:00:00:99");
    let (changes, phases, complete) = go(&mut vm, default("up"), other);
    assert_eq!((changes.len(), complete), (0, false));
    assert_eq!(phases, ["default Ready", "red Failed"]);
    let (changes, phases, complete) = go(&mut vm, default("up"), red("absent"));
    assert_eq!(
        (&changes[..], complete),
        (&["InterfaceRemoved red".to_owned()][..], true)
    );
    assert_eq!(phases, ["default Ready", "red Absent"]);
    let (changes, _, _) = go(&mut vm, default("up"), red("down"));
    assert_eq!(changes, ["InterfaceAdded red"]);
    eventually("its link is down from the start", || {
        let said = vm.said();
        let mut nics = said.lines().rev().filter(|line| line.starts_with("nic red "));
        nics.next().is_some_and(|nic| nic.ends_with(" down"))
    });
    let shown: HashMap<String, bool> = vm
        .info()
        .interfaces
        .into_iter()
        .map(|i| (i.name, i.link_up))
        .collect();
    assert_eq!((shown["default"], shown["red"]), (true, false));
    let saved = dir(&f, "saved");
    save(&f, &vm, &saved, false).unwrap();
    let described = std::fs::read(saved.join("snapshot.json")).unwrap();
    let described: Value = serde_json::from_slice(&described).unwrap();
    assert_eq!(described["interfaces"][0]["dhcp"], options);
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn sync_after_a_restore_keeps_plugged_volumes() {
    let f = Fixture::new();
    let image_of = |name: &str| {
        let path = f.home().join(name);
        image(&path, MIB);
        path
    };
    let (data, other) = (image_of("data.img"), image_of("other.img"));
    let mut both = vmi("demo", &["data", "other"]);
    // As `virtctl addvolume` writes it.
    both["spec"]["domain"]["devices"]["disks"] = json!([
        {"name": "root", "disk": {"bus": "virtio"}},
        {"name": "data", "disk": {"bus": "scsi"}, "serial": "data"},
    ]);
    let mut one = both.clone();
    one["spec"]["volumes"].as_array_mut().unwrap().pop();
    let same = RunState::Unspecified;
    let mut source = f.start(plan(&f, &vmi("demo", &[]))).unwrap();
    let given = [("data", &*data), ("other", &*other)];
    let done = sync(&f, &mut source, wants(&both, same, &given)).unwrap();
    assert!(done.complete, "{done:?}");
    let saved = dir(&f, "saved");
    save(&f, &source, &saved, false).unwrap();
    kill(&mut source);

    let mut restored = restore(&f, &saved, "demo").unwrap();
    let done = sync(&f, &mut restored, wants(&both, same, &[])).unwrap();
    assert!(changes(&done).is_empty() && done.complete, "{done:?}");
    for name in ["data", "other"] {
        let volume = volume(&done, name);
        assert_eq!(volume.phase, "Ready");
        assert!(volume.disk.as_ref().unwrap().plugged);
    }
    // A volume that the VMI no longer has is unplugged, and no other.
    let done = sync(&f, &mut restored, wants(&one, same, &[])).unwrap();
    assert_eq!(changes(&done), [(Kind::VolumeRemoved, "other")]);
    assert!(done.complete, "{done:?}");
    kill(&mut restored);
    f.is_clean(&[source.pids(), restored.pids()].concat());
}
