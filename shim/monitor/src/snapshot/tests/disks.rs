use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use husk_vmi::{DeviceType, DiskPlan, DiskSource, FileId, VmPlan};
use husk_volumes::{ImageFormat, ImageHandle, OpenDisk, PathPolicy, ScratchDir, Volumes};

use super::*;
use crate::snapshot::disks::{can_share, not_copied};
use crate::snapshot::format::{BaseContent, DiskContent, SnapshotImage};
use crate::snapshot::{
    DiskCopies, DiskSet, NewSnapshot, OpenDiskRefs, SavedDisk, SnapshotError, UnsavedVolume,
};

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
            .map(|(name, open)| (name, Arc::new(OpenDiskRefs::of(open).unwrap())));
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

fn held(file: &str, format: ImageFormat) -> SnapshotImage {
    SnapshotImage {
        file: file.into(),
        format,
    }
}

fn outside(volume: &str, path: &Path, shareable: bool) -> UnsavedVolume {
    UnsavedVolume {
        volume: volume.into(),
        path: path.display().to_string(),
        shareable,
    }
}

#[test]
fn images_that_no_path_leads_to_are_included() {
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
    let copies = DiskCopies::prepare(&set, &mut new, false).unwrap();
    assert_eq!(copies.unsaved_volumes(), [outside("data", &data, true)]);
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
fn image_outside_that_the_guest_writes_is_synced() {
    let mut rig = Rig::new();
    let data = rig.image("data.img");
    rig.disk("data", DiskSource::File(data), |disk| disk.shareable = true);
    let open = rig.open();
    // The kernel cannot sync it.
    let null = ImageHandle::of(File::open("/dev/null").unwrap()).unwrap();
    let mut kept = OpenDiskRefs::of(&open.disks[0]).unwrap();
    kept.image.as_mut().unwrap().handle = null;
    let mut set = rig.set(&open.disks);
    set.kept.insert("data".to_owned(), Arc::new(kept));
    let synced = |set: &DiskSet| {
        DiskCopies::prepare(set, &mut rig.new_snapshot(), false)
            .unwrap()
            .sync()
    };
    let error = synced(&set).unwrap_err().to_string();
    assert!(
        error.starts_with("volume \"data\": its image was not synced: "),
        "{error}"
    );
    set.plan.disks[0].read_only = true;
    synced(&set).unwrap();
}

#[test]
fn writable_image_is_included_where_extents_can_be_shared() {
    let mut rig = Rig::new();
    let data = rig.image("data.img");
    rig.disk("data", DiskSource::File(data), |_| {});
    let open = rig.open();
    let mut new = rig.new_snapshot();
    let copies = DiskCopies::prepare(&rig.set(&open.disks), &mut new, false).unwrap();
    let copy = rig.home.path().join("snap/disk-data.img");
    let before = fs::metadata(&copy).map(|file| file.len());
    copies.copy(&AtomicBool::new(false), |_, _, _| {}).unwrap();
    // This depends on the file system of temporary files.
    match copies.unsaved_volumes().is_empty() {
        true => {
            assert_eq!(before.unwrap(), 0);
            assert_eq!(&fs::read(copy).unwrap()[4096..4104], b"data.img");
        }
        false => assert!(!copy.exists()),
    }
}

#[test]
fn no_extent_is_shared_before_the_copy() {
    let image = || {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"data", 0).unwrap();
        file
    };
    // A file system with reflinks.
    let clone = |from: &File, to: &File| {
        let mut content = [0; 4];
        from.read_exact_at(&mut content, 0)?;
        to.write_all_at(&content, 0)
    };
    let to = tempfile::tempfile().unwrap();
    assert!(can_share(&image(), &to, clone).unwrap());
    assert_eq!(to.metadata().unwrap().len(), 0);
    let refused = |_: &File, _: &File| Err(rustix::io::Errno::XDEV.into());
    assert!(!can_share(&image(), &to, refused).unwrap());
}

#[test]
fn written_image_is_included_in_full_on_request() {
    // Another file system than the snapshot's: no extents can be shared.
    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    let image = |name: &str| {
        let path = other.path().join(name);
        let file = File::create(&path).unwrap();
        // Allocated in full.
        file.write_all_at(&vec![0; MIB as usize], 0).unwrap();
        path
    };
    let mut rig = Rig::new();
    let (data, shared, fixed) = (image("data.img"), image("shared.img"), image("fixed.img"));
    rig.disk("data", DiskSource::File(data.clone()), |disk| {
        disk.cache = husk_vmi::CacheMode::WriteBack;
    });
    rig.disk("shared", DiskSource::File(shared.clone()), |disk| {
        disk.shareable = true
    });
    rig.disk("fixed", DiskSource::File(fixed), |disk| disk.read_only = true);
    let open = rig.open();
    let set = rig.set(&open.disks);
    let snap = rig.home.path().join("snap");
    let shared = outside("shared", &shared, true);

    let mut new = rig.new_snapshot();
    let copies = DiskCopies::prepare(&set, &mut new, false).unwrap();
    assert_eq!(copies.unsaved_volumes()[0], outside("data", &data, false));
    assert_eq!(copies.unsaved_volumes()[1], shared);
    assert!(!snap.join("disk-data.img").exists());
    drop(new);

    let mut new = rig.new_snapshot();
    let copies = DiskCopies::prepare(&set, &mut new, true).unwrap();
    assert_eq!(copies.unsaved_volumes(), [shared]);
    // What is written up to the copy is in it, and what is written later is not.
    let write = |text: &[u8]| {
        let file = File::from(open.disks[0].file.as_ref().unwrap().try_clone().unwrap());
        file.write_all_at(text, 4096).unwrap();
    };
    write(b"before");
    let last = std::cell::Cell::new(0);
    copies
        .copy(&AtomicBool::new(false), |volume, done, total| {
            assert_eq!((volume, total), ("data", MIB));
            last.set(done);
        })
        .unwrap();
    assert_eq!(last.get(), MIB);
    write(b"behind");
    copies.sync().unwrap();
    let copy = fs::read(snap.join("disk-data.img")).unwrap();
    assert_eq!((copy.len() as u64, &copy[4096..4102]), (MIB, &b"before"[..]));
    let disks = describe(&copies);
    assert_eq!(
        disks["data"].content,
        DiskContent::Held {
            image: held("disk-data.img", ImageFormat::Raw),
            base: None,
            block_sizes: None,
        }
    );
    for name in ["shared", "fixed"] {
        assert!(matches!(disks[name].content, DiskContent::Outside(_)), "{name}");
        assert!(!snap.join(format!("disk-{name}.img")).exists());
    }
}

#[test]
fn image_that_does_not_fit_is_told() {
    let text = |errno: rustix::io::Errno| not_copied("data")(errno.into()).to_string();
    for errno in [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT] {
        let text = text(errno);
        let wanted = "volume \"data\": its image does not fit into the snapshot: ";
        assert!(text.starts_with(wanted) && text.contains("make room"), "{text}");
    }
    assert_eq!(
        text(rustix::io::Errno::IO),
        "volume \"data\": its image was not copied: Input/output error (os error 5)"
    );
}

#[test]
fn disks_that_cannot_be_found_again_are_refused_by_name() {
    let refused = |source: DiskSource, device: DeviceType, reason: &str| {
        let mut rig = Rig::new();
        rig.disk("data", source, |disk| disk.device = device);
        let mut new = rig.new_snapshot();
        let error = DiskCopies::prepare(&rig.set(&[]), &mut new, false)
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
    let copies = DiskCopies::prepare(&rig.set(&open.disks), &mut new, false).unwrap();
    let cancelled = AtomicBool::new(false);
    let ended = copies.copy(&cancelled, |volume, _, _| {
        assert_eq!(volume, "one");
        cancelled.store(true, Ordering::Relaxed);
    });
    assert!(matches!(ended, Err(SnapshotError::Volume { volume, .. }) if volume == "one"));
}
