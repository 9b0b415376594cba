use std::os::unix::net::UnixListener;
use std::time::Instant;

use oci_spec::runtime::LinuxResources;

use super::*;

/// A directory that looks like a cgroup with all controllers.
fn fake() -> (tempfile::TempDir, Cgroup) {
    let dir = tempfile::tempdir().unwrap();
    let mut cgroup = Cgroup::at(dir.path(), Path::new("kubepods/pod1/c"));
    cgroup.create(None).unwrap();
    for name in [
        "memory.max",
        "memory.swap.max",
        "memory.low",
        "cpu.weight",
        "cpu.max",
        "cpuset.cpus",
        "pids.max",
        "hugetlb.2MB.max",
        "memory.high",
    ] {
        fs::write(cgroup.path().join(name), "").unwrap();
    }
    (dir, cgroup)
}

fn resources(json: &str) -> LinuxResources {
    serde_json::from_str(json).unwrap()
}

#[test]
fn limits_become_files() {
    let (_dir, cgroup) = fake();
    let all = r#"{"memory": {"limit": 1000, "swap": 1500, "reservation": 10},
        "cpu": {"shares": 1024, "quota": 50000, "period": 100000, "cpus": "0-1"}, "pids": {"limit": 100},
        "hugepageLimits": [{"pageSize": "2MB", "limit": 4194304}, {"pageSize": "1GB", "limit": 0}],
        "unified": {"memory.high": "900"}}"#;
    cgroup.set_limits(&resources(all)).unwrap();
    let read = |name: &str| fs::read_to_string(cgroup.path().join(name)).unwrap();
    assert_eq!(
        ["memory.max", "memory.swap.max", "memory.low", "memory.high"].map(read),
        ["1000", "500", "10", "900"]
    );
    assert_eq!(
        ["cpu.weight", "cpu.max", "cpuset.cpus"].map(read),
        ["39", "50000 100000", "0-1"]
    );
    assert_eq!(["pids.max", "hugetlb.2MB.max"].map(read), ["100", "4194304"]);
    let bad = cgroup.set_limits(&resources(r#"{"unified": {"cgroup.procs": "1"}}"#));
    assert!(bad.unwrap_err().to_string().contains("is not a cgroup file"));
}

#[test]
fn unlimited_memory_lifts_the_limit_of_swap() {
    let (_dir, cgroup) = fake();
    let swap = || fs::read_to_string(cgroup.path().join("memory.swap.max")).unwrap();
    for (update, wanted) in [
        (r#"{"limit": -1, "swap": -1}"#, "max"),
        (r#"{"limit": -1}"#, "max"),
        (r#"{"swap": -1}"#, "max"),
        (r#"{"limit": -1, "swap": 700}"#, "700"),
        // Nothing is said about swap.
        (r#"{"limit": 2000}"#, "500"),
        (r#"{"swap": 700}"#, "500"),
    ] {
        let limited = r#"{"memory": {"limit": 1000, "swap": 1500}}"#;
        cgroup.set_limits(&resources(limited)).unwrap();
        assert_eq!(swap(), "500");
        let update = format!(r#"{{"memory": {update}}}"#);
        cgroup.set_limits(&resources(&update)).unwrap();
        assert_eq!(swap(), wanted, "{update}");
    }
}

#[test]
fn a_limit_that_cannot_be_kept_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut cgroup = Cgroup::at(dir.path(), Path::new("c"));
    cgroup.create(None).unwrap();
    let error = cgroup
        .set_limits(&resources(r#"{"memory": {"limit": 1000}}"#))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "{}/memory.max does not exist, so memory cannot be limited: enable the memory controller of cgroup version 2",
            cgroup.path().display()
        )
    );
    // Limits that are zero or the default.
    let nothing = r#"{"memory": {"limit": 0}, "cpu": {"shares": 2, "quota": 0}, "pids": {"limit": 0}}"#;
    cgroup.set_limits(&resources(nothing)).unwrap();
}

#[test]
fn statistics_are_read() {
    let (_dir, cgroup) = fake();
    for (name, text) in [
        ("memory.current", "4096\n"),
        ("memory.max", "max\n"),
        ("memory.stat", "anon 10\nfile 20\ninactive_file 5\n"),
        ("memory.events", "low 0\noom 2\noom_kill 1\n"),
        ("cpu.stat", "usage_usec 7\nuser_usec 4\n"),
        ("pids.current", "3\n"),
    ] {
        fs::write(cgroup.path().join(name), text).unwrap();
    }
    let stats = cgroup.stats();
    assert_eq!((stats.memory.usage, stats.memory.limit), (4096, None));
    assert_eq!((stats.memory.file, stats.memory.inactive_file), (20, 5));
    assert_eq!((stats.cpu.usage_usec, stats.cpu.user_usec, stats.pids), (7, 4, 3));
    assert_eq!((cgroup.oom_kills(), stats.memory.oom), (1, 2));
}

#[test]
fn remove_ignores_missing_cgroups_and_keeps_the_root() {
    let dir = tempfile::tempdir().unwrap();
    Cgroup::at(dir.path(), Path::new("gone")).remove().unwrap();
    Cgroup::at(dir.path(), Path::new("")).remove().unwrap();
    let mut cgroup = Cgroup::at(dir.path(), Path::new("a/b"));
    cgroup.create(None).unwrap();
    fs::create_dir(cgroup.path().join("below")).unwrap();
    cgroup.remove().unwrap();
    assert!(!cgroup.path().exists() && dir.path().join("a").exists());
}

#[test]
fn a_process_does_not_kill_the_cgroup_that_it_is_in() {
    let (_dir, cgroup) = fake();
    let kill = cgroup.path().join("cgroup.kill");
    for own in ["kubepods/pod1/c", "kubepods/pod1/c/below"] {
        fs::write(&kill, "").unwrap();
        let own = format!("1:name=systemd:/\n0::/{own}\n");
        cgroup.kill_from(&own);
        let error = cgroup.remove_by(&SystemdClient::default(), &own).unwrap_err();
        assert!(matches!(error, CgroupError::OwnCgroup(_)), "{error}");
        assert_eq!(fs::read_to_string(&kill).unwrap(), "", "{own}");
    }
    for own in [
        "",
        "kubepods/pod1",
        "kubepods/pod1/c2",
        "kubepods/pod1/c (deleted)",
    ] {
        fs::write(&kill, "").unwrap();
        cgroup.kill_from(&format!("0::/{own}\n"));
        assert_eq!(fs::read_to_string(&kill).unwrap(), "1", "{own}");
    }
}

#[test]
fn a_process_whose_cgroup_is_gone_moves_to_a_parent() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("system.slice")).unwrap();
    let cgroup = Cgroup::at(dir.path(), Path::new("system.slice/containerd.service/shim"));
    cgroup.add_process(7).unwrap_err();
    cgroup.add_process_near(7).unwrap();
    let parent = Cgroup::at(dir.path(), Path::new("system.slice"));
    assert_eq!(parent.processes(), [7]);
    // This parent takes no processes.
    fs::remove_file(parent.path().join("cgroup.procs")).unwrap();
    fs::create_dir(parent.path().join("cgroup.procs")).unwrap();
    cgroup.add_process_near(8).unwrap();
    assert_eq!(Cgroup::at(dir.path(), Path::new("")).processes(), [8]);
    // The search ends at the root of the hierarchy.
    let outside = Cgroup::at(&dir.path().join("system.slice"), Path::new("gone"));
    let error = outside.add_process_near(9).unwrap_err().to_string();
    assert!(error.contains("system.slice/gone/cgroup.procs"), "{error}");
}

#[test]
fn a_limit_that_cannot_be_kept_leaves_no_cgroup() {
    let dir = tempfile::tempdir().unwrap();
    let mut cgroup = Cgroup::at(dir.path(), Path::new("c"));
    let resources = resources(r#"{"memory": {"limit": 1000}}"#);
    cgroup.create(Some(&resources)).unwrap_err();
    assert!(!cgroup.path().exists());
}

#[test]
fn oom_kills_of_a_removed_scope_come_from_its_slice() {
    let dir = tempfile::tempdir().unwrap();
    let mut cgroup = Cgroup::from_cgroups_path(dir.path(), "a-b.slice:c:d").unwrap();
    assert_eq!(cgroup.path(), dir.path().join("a.slice/a-b.slice/c-d.scope"));
    let slice = cgroup.path().parent().unwrap().to_owned();
    fs::create_dir_all(&slice).unwrap();
    assert_eq!(cgroup.oom_kills(), 0);
    fs::write(slice.join("memory.events"), "oom_kill 3\n").unwrap();
    cgroup.slice_oom_kills = 3;
    assert_eq!(cgroup.oom_kills(), 0);
    fs::write(slice.join("memory.events"), "oom_kill 4\n").unwrap();
    assert_eq!(cgroup.oom_kills(), 1);
}

#[test]
fn a_scope_is_removed_even_if_systemd_does_not_answer_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let systemd = SystemdClient {
        bus: dir.path().join("bus"),
        timeout: Duration::from_millis(100),
    };
    let _silent = UnixListener::bind(&systemd.bus).unwrap();
    let cgroup = Cgroup::from_cgroups_path(dir.path(), "a-b.slice:c:d").unwrap();
    fs::create_dir_all(cgroup.path()).unwrap();
    let begun = Instant::now();
    cgroup.remove_by(&systemd, "0::/\n").unwrap();
    assert!(begun.elapsed() < Duration::from_secs(5) && !cgroup.path().exists());
}
