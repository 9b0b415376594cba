use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use husk_vmi::{DeviceType, DiskPlan, DiskSource, FileId, VmPlan};
use husk_volumes::{ImageFormat, OpenDisk, PathPolicy, ScratchDir, Volumes};

use super::*;
use crate::snapshot::format::{BaseContent, DiskContent, HeldImage};
use crate::snapshot::{DiskCopies, DiskSet, KeptDisk, NewSnapshot, SavedDisk, SnapshotError};

const MIB: u64 = 1 << 20;

struct Rig {
    home: tempfile::TempDir,
    plan: VmPlan,
}

impl Rig {
    fn new() -> Rig {
        let mut plan = with_data_outside().plan;
        plan.disks.clear();
        plan.boot = husk_vmi::BootPlan::Disks {
            order: Vec::new(),
            append: None,
        };
        Rig {
            home: tempfile::tempdir().unwrap(),
            plan,
        }
    }

    fn image(&self, name: &str) -> PathBuf {
        let path = self.home.path().join(name);
        let file = File::create(&path).unwrap();
        file.set_len(MIB).unwrap();
        file.write_all_at(name.as_bytes(), 4096).unwrap();
        path
    }

    fn disk(&mut self, name: &str, source: DiskSource, change: impl FnOnce(&mut DiskPlan)) {
        let mut disk = with_data_outside().plan.disks[3].clone();
        disk.name = name.to_owned();
        disk.source = source;
        change(&mut disk);
        self.plan.disks.push(disk);
    }

    fn open(&self) -> Volumes {
        let scratch = ScratchDir::at(self.home.path());
        husk_volumes::open(&self.plan, &scratch, &PathPolicy::Caller, |_| {}).unwrap()
    }

    fn set(&self, open: &[OpenDisk]) -> DiskSet {
        let names = self.plan.disks.iter().map(|disk| disk.name.clone());
        let kept = names
            .zip(open)
            .map(|(name, open)| (name, Arc::new(KeptDisk::of(open).unwrap())));
        DiskSet {
            plan: self.plan.clone(),
            plugged: ["data".to_owned()].into(),
            kept: kept.collect(),
        }
    }

    fn new_snapshot(&self) -> NewSnapshot {
        NewSnapshot::create(&self.home.path().join("snap")).unwrap()
    }
}

fn describe(copies: &DiskCopies) -> HashMap<String, SavedDisk> {
    let disks = copies.describe().unwrap().into_iter();
    disks.map(|disk| (disk.name.clone(), disk)).collect()
}

fn held(file: &str, format: ImageFormat) -> HeldImage {
    HeldImage {
        file: file.into(),
        format,
    }
}

#[test]
fn images_that_no_path_leads_to_travel() {
    let mut rig = Rig::new();
    let (root, data, fixed) = (
        rig.image("root.img"),
        rig.image("data.img"),
        rig.image("fixed.img"),
    );
    let gone = rig.image("gone.img");
    rig.disk("root", DiskSource::File(root), |disk| disk.overlay = true);
    rig.disk("over-gone", DiskSource::File(gone.clone()), |disk| {
        disk.overlay = true
    });
    rig.disk("scratch", DiskSource::EmptyDisk { capacity_bytes: MIB }, |_| {});
    rig.disk("fixed", DiskSource::File(fixed), |disk| disk.read_only = true);
    rig.disk("data", DiskSource::File(data.clone()), |disk| {
        disk.shareable = true
    });
    rig.disk("drive", DiskSource::Empty, |disk| {
        disk.device = DeviceType::Cdrom { tray_open: false };
    });
    rig.disk(
        "files",
        DiskSource::Files {
            dir: None,
            label: "files".into(),
        },
        |disk| disk.read_only = true,
    );
    let open = rig.open();
    let write = |n: usize, text: &str| {
        let file = File::from(open.disks[n].file.as_ref().unwrap().try_clone().unwrap());
        // Without O_DIRECT, which needs an aligned buffer.
        rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::empty()).unwrap();
        file.write_all_at(text.as_bytes(), 0).unwrap();
    };
    fs::remove_file(gone).unwrap();
    let set = rig.set(&open.disks);
    let mut new = rig.new_snapshot();
    let copies = DiskCopies::prepare(&set, &mut new).unwrap();
    let path = data.display().to_string();
    assert_eq!(copies.written_outside(), [("data".to_owned(), path)]);
    // What is written up to the copy is in it.
    write(0, "overlay");
    write(2, "scratch");
    write(4, "data");
    copies.copy(&AtomicBool::new(false), |_, _, _| {}).unwrap();
    copies.sync().unwrap();
    let disks = describe(&copies);
    let snap = rig.home.path().join("snap");
    let content = |name: &str| fs::read(snap.join(name)).unwrap();
    assert_eq!(&content("disk-root.qcow2")[..7], b"overlay");
    assert_eq!(&content("disk-scratch.img")[..7], b"scratch");
    assert_eq!(content("disk-scratch.img").len() as u64, MIB);
    assert_eq!(&content("base-over-gone.img")[4096..4104], b"gone.img");
    assert!(content("disk-files.img").windows(5).any(|part| part == b"CD001"));
    match &disks["root"].content {
        DiskContent::Held {
            image,
            base: Some(BaseContent::Outside(identity)),
            ..
        } => assert_eq!(
            (image, identity.bytes),
            (&held("disk-root.qcow2", ImageFormat::Qcow2), MIB)
        ),
        other => panic!("{other:?}"),
    }
    match &disks["over-gone"].content {
        DiskContent::Held {
            base: Some(BaseContent::Held(base)),
            ..
        } => assert_eq!(base, &held("base-over-gone.img", ImageFormat::Raw)),
        other => panic!("{other:?}"),
    }
    assert!(matches!(disks["fixed"].content, DiskContent::Outside(_)));
    assert!(matches!(disks["drive"].content, DiskContent::Remade));
    assert!(disks["data"].plugged && !disks["root"].plugged);
    // The identity is that after the last write.
    let now = husk_volumes::FileIdentity::of(File::open(&data).unwrap()).unwrap();
    assert_eq!(disks["data"].content, DiskContent::Outside(now));
    drop(new);
    assert!(!snap.exists());
}

#[test]
fn writable_image_travels_where_extents_can_be_shared() {
    let mut rig = Rig::new();
    let data = rig.image("data.img");
    rig.disk("data", DiskSource::File(data), |_| {});
    let open = rig.open();
    let mut new = rig.new_snapshot();
    let copies = DiskCopies::prepare(&rig.set(&open.disks), &mut new).unwrap();
    copies.copy(&AtomicBool::new(false), |_, _, _| {}).unwrap();
    let copy = rig.home.path().join("snap/disk-data.img");
    // This depends on the file system of temporary files.
    match copies.written_outside().is_empty() {
        true => assert_eq!(&fs::read(copy).unwrap()[4096..4104], b"data.img"),
        false => assert!(!copy.exists()),
    }
}

#[test]
fn disks_that_cannot_be_found_again_are_refused_by_name() {
    let refused = |source: DiskSource, device: DeviceType, reason: &str| {
        let mut rig = Rig::new();
        rig.disk("data", source, |disk| disk.device = device);
        let mut new = rig.new_snapshot();
        let error = DiskCopies::prepare(&rig.set(&[]), &mut new)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(&format!("volume \"data\": {reason}")),
            "{error}"
        );
    };
    let file = FileId { device: 1, inode: 2 };
    refused(
        DiskSource::Descriptor(file),
        DeviceType::Disk,
        "it was plugged as an open file",
    );
    let lun = DeviceType::Lun { reservation: false };
    refused(DiskSource::File("/dev/sda".into()), lun, "a `lun`");
    refused(
        DiskSource::File("/data.img".into()),
        DeviceType::Disk,
        "its image could not be opened again",
    );
}

#[test]
fn copy_ends_when_it_is_cancelled() {
    let mut rig = Rig::new();
    rig.disk("one", DiskSource::EmptyDisk { capacity_bytes: MIB }, |_| {});
    rig.disk("two", DiskSource::EmptyDisk { capacity_bytes: MIB }, |_| {});
    let open = rig.open();
    let mut new = rig.new_snapshot();
    let copies = DiskCopies::prepare(&rig.set(&open.disks), &mut new).unwrap();
    let cancelled = AtomicBool::new(false);
    let ended = copies.copy(&cancelled, |volume, _, _| {
        assert_eq!(volume, "one");
        cancelled.store(true, Ordering::Relaxed);
    });
    assert!(matches!(ended, Err(SnapshotError::Volume { volume, .. }) if volume == "one"));
}
