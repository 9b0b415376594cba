use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use husk_proto::vmm::v1::ExitReason;
use rustix::io::FdFlags;

use super::*;

fn script(dir: &Path, text: &str) -> Program {
    let path = dir.join("vmm");
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.into()
}

fn on_runtime<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(test)
}

/// Runs this script as a VMM. Returns what it wrote to `out`, and its exit.
fn run(text: &str) -> (String, VmmExit) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let program = script(dir.path(), &format!("out={}\n{text}", out.display()));
    let exit = on_runtime(async {
        VmmProcess::spawn(&program, &VmmPlacement::default())
            .unwrap()
            .wait()
            .await
            .unwrap()
    });
    (fs::read_to_string(out).unwrap_or_default(), exit)
}

#[test]
fn vmm_inherits_only_its_sockets_at_3_and_4() {
    // The VMM must not inherit other descriptors of the caller.
    let stray = File::open("/etc/hostname").unwrap();
    rustix::io::fcntl_setfd(&stray, FdFlags::empty()).unwrap();
    let (out, exit) = run("ls -l /proc/self/fd >$out");
    let links = out.lines().filter_map(|line| line.split_once(" -> "));
    let open = links.map(|(left, to)| (left.rsplit(' ').next().unwrap(), to.split(':').next().unwrap()));
    let kinds: Vec<(&str, &str)> = open.collect();
    let wanted = [
        ("0", "/dev/null"),
        ("1", "/dev/null"),
        ("2", "pipe"),
        ("3", "socket"),
        ("4", "socket"),
    ];
    assert!(
        wanted
            .iter()
            .filter(|one| one.0 != "1")
            .all(|one| kinds.contains(one)),
        "{out}"
    );
    // The shell keeps its script and its own standard output open beside them, and ls what it lists.
    let others: Vec<_> = kinds.iter().filter(|one| !wanted.contains(one)).collect();
    assert!(
        others
            .iter()
            .all(|(_, to)| to.starts_with("/tmp/") || to.starts_with("/proc/") || *to == "/dev/null"),
        "{out}"
    );
    assert_eq!(exit.reason, ExitReason::Poweroff);
}

#[test]
fn file_limit_is_raised_and_environment_cleared() {
    let (out, _) = run("(ulimit -Sn; ulimit -Hn; env | grep -c '^PATH=/\\|^HOME=') >$out");
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(lines[0], lines[1]);
    assert!(!out.contains(&env::var("HOME").unwrap_or("/no home/".into())));
}

#[test]
fn last_error_explains_the_status() {
    let (_, exit) =
        run(r#"echo '{"level":"ERROR","fields":{"message":"no kernel in disk a"}}' >&2; exit 12"#);
    assert_eq!(
        exit,
        VmmExit {
            reason: ExitReason::BootFailed,
            detail: "no kernel in disk a".into(),
            by_signal: false
        }
    );
    let dir = tempfile::tempdir().unwrap();
    let program = script(dir.path(), "sleep 60");
    let exit = on_runtime(async {
        let mut vmm = VmmProcess::spawn(&program, &VmmPlacement::default()).unwrap();
        vmm.kill();
        vmm.wait().await.unwrap()
    });
    assert_eq!(exit.detail, "the VMM was killed by SIGKILL");
}

#[test]
fn dropping_it_kills_it_and_so_does_closing_the_control_socket() {
    let dir = tempfile::tempdir().unwrap();
    let program = script(dir.path(), "read line <&3; exit 13");
    on_runtime(async {
        let VmmProcess {
            client,
            fds,
            mut child,
            ..
        } = VmmProcess::spawn(&program, &VmmPlacement::default()).unwrap();
        drop(client);
        let status = timeout(Duration::from_secs(5), child.wait())
            .await
            .unwrap()
            .unwrap();
        assert_eq!(status.code(), Some(13));
        drop(fds);

        let program = script(dir.path(), "sleep 60");
        let vmm = VmmProcess::spawn(&program, &VmmPlacement::default()).unwrap();
        let pid = vmm.pid().unwrap();
        drop(vmm);
        for _ in 0..100 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            if state.is_empty() || state.contains(") Z ") {
                return;
            }
        }
        panic!("the VMM lives on");
    });
}

#[test]
fn missing_program_is_named() {
    let error = on_runtime(async {
        VmmProcess::spawn(
            &PathBuf::from("/nonexistent/vmm").into(),
            &VmmPlacement::default(),
        )
        .unwrap_err()
    });
    assert_eq!(
        error.to_string(),
        "/nonexistent/vmm cannot be started: No such file or directory (os error 2)"
    );
}

#[test]
fn it_enters_its_cgroup_and_where_there_is_none_it_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let program = script(dir.path(), "exit 0");
    let placement = VmmPlacement {
        cgroup: Some(dir.path().to_owned()),
        ..VmmPlacement::default()
    };
    on_runtime(async {
        let error = VmmProcess::spawn(&program, &placement).unwrap_err();
        assert_eq!(error.to_string(), "the VMM's cgroup cannot be entered");
        let procs = dir.path().join("cgroup.procs");
        fs::write(&procs, "").unwrap();
        VmmProcess::spawn(&program, &placement)
            .unwrap()
            .wait()
            .await
            .unwrap();
        assert_eq!(fs::read_to_string(procs).unwrap(), "0");
    });
}

#[test]
fn it_has_the_oom_score_it_is_given_or_the_callers() {
    let dir = tempfile::tempdir().unwrap();
    let program = script(dir.path(), "sleep 60");
    let score = |pid: u32| {
        let text = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
        text.trim().parse::<i32>().unwrap()
    };
    let own = score(process::id());
    // A lower one needs privileges.
    let higher = (own + 1).min(1000);
    on_runtime(async {
        for (oom_score_adj, wanted) in [(None, own), (Some(higher), higher)] {
            let placement = VmmPlacement {
                oom_score_adj,
                ..VmmPlacement::default()
            };
            let mut vmm = VmmProcess::spawn(&program, &placement).unwrap();
            assert_eq!(score(vmm.pid().unwrap()), wanted);
            vmm.kill();
            vmm.wait().await.unwrap();
        }
        let placement = VmmPlacement {
            oom_score_adj: Some(1001),
            ..VmmPlacement::default()
        };
        let error = VmmProcess::spawn(&program, &placement).unwrap_err();
        assert_eq!(error.to_string(), "the VMM's oom_score_adj cannot be set");
    });
    assert_eq!(score(process::id()), own);
}
