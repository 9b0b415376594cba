use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::{CWD, Mode, mkfifoat};

use super::*;
use crate::snapshot::directory::Found;
use crate::snapshot::restore::OpenSnapshot;
use crate::snapshot::{MEMORY, NewSnapshot, STATE, SnapshotDir, SnapshotError, read};

fn home() -> (tempfile::TempDir, PathBuf) {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("snap");
    (home, path)
}

/// Makes a snapshot with a state of 3 and a memory of 4 bytes.
fn make(path: &Path, snapshot: &Snapshot) -> Arc<SnapshotDir> {
    let mut new = NewSnapshot::create(path).unwrap();
    for (name, content) in [(STATE, "abc"), (MEMORY, "abcd")] {
        let mut file = new.file(name).unwrap();
        std::io::Write::write_all(&mut file, content.as_bytes()).unwrap();
    }
    for disk in [
        "disk-root.qcow2",
        "disk-pulled.qcow2",
        "base-pulled.img",
        "disk-scratch.img",
        "disk-copied.img",
    ] {
        new.file(disk).unwrap();
    }
    let snapshot = Snapshot {
        state_bytes: 3,
        memory_bytes: 4,
        ..snapshot.clone()
    };
    new.complete(&snapshot).unwrap();
    new.keep()
}

fn said<T: std::fmt::Debug>(result: Result<T, SnapshotError>, path: &Path) -> String {
    let text = result.unwrap_err().to_string();
    text.replace(path.to_str().unwrap(), "SNAP")
}

#[test]
fn directory_is_private_and_complete_when_kept() {
    let (_home, path) = home();
    let mut new = NewSnapshot::create(&path).unwrap();
    new.file(STATE).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(
        said(read(&path), &path),
        "SNAP is not a complete snapshot: it was interrupted; remove it"
    );
    new.complete(&snapshot()).unwrap();
    assert_eq!(read(&path).unwrap(), snapshot());
    // It is not kept.
    drop(new);
    assert!(!path.exists());
    assert!(said(read(&path), &path).starts_with("SNAP: No such file"));
    make(&path, &snapshot());
    assert!(path.join("snapshot.json").exists() && !path.join("snapshot.json.new").exists());
}

#[test]
fn directory_that_exists_stays() {
    let (_home, path) = home();
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let mut new = NewSnapshot::create(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
    new.file(MEMORY).unwrap();
    drop(new);
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
    // Nothing of another one is touched.
    make(&path, &snapshot());
    let refused = said(NewSnapshot::create(&path), &path);
    assert_eq!(refused, "SNAP is not empty: name a directory that does not exist");
    assert_eq!(read(&path).unwrap().state_bytes, 3);
    assert_eq!(
        said(read(Path::new("/proc/self/net")), &path),
        "/proc/self/net is not a snapshot: it has no snapshot.json"
    );
}

#[test]
fn file_that_comes_before_the_directory_is_private_is_found() {
    let (_home, path) = home();
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let dir = SnapshotDir::open(&path).unwrap();
    let found = dir.take_over_with(|| fs::write(path.join("disk-root.qcow2"), "").unwrap());
    assert_eq!(found.unwrap(), Found::Files);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o755);
}

#[test]
fn foreign_file_does_not_become_the_description() {
    let (home, path) = home();
    let foreign = home.path().join("foreign");
    fs::write(&foreign, "foreign").unwrap();
    fs::set_permissions(&foreign, fs::Permissions::from_mode(0o666)).unwrap();
    let next = path.join("snapshot.json.new");
    let new = NewSnapshot::create(&path).unwrap();
    fs::hard_link(&foreign, &next).unwrap();
    new.complete(&snapshot()).unwrap();
    let is_own = || {
        let description = fs::metadata(path.join("snapshot.json")).unwrap();
        assert_eq!(description.permissions().mode() & 0o777, 0o600);
        assert_ne!(description.ino(), fs::metadata(&foreign).unwrap().ino());
        assert_eq!(fs::read(&foreign).unwrap(), b"foreign");
    };
    is_own();
    let dir = new.keep();
    drop(new);
    fs::hard_link(&foreign, &next).unwrap();
    dir.mark_resumed().unwrap();
    is_own();
}

#[test]
fn hostile_directories_are_refused() {
    let (home, path) = home();
    make(&path, &snapshot());
    let description = path.join("snapshot.json");
    let kept = fs::read(&description).unwrap();
    let foreign = home.path().join("foreign.json");
    fs::write(&foreign, &kept).unwrap();
    fs::remove_file(&description).unwrap();
    symlink(&foreign, &description).unwrap();
    assert!(said(read(&path), &path).starts_with("SNAP/snapshot.json: Too many levels of symbolic links"));
    fs::remove_file(&description).unwrap();
    mkfifoat(CWD, &description, Mode::RUSR | Mode::WUSR).unwrap();
    assert_eq!(
        said(read(&path), &path),
        "SNAP/snapshot.json: it is not a regular file"
    );
    fs::remove_file(&description).unwrap();
    let large = fs::File::create(&description).unwrap();
    large.set_len(1 << 40).unwrap();
    assert_eq!(
        said(read(&path), &path),
        "SNAP/snapshot.json: it is larger than 8 MiB"
    );
    fs::write(&description, &kept).unwrap();
    fs::write(path.join(MEMORY), "abc").unwrap();
    assert_eq!(
        said(OpenSnapshot::open(&path), &path),
        "SNAP/memory has 3 bytes, not 4: the snapshot is damaged"
    );
    fs::write(path.join(MEMORY), "abcd").unwrap();
    let disk = path.join("disk-scratch.img");
    fs::remove_file(&disk).unwrap();
    symlink("../foreign.json", &disk).unwrap();
    let open = OpenSnapshot::open(&path).unwrap();
    assert!(said(open.volumes(), &path).starts_with("SNAP/disk-scratch.img: "));
}

#[test]
fn snapshot_is_shared_unless_a_disk_is_outside() {
    let (_home, path) = home();
    make(&path, &snapshot());
    let first = OpenSnapshot::open(&path).unwrap();
    let second = OpenSnapshot::open(&path).unwrap();
    first.consume().unwrap();
    second.consume().unwrap();
    assert_eq!(read(&path).unwrap().consumed, None);

    let (_home, path) = home();
    let dir = make(&path, &with_data_outside());
    let first = OpenSnapshot::open(&path).unwrap();
    let in_use = "SNAP is in use by another VM or command: try again";
    assert_eq!(said(OpenSnapshot::open(&path), &path), in_use);
    // A VM that has the memory mapped keeps the lock.
    let memory = first.memory.try_clone().unwrap();
    let open = first.dir;
    drop((first.memory, first.state));
    assert_eq!(said(OpenSnapshot::open(&path), &path), in_use);
    open.mark_consumed().unwrap();
    drop(memory);
    assert!(said(OpenSnapshot::open(&path), &path).starts_with("SNAP was restored already at 2"));
    assert!(said(open.mark_consumed(), &path).starts_with("SNAP was restored already at 2"));
    assert!(said(dir.mark_resumed(), &path).starts_with("SNAP was restored already at 2"));
    assert!(!read(&path).unwrap().resumed);
    open.mark_unconsumed().unwrap();
    let consumed = OpenSnapshot::open(&path).unwrap().consume().unwrap().unwrap();
    assert!(said(OpenSnapshot::open(&path), &path).starts_with("SNAP was restored already at 2"));
    consumed.unmark().unwrap();
    assert_eq!(read(&path).unwrap(), OpenSnapshot::open(&path).unwrap().snapshot);
}

#[test]
fn one_of_many_restores_a_snapshot() {
    let (_home, path) = home();
    make(&path, &with_data_outside());
    let open: Vec<SnapshotDir> = (0..8).map(|_| SnapshotDir::open(&path).unwrap()).collect();
    let threads = open.into_iter().map(|dir| {
        std::thread::spawn(move || {
            let resumed = dir.mark_resumed().is_ok();
            let consumed = dir.mark_consumed().is_ok();
            (resumed, consumed)
        })
    });
    let threads: Vec<_> = threads.collect();
    let done: Vec<(bool, bool)> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    // Its VM goes on before anyone can restore it.
    assert!(done.iter().all(|done| *done == (true, false)), "{done:?}");

    let (_home, path) = home();
    make(&path, &with_data_outside());
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let dir = SnapshotDir::open(&path).unwrap();
            std::thread::spawn(move || dir.mark_consumed().is_ok())
        })
        .collect();
    let done = threads
        .into_iter()
        .filter_map(|thread| thread.join().unwrap().then_some(()));
    assert_eq!(done.count(), 1);
}

#[test]
fn snapshot_that_cannot_be_marked_is_removed_when_its_vm_goes_on() {
    let (_home, path) = home();
    let dir = make(&path, &with_data_outside());
    let (description, next) = (path.join("snapshot.json"), path.join("snapshot.json.new"));
    // As on a full disk, the next description cannot be written.
    fs::create_dir_all(next.join("full")).unwrap();
    assert!(said(dir.mark_consumed(), &path).starts_with("SNAP/snapshot.json: "));
    assert_eq!(read(&path).unwrap().consumed, None);
    dir.mark_resumed().unwrap();
    assert!(!description.exists());
    assert!(said(read(&path), &path).starts_with("SNAP is not a complete snapshot"));
    // Neither can be done.
    fs::create_dir_all(description.join("full")).unwrap();
    assert!(said(dir.mark_resumed(), &path).starts_with("SNAP/snapshot.json: it is not a regular file"));
}

#[test]
fn nothing_is_left_of_a_description_that_does_not_get_its_place() {
    let (_home, path) = home();
    let new = NewSnapshot::create(&path).unwrap();
    fs::create_dir_all(path.join("snapshot.json/full")).unwrap();
    assert!(said(new.complete(&snapshot()), &path).starts_with("SNAP/snapshot.json: "));
    assert!(!path.join("snapshot.json.new").exists());
}

#[test]
fn mark_follows_the_directory() {
    let (home, path) = home();
    let dir = make(&path, &with_data_outside());
    let moved = home.path().join("moved");
    fs::rename(&path, &moved).unwrap();
    dir.mark_resumed().unwrap();
    dir.mark_resumed().unwrap();
    assert!(read(&moved).unwrap().resumed);
    let error = said(dir.mark_consumed(), &path);
    assert!(
        error.starts_with("SNAP: the VM was resumed after this snapshot"),
        "{error}"
    );
    fs::remove_dir_all(&moved).unwrap();
    dir.mark_resumed().unwrap();
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
}
