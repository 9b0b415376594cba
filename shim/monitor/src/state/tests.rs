use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::*;

fn runtime() -> (tempfile::TempDir, RuntimeDir) {
    let home = tempfile::tempdir().unwrap();
    let runtime = RuntimeDir::at(home.path().join("husk"));
    (home, runtime)
}

#[test]
fn claimed_vm_is_found_until_removed() {
    let (_home, runtime) = runtime();
    assert_eq!(runtime.list().unwrap(), []);
    let claimed = runtime.claim("default", "demo").unwrap();
    fs::write(claimed.dir().plan(), "{}").unwrap();
    assert_eq!(runtime.list().unwrap(), [claimed.dir().clone()]);
    let found = runtime.find("default", "demo").unwrap();
    assert_eq!(found.monitor_pid(), Some(std::process::id()));
    assert!(matches!(
        runtime.find("default", "other"),
        Err(StateError::NotFound { .. })
    ));
    assert!(matches!(
        runtime.claim("default", "demo"),
        Err(StateError::Exists { .. })
    ));
    assert_eq!(runtime.remove_abandoned().unwrap(), []);

    claimed.remove().unwrap();
    assert_eq!(runtime.list().unwrap(), []);
    assert!(!runtime.path().join("default").exists());
}

#[test]
fn abandoned_directory_is_removed_or_reused() {
    let (_home, runtime) = runtime();
    let mut left = None;
    for _ in 0..2 {
        let claimed = runtime.claim("default", "demo").unwrap();
        fs::write(claimed.dir().console_log(), "hello").unwrap();
        let dir = claimed.dir().clone();
        drop(claimed);
        left = Some(dir.clone());
        assert!(!dir.is_live() && dir.path().exists());
        assert!(matches!(
            runtime.find("default", "demo"),
            Err(StateError::NotFound { .. })
        ));
    }
    assert_eq!(runtime.remove_abandoned().unwrap(), Vec::from_iter(left));
    assert!(!runtime.path().join("default").exists());
    assert_eq!(runtime.remove_abandoned().unwrap(), []);
}

#[test]
fn foreign_files_are_not_deleted() {
    let (_home, runtime) = runtime();
    drop(runtime.claim("default", "dead").unwrap());
    let foreign = runtime.path().join("home/user");
    fs::create_dir_all(&foreign).unwrap();
    fs::write(foreign.join("thesis.tex"), "x").unwrap();
    // A pid file beside it changes nothing.
    fs::write(foreign.join("monitor.pid"), "1").unwrap();
    let dead = runtime.path().join("default/dead");
    fs::write(dead.join("kept"), "x").unwrap();
    fs::create_dir(runtime.removal_path()).unwrap();
    fs::write(runtime.removal_path().join("kept"), "x").unwrap();
    assert_eq!(runtime.remove_abandoned().unwrap(), []);
    for path in [
        foreign.join("thesis.tex"),
        foreign.join("monitor.pid"),
        dead.join("kept"),
        dead.join("monitor.pid"),
        runtime.removal_path().join("kept"),
    ] {
        assert!(path.exists(), "{}", path.display());
    }
    let error = runtime.claim("default", "dead").unwrap_err().to_string();
    assert!(
        error.ends_with("/kept was not made by Husk: move it away"),
        "{error}"
    );
}

fn named_by_the_user(path: &Path) -> RuntimeDir {
    RuntimeDir {
        path: path.into(),
        origin: Origin::Variable,
    }
}

#[test]
fn unsuitable_directory_is_refused_and_left_alone() {
    let home = tempfile::tempdir().unwrap();
    let used = home.path().join("used");
    fs::create_dir_all(used.join("a/b")).unwrap();
    fs::write(used.join("a/b/monitor.pid"), "1\n").unwrap();
    let open = home.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o1777)).unwrap();
    let file = home.path().join("file");
    fs::write(&file, "x").unwrap();
    let hint = ": set HUSK_RUNTIME_DIR to an absolute path of your own that is empty or does not exist";
    for (path, why) in [
        (Path::new("run"), "is a relative path"),
        (&used, "is used for something else (it contains \"a\")"),
        (&open, "can be written by other users"),
        (&file, "is not a directory"),
    ] {
        let runtime = named_by_the_user(path);
        let wanted = format!("HUSK_RUNTIME_DIR={} {why}{hint}", path.display());
        assert_eq!(runtime.remove_abandoned().unwrap_err().to_string(), wanted);
        assert!(runtime.check().is_err() && !path.join(LOCK).exists());
    }
    assert!(used.join("a/b/monitor.pid").exists());
    // An empty lock file, which other programs have too, is no mark.
    fs::write(used.join(LOCK), "").unwrap();
    assert!(named_by_the_user(&used).check().is_err());
}

#[test]
fn marked_directory_may_hold_other_files() {
    let home = tempfile::tempdir().unwrap();
    let runtime = named_by_the_user(home.path());
    assert_eq!(runtime.remove_abandoned().unwrap(), []);
    assert!(
        !home.path().join(LOCK).exists(),
        "nothing to remove, nothing made"
    );
    // A crash before the mark is written does no harm.
    fs::write(home.path().join(LOCK), "Hu").unwrap();
    drop(runtime.claim("default", "demo").unwrap());
    fs::write(home.path().join("notes.txt"), "x").unwrap();
    assert_eq!(runtime.remove_abandoned().unwrap().len(), 1);
    runtime.claim("default", "demo").unwrap().remove().unwrap();
}

#[test]
fn names_stay_inside_the_directory() {
    let (_home, runtime) = runtime();
    let long = "n".repeat(254);
    for bad in ["", ".", "..", "../x", "a/b", ".lock", "a\0", &long] {
        assert!(
            matches!(runtime.find("default", bad), Err(StateError::BadName(_))),
            "{bad:?}"
        );
        assert!(
            matches!(runtime.claim(bad, "demo"), Err(StateError::BadName(_))),
            "{bad:?}"
        );
    }
    assert!(!runtime.path().exists());
}

#[test]
fn state_recovers_after_crash_between_mkdir_and_lock() {
    let (_home, runtime) = runtime();
    fs::create_dir_all(runtime.path().join("default/demo")).unwrap();
    assert_eq!(runtime.remove_abandoned().unwrap(), []);
    runtime.claim("default", "demo").unwrap().remove().unwrap();
}

#[test]
fn directories_are_private() {
    let (_home, runtime) = runtime();
    let claimed = runtime.claim("default", "demo").unwrap();
    for path in [runtime.path(), claimed.dir().path()] {
        assert_eq!(fs::metadata(path).unwrap().mode() & 0o777, 0o700);
    }
}

#[test]
fn interrupted_removal_is_completed() {
    let (_home, runtime) = runtime();
    let claimed = runtime.claim("default", "demo").unwrap();
    let removal_path = runtime.removal_path();
    fs::rename(claimed.dir().path(), &removal_path).unwrap();
    drop(claimed);
    assert_eq!(runtime.list().unwrap(), []);
    runtime.claim("default", "other").unwrap().remove().unwrap();
    assert!(!removal_path.exists());
    fs::create_dir(&removal_path).unwrap();
    fs::write(removal_path.join("plan.json"), "{}").unwrap();
    assert_eq!(runtime.remove_abandoned().unwrap(), []);
    assert!(!removal_path.exists());
}

#[test]
fn runtime_directory_is_removed_after_the_last_vm() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = RuntimeDir::at(dir.path().join("husk"));
    assert!(!runtime.remove_if_unused().unwrap());
    let vm = runtime.claim(PODS, "a").unwrap();
    assert!(!runtime.remove_if_unused().unwrap());
    vm.remove().unwrap();
    runtime
        .record_end("a", &husk_proto::shim::v1::Status::default())
        .unwrap();
    assert!(runtime.remove_if_unused().unwrap());
    assert!(!runtime.path().exists());
}

#[test]
fn a_runtime_directory_that_is_mounted_is_emptied() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = RuntimeDir::at(dir.path().join("husk"));
    let vm = runtime.claim(PODS, "a").unwrap();
    assert!(!runtime.empty_if_unused().unwrap());
    vm.remove().unwrap();
    assert!(runtime.empty_if_unused().unwrap());
    assert_eq!(fs::read_dir(runtime.path()).unwrap().count(), 0);
}

#[test]
fn a_runtime_directory_with_other_files_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    for other in ["notes", "pods/notes"] {
        let runtime = RuntimeDir::at(dir.path().join("husk"));
        runtime.claim(PODS, "a").unwrap().remove().unwrap();
        fs::create_dir_all(runtime.path().join(PODS)).unwrap();
        let other = runtime.path().join(other);
        fs::write(&other, "").unwrap();
        assert!(!runtime.remove_if_unused().unwrap());
        fs::remove_file(&other).unwrap();
        assert!(runtime.remove_if_unused().unwrap());
    }
}

#[test]
fn sockets_of_programs_that_wait_for_the_guest_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = RuntimeDir::at(dir.path().join("husk"));
    let vm = runtime.claim("default", "a").unwrap();
    let path = vm.dir().path().to_owned();
    for name in ["vsock.sock", "vsock.sock_0", "vsock.sock_4294967295"] {
        fs::write(path.join(name), "").unwrap();
    }
    vm.remove().unwrap();
    assert!(!path.exists());
    for name in [
        "vsock.sock_",
        "vsock.sock_+1",
        "vsock.sock_4294967296",
        "vsock.sock_1.log",
    ] {
        let vm = runtime.claim("default", "a").unwrap();
        let other = path.join(name);
        fs::write(&other, "").unwrap();
        vm.remove().unwrap_err();
        fs::remove_file(&other).unwrap();
        assert_eq!(runtime.remove_abandoned().unwrap().len(), 1);
    }
}
