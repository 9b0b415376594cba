//! Hotplug and growth of volumes.

use std::fs::File;
use std::path::{Path, PathBuf};

use husk_proto::shim::v1::{
    AddVolumeRequest, AddVolumeResponse, KillRequest, PauseRequest, RemoveVolumeRequest, ResumeRequest,
};
use husk_vmi::{DiskSource, ScsiController, VmPlan};
use tonic::{Code, Status};

use super::fixture::{Fixture, Vm, disk, eventually, plan};

const MIB: u64 = 1 << 20;

/// A VM with a SCSI controller.
fn vm(name: &str) -> VmPlan {
    VmPlan {
        scsi: Some(ScsiController { queues: 1 }),
        ..plan(name)
    }
}

fn image(f: &Fixture, name: &str) -> PathBuf {
    let path = f.home().join(name);
    File::create(&path).unwrap().set_len(MIB).unwrap();
    path
}

fn request(name: &str, path: &Path) -> AddVolumeRequest {
    AddVolumeRequest {
        name: name.into(),
        path: path.to_str().unwrap().into(),
        ..AddVolumeRequest::default()
    }
}

fn add(f: &Fixture, vm: &mut Vm<'_>, request: AddVolumeRequest) -> Result<AddVolumeResponse, Status> {
    f.wait(vm.client.add_volume(request))
        .map(tonic::Response::into_inner)
}

fn remove(f: &Fixture, vm: &mut Vm<'_>, name: &str) -> Result<String, Status> {
    let request = RemoveVolumeRequest { name: name.into() };
    let removed = f.wait(vm.client.remove_volume(request))?;
    Ok(removed.into_inner().flush_error)
}

fn kept(vm: &Vm<'_>) -> Vec<String> {
    let plan: VmPlan = serde_json::from_slice(&std::fs::read(vm.dir.plan()).unwrap()).unwrap();
    plan.disks
        .iter()
        .map(|disk| format!("{} {}", disk.name, disk.target))
        .collect()
}

fn refusal<T: std::fmt::Debug>(result: Result<T, Status>) -> (Code, String) {
    let status = result.unwrap_err();
    (status.code(), status.message().to_owned())
}

fn kill(vm: &mut Vm<'_>) {
    vm.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
}

pub fn volume_is_plugged_and_unplugged() {
    let f = Fixture::new();
    let (one, two) = (image(&f, "one.img"), image(&f, "two.img"));
    let mut vm = f.start(vm("demo")).unwrap();
    assert_eq!(add(&f, &mut vm, request("one", &one)).unwrap().lun, 0);
    let mut named = request("two", &two);
    named.serial = "S-2".into();
    assert_eq!(add(&f, &mut vm, named.clone()).unwrap().lun, 1);
    // The same volume is present already.
    assert_eq!(add(&f, &mut vm, named).unwrap().lun, 1);
    assert_eq!(kept(&vm), ["one sda", "two sdb"]);
    eventually("the VMM has both", || {
        let said = vm.said();
        said.contains("added one one at 0:0 of 1048576 bytes\n")
            && said.contains("added two S-2 at 0:1 of 1048576 bytes\n")
    });

    assert_eq!(remove(&f, &mut vm, "one").unwrap(), "");
    assert_eq!(kept(&vm), ["two sdb"]);
    let gone = refusal(remove(&f, &mut vm, "one"));
    let text = "Unable to remove volume [one] because it does not exist";
    assert_eq!(gone, (Code::NotFound, text.into()));
    // Its image is unlocked, and its LUN is the lowest free one.
    assert_eq!(add(&f, &mut vm, request("again", &one)).unwrap().lun, 0);
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn removal_while_paused_completes_on_resume() {
    let f = Fixture::new();
    let (one, two) = (image(&f, "one.img"), image(&f, "two.img"));
    let mut vm = f.start(vm("demo")).unwrap();
    add(&f, &mut vm, request("one", &one)).unwrap();
    f.wait(vm.client.pause(PauseRequest {})).unwrap();
    let (code, text) = refusal(remove(&f, &mut vm, "one"));
    assert_eq!(code, Code::DeadlineExceeded);
    assert!(text.contains("it is removed at resume"), "{text}");
    // Other requests are handled meanwhile. A volume being removed does not count as present.
    let (code, text) = refusal(add(&f, &mut vm, request("one", &one)));
    assert_eq!(
        (code, text.as_str()),
        (Code::FailedPrecondition, "volume \"one\" is being removed")
    );
    add(&f, &mut vm, request("two", &two)).unwrap();
    assert_eq!(kept(&vm), ["one sda", "two sdb"]);
    f.wait(vm.client.resume(ResumeRequest {})).unwrap();
    eventually("it has gone", || kept(&vm) == ["two sdb"]);
    add(&f, &mut vm, request("one", &one)).unwrap();
    assert_eq!(kept(&vm), ["two sdb", "one sda"]);
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn refused_volume_changes_nothing() {
    let f = Fixture::new();
    let (mine, other) = (image(&f, "mine.img"), image(&f, "other.img"));
    let mut with_disk = vm("demo");
    with_disk.disks.push(disk("root", DiskSource::File(mine.clone())));
    let mut vm = f.start(with_disk).unwrap();
    let mut second = f.start(self::vm("second")).unwrap();
    add(&f, &mut second, request("data", &other)).unwrap();

    let mut refused = |name: &str, path: &Path| refusal(add(&f, &mut vm, request(name, path)));
    let (code, text) = refused("data", &other);
    assert_eq!(code, Code::FailedPrecondition);
    let wanted = format!(
        "volume \"data\": {} is in use by another VM or program",
        other.display()
    );
    assert_eq!(text, wanted);
    let (code, text) = refused("data", &f.home().join("missing"));
    assert_eq!(code, Code::FailedPrecondition);
    assert!(text.contains("No such file or directory"), "{text}");
    let (_, text) = refused("data", Path::new("/dev/null"));
    assert!(
        text.contains("is a character device, not an image file or a block device"),
        "{text}"
    );
    let (code, text) = refused("root", &other);
    let wanted = "Unable to add volume [root] because volume with that name already exists";
    assert_eq!((code, text.as_str()), (Code::AlreadyExists, wanted));
    let (code, text) = refused("data", &mine);
    assert_eq!(code, Code::AlreadyExists);
    assert!(text.ends_with("because it already exists"), "{text}");
    assert_eq!(refused("Data", &other).0, Code::InvalidArgument);
    assert_eq!(refused("data", Path::new("disk.img")).0, Code::InvalidArgument);
    let fixed = refusal(remove(&f, &mut vm, "root"));
    let text = "Unable to remove volume [root] because it is not hotpluggable";
    assert_eq!(fixed, (Code::FailedPrecondition, text.into()));
    assert_eq!(kept(&vm), ["root vda"]);

    // A refused image is closed, and so unlocked.
    let mut full = f.start(self::vm("full")).unwrap();
    let spare = image(&f, "spare.img");
    let refused = refusal(add(&f, &mut full, request("data", &spare)));
    assert_eq!(refused, (Code::ResourceExhausted, "too many disks".into()));
    add(&f, &mut vm, request("data", &spare)).unwrap();
    // Without a controller no volume can be plugged.
    let mut fixed = f.start(plan("fixed")).unwrap();
    let refused = refusal(add(&f, &mut fixed, request("more", &image(&f, "more.img"))));
    assert_eq!(refused.0, Code::FailedPrecondition);
    assert!(refused.1.contains("disableHotplug"), "{}", refused.1);
    for vm in [&mut vm, &mut second, &mut full, &mut fixed] {
        kill(vm);
    }
    f.is_clean(&[]);
}

pub fn volume_is_shown_at_the_vmms_address() {
    let f = Fixture::new();
    let mut vm = f.start(vm("clings-and-loses")).unwrap();
    let added = add(&f, &mut vm, request("data", &image(&f, "data.img"))).unwrap();
    assert_eq!((added.target, added.lun), (0, 2));
    assert_eq!(kept(&vm), ["data sdc"]);
    assert_eq!(remove(&f, &mut vm, "data").unwrap(), "it is lost");
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn grown_file_resizes_the_disk() {
    let f = Fixture::new();
    let (root, data) = (image(&f, "root.img"), image(&f, "data.img"));
    let mut with_disk = vm("demo");
    with_disk.disks.push(disk("root", DiskSource::File(root.clone())));
    let mut vm = f.start(with_disk).unwrap();
    add(&f, &mut vm, request("data", &data)).unwrap();
    for path in [&root, &data] {
        File::options()
            .write(true)
            .open(path)
            .unwrap()
            .set_len(3 * MIB)
            .unwrap();
    }
    for name in ["root", "data"] {
        eventually("the guest hears of it", || {
            vm.said().contains(&format!("{name} has 3145728 bytes now\n"))
        });
    }
    remove(&f, &mut vm, "data").unwrap();
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn volume_that_was_added_too_late_is_removed_before_the_next() {
    let f = Fixture::new();
    let mut vm = f.start(vm("adds-late-loses")).unwrap();
    let request = || request("data", &image(&f, "data.img"));
    let late = refusal(add(&f, &mut vm, request()));
    assert_eq!(late, (Code::DeadlineExceeded, "it takes long".into()));
    let early = refusal(add(&f, &mut vm, request()));
    let wanted = "volume \"data\" is being removed";
    assert_eq!(early, (Code::FailedPrecondition, wanted.into()));
    eventually("it is added", || add(&f, &mut vm, request()).is_ok());
    std::thread::sleep(std::time::Duration::from_millis(1500));
    // The VMM still has the disk, and reports how its last flush ended.
    assert_eq!(remove(&f, &mut vm, "data").unwrap(), "it is lost");
    vm.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
    f.is_clean(&vm.pids());
}
