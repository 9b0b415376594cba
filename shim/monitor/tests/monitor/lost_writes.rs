//! `SyncVmi` of volumes whose last flush fails.

use std::path::PathBuf;

use husk_proto::shim::v1::change::Kind;
use husk_proto::shim::v1::sync_vmi_request::RunState;
use husk_proto::shim::v1::{RemoveVolumeRequest, ResumeRequest, SyncVmiResponse};
use husk_shim_testing::pod::Pod;
use serde_json::{Value, json};
use tonic::Code;

use super::fixture::{Fixture, Vm, eventually};
use super::networks::on;
use super::sync::{MIB, changes, image, kill, plan, sync, vmi, wants};

const SAME: RunState = RunState::Unspecified;

/// A VMI with the volume `data`, and its image.
fn with_data(f: &Fixture, name: &str) -> (Value, PathBuf) {
    let data = f.home().join("data.img");
    image(&data, MIB);
    (vmi(name, &["data"]), data)
}

/// Plugs the volume `data`.
fn plug(f: &Fixture, vm: &mut Vm<'_>, (with, data): &(Value, PathBuf)) {
    let done = sync(f, vm, wants(with, SAME, &[("data", data)])).unwrap();
    assert_eq!(changes(&done), [(Kind::VolumeAdded, "data")]);
}

/// The volumes whose flush failed.
fn lost(done: &SyncVmiResponse) -> Vec<(&str, &str)> {
    let lost = done
        .volumes
        .iter()
        .filter(|volume| volume.reason == "FlushFailed");
    let lost = lost.map(|volume| {
        assert_eq!((volume.phase.as_str(), &volume.disk), ("UnMountedFromPod", &None));
        (volume.name.as_str(), volume.message.as_str())
    });
    lost.collect()
}

const LOST: [(&str, &str); 1] = [("data", "the last writes may be lost: it is lost")];

/// The next call reports the error, and the call after that does not.
fn is_reported_once(f: &Fixture, vm: &mut Vm<'_>, vmi: &Value) {
    let done = sync(f, vm, wants(vmi, SAME, &[])).unwrap();
    assert!(done.complete, "{done:?}");
    assert_eq!(lost(&done), LOST);
    let done = sync(f, vm, wants(vmi, SAME, &[])).unwrap();
    assert_eq!(lost(&done), []);
}

pub fn sync_reports_lost_writes_once() {
    let f = Fixture::new();
    let plain = vmi("loses", &[]);
    let with = with_data(&f, "loses");
    let mut vm = f.start(plan(&f, &plain)).unwrap();
    plug(&f, &mut vm, &with);
    is_reported_once(&f, &mut vm, &plain);
    // The caller of RemoveVolume has the error.
    plug(&f, &mut vm, &with);
    let remove = RemoveVolumeRequest { name: "data".into() };
    let removed = f.wait(vm.client.remove_volume(remove)).unwrap();
    assert_eq!(removed.into_inner().flush_error, "it is lost");
    let done = sync(&f, &mut vm, wants(&plain, SAME, &[])).unwrap();
    assert_eq!(lost(&done), []);
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn sync_reports_lost_writes_of_a_late_removal() {
    let f = Fixture::new();
    let plain = vmi("loses", &[]);
    let with = with_data(&f, "loses");
    let mut vm = f.start(plan(&f, &plain)).unwrap();
    plug(&f, &mut vm, &with);
    let done = sync(&f, &mut vm, wants(&with.0, RunState::Paused, &[])).unwrap();
    assert!(done.paused);
    let done = sync(&f, &mut vm, wants(&plain, SAME, &[])).unwrap();
    assert!(!done.complete && lost(&done).is_empty(), "{done:?}");
    // The guest releases it between two calls.
    f.wait(vm.client.resume(ResumeRequest {})).unwrap();
    eventually("it goes", || vm.info().disks.len() == 1);
    is_reported_once(&f, &mut vm, &plain);
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn sync_reports_lost_writes_after_a_failed_call() {
    let f = Fixture::new();
    let plain = vmi("loses", &[]);
    let with = with_data(&f, "loses");
    let mut vm = f.start(plan(&f, &plain)).unwrap();
    plug(&f, &mut vm, &with);
    // The path of another volume is refused after the removal.
    let other = vmi("loses", &["more"]);
    let request = wants(&other, SAME, &[("more", "relative.img".as_ref())]);
    let refused = sync(&f, &mut vm, request).unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert_eq!(vm.info().disks.len(), 1);
    is_reported_once(&f, &mut vm, &plain);
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn sync_reports_lost_writes_of_a_replaced_volume() {
    let f = Fixture::new();
    let with = with_data(&f, "loses");
    let mut vm = f.start(plan(&f, &vmi("loses", &[]))).unwrap();
    plug(&f, &mut vm, &with);
    let (mut other, data) = with;
    other["spec"]["volumes"][1]["dataVolume"]["name"] = json!("other");
    let done = sync(&f, &mut vm, wants(&other, SAME, &[("data", &data)])).unwrap();
    let replaced = [(Kind::VolumeRemoved, "data"), (Kind::VolumeAdded, "data")];
    assert_eq!(changes(&done), replaced);
    assert_eq!(lost(&done), LOST);
    let volumes = done.volumes.iter();
    let volumes: Vec<_> = volumes.map(|v| (v.name.as_str(), v.phase.as_str())).collect();
    assert_eq!(
        volumes,
        [("data", "Ready"), ("data", "UnMountedFromPod"), ("root", "")]
    );
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn sync_reports_lost_writes_after_a_failed_change_of_an_interface() {
    let f = Fixture::new();
    let pod = Pod::with_address();
    let networked = |vmi: &Value, state: &str| {
        let mut vmi = vmi.clone();
        vmi["spec"]["networks"] = json!([{"name": "default", "pod": {}}]);
        let interface = json!({"name": "default", "bridge": {}, "state": state});
        vmi["spec"]["domain"]["devices"]["interfaces"] = json!([interface]);
        vmi
    };
    let plain = vmi("loses-no-cable", &[]);
    let (with, data) = with_data(&f, "loses-no-cable");
    let plan = plan(&f, &networked(&plain, "up"));
    let mut vm = f.start_config(&on(&f, &pod, plan)).unwrap();
    plug(&f, &mut vm, &(networked(&with, "up"), data));
    let refused = sync(&f, &mut vm, wants(&networked(&plain, "down"), SAME, &[])).unwrap_err();
    assert_eq!(refused.message(), "there is no cable");
    assert_eq!(vm.info().disks.len(), 1);
    is_reported_once(&f, &mut vm, &networked(&plain, "up"));
    kill(&mut vm);
    f.is_clean(&vm.pids());
}
