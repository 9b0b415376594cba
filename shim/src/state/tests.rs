use super::*;

fn runtime() -> (tempfile::TempDir, RuntimeDir) {
    let home = tempfile::tempdir().unwrap();
    let runtime = RuntimeDir::at(home.path().join("husk"));
    (home, runtime)
}

#[test]
fn a_claimed_vm_is_found_until_it_is_removed() {
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
    assert_eq!(runtime.sweep().unwrap(), []);

    claimed.remove().unwrap();
    assert_eq!(runtime.list().unwrap(), []);
    assert!(!runtime.path().join("default").exists());
}

#[test]
fn what_a_dead_monitor_left_is_swept_or_taken_over() {
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
    assert_eq!(runtime.sweep().unwrap(), Vec::from_iter(left));
    assert!(!runtime.path().join("default").exists());
    assert_eq!(runtime.sweep().unwrap(), []);
}

#[test]
fn a_sweep_deletes_nothing_husk_did_not_make() {
    let (_home, runtime) = runtime();
    drop(runtime.claim("default", "dead").unwrap());
    let foreign = runtime.path().join("home/user");
    fs::create_dir_all(&foreign).unwrap();
    fs::write(foreign.join("thesis.tex"), "x").unwrap();
    let kept = runtime.path().join("default/dead/kept");
    fs::write(&kept, "x").unwrap();
    assert_eq!(runtime.sweep().unwrap(), []);
    assert!(kept.exists() && foreign.join("thesis.tex").exists());
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
fn a_crash_between_mkdir_and_lock_blocks_nothing() {
    let (_home, runtime) = runtime();
    fs::create_dir_all(runtime.path().join("default/demo")).unwrap();
    assert_eq!(runtime.sweep().unwrap(), []);
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
fn a_removal_that_was_cut_short_is_completed() {
    let (_home, runtime) = runtime();
    let claimed = runtime.claim("default", "demo").unwrap();
    let aside = runtime.aside();
    fs::rename(claimed.dir().path(), &aside).unwrap();
    drop(claimed);
    assert_eq!(runtime.list().unwrap(), []);
    runtime.claim("default", "other").unwrap().remove().unwrap();
    assert!(!aside.exists());
    fs::create_dir(&aside).unwrap();
    fs::write(aside.join("plan.json"), "{}").unwrap();
    assert_eq!(runtime.sweep().unwrap(), []);
    assert!(!aside.exists());
}
