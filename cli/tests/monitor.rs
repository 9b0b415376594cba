//! Commands that talk to a VM's monitor, tested with a stub monitor.

mod support;

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use husk_monitor::state::RuntimeDir;
use husk_proto::shim::v1::Phase;
use husk_proto::vmm::v1::ExitReason;
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};
use support::{StubMonitor, husk, output, told};

#[test]
fn list_shows_what_runs() {
    let root = tempfile::tempdir().unwrap();
    let stub = StubMonitor::start(root.path(), "default", "demo");
    let _other = StubMonitor::start(root.path(), "test", "other");
    stub.change(|status| status.paused = true);

    let (code, stdout, stderr) = told(&output(root.path(), &["list"]));
    assert_eq!((code, stderr.as_str()), (0, ""));
    let lines: Vec<Vec<&str>> = stdout
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(
        lines[0],
        ["NAMESPACE", "NAME", "STATE", "AGE", "CPUS", "MEMORY", "ADDRESS"]
    );
    assert_eq!(lines[1][..4], ["default", "demo", "Running", "(paused)"]);
    assert_eq!(lines[2][..3], ["test", "other", "Running"]);
    assert_eq!(lines[2][4..], ["2", "512Mi", "127.0.0.1"]);

    let (_, stdout, _) = told(&output(root.path(), &["ls", "-o", "name"]));
    assert_eq!(stdout, "demo\ntest/other\n");

    let (_, stdout, _) = told(&output(root.path(), &["list", "-o", "json"]));
    let json: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(json[0]["phase"], "Running");
    assert_eq!(json[0]["paused"], true);
    assert_eq!(json[0]["memoryBytes"], 512 << 20);
    assert_eq!(json[0]["interfaces"][0]["device"], "eth0");
    assert_eq!(json[0]["interfaces"][0]["linkUp"], true);
    assert_eq!(json[1]["namespace"], "test");
}

#[test]
fn a_vm_paused_by_an_io_error_is_shown() {
    let root = tempfile::tempdir().unwrap();
    let stub = StubMonitor::start(root.path(), "default", "demo");
    stub.change(|status| {
        status.paused = true;
        status.reason = "PausedIOError".into();
        status.message = "paused: I/O error on disk \"data\": no space".into();
    });
    let (_, stdout, _) = told(&output(root.path(), &["list"]));
    assert!(stdout.contains("Running (PausedIOError)"), "{stdout}");
    let (_, stdout, _) = told(&output(root.path(), &["inspect", "demo", "-o", "json"]));
    let json: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(json["reason"], "PausedIOError");
    assert_eq!(json["message"], "paused: I/O error on disk \"data\": no space");
}

#[test]
fn hanging_monitors_do_not_block_others() {
    const HUNG: usize = 12;
    let root = tempfile::tempdir().unwrap();
    let _stub = StubMonitor::start(root.path(), "default", "well");
    let names: Vec<_> = (0..HUNG).map(|number| format!("hung{number}")).collect();
    let hung: Vec<_> = names
        .iter()
        .map(|name| {
            let claimed = RuntimeDir::at(root.path()).claim("default", name).unwrap();
            let socket = UnixListener::bind(claimed.dir().socket()).unwrap();
            (claimed, socket)
        })
        .collect();
    let start = Instant::now();
    let (code, stdout, _) = told(&output(root.path(), &["list"]));
    let states: Vec<_> = stdout
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2))
        .collect();
    let mut expected = vec!["STATE"];
    expected.extend(["Unknown"; HUNG]);
    expected.push("Running");
    assert_eq!((code, states), (0, expected));
    let mut stop = vec!["stop", "well"];
    stop.extend(names.iter().map(String::as_str));
    let (code, _, stderr) = told(&output(root.path(), &stop));
    assert_eq!(code, 1);
    assert!(
        stderr.contains("error: the monitor of hung0 does not answer")
            && stderr.contains("well: the guest powered off"),
        "{stderr}"
    );
    // Each call to a hung monitor takes three seconds: 72 s one after the other, six in parallel.
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    drop(hung);
}

#[test]
fn pause_and_resume_reach_the_vm() {
    let root = tempfile::tempdir().unwrap();
    let stub = StubMonitor::start(root.path(), "test", "demo");
    assert_eq!(
        told(&output(root.path(), &["pause", "test/demo"])),
        (0, "".into(), "test/demo: paused\n".into())
    );
    assert!(stub.status().paused);
    assert_eq!(told(&output(root.path(), &["resume", "test/demo"])).0, 0);
    assert!(!stub.status().paused);
}

#[test]
fn snapshot_shows_its_steps_and_what_is_not_included() {
    let root = tempfile::tempdir().unwrap();
    let _stub = StubMonitor::start(root.path(), "default", "demo");
    let said = "demo: saving memory (64.00 MiB)\n\
                demo: saved in /snap; the VM is paused, `husk resume demo` resumes it\n\
                warning: volume \"data\" is not in the snapshot, which can be restored once, and not after demo has resumed\n";
    assert_eq!(
        told(&output(root.path(), &["snapshot", "demo", "/snap"])),
        (0, "".into(), said.into())
    );
    assert_eq!(
        told(&output(root.path(), &["snapshot", "demo", "/snap", "--resume"])),
        (
            1,
            "".into(),
            "error: volume \"data\": /data.img cannot be included in the snapshot\n".into()
        )
    );
    let in_full = ["snapshot", "demo", "/snap", "--resume", "--copy-disks"];
    let said = "demo: saving memory (64.00 MiB)\ndemo: saved in /snap\n";
    assert_eq!(told(&output(root.path(), &in_full)), (0, "".into(), said.into()));
    let (code, _, stderr) = told(&output(root.path(), &["snapshot", "demo", "/interrupted"]));
    assert_eq!(code, 1);
    assert!(
        stderr.ends_with("error: the VM ended before it was saved\n"),
        "{stderr}"
    );
}

#[test]
fn volumes_are_added_and_removed() {
    let root = tempfile::tempdir().unwrap();
    let stub = StubMonitor::start(root.path(), "default", "demo");
    let run = |words: &str| told(&output(root.path(), &words.split(' ').collect::<Vec<_>>()));
    assert_eq!(
        run("addvolume demo --volume-name data --path /a/b.img --serial S --cache writeback --readonly"),
        (
            0,
            "".into(),
            "demo: added volume data (SCSI target 0, LUN 3)\n".into()
        )
    );
    assert_eq!(stub.status().message, "data /a/b.img S Writeback true");
    assert_eq!(run("addvolume demo --volume-name data --path b.img").0, 0);
    let here = std::env::current_dir().unwrap();
    let message = format!("data {}/b.img  Unspecified false", here.display());
    assert_eq!(stub.status().message, message);
    assert_eq!(
        run("addvolume demo --volume-name taken --path /b"),
        (
            1,
            "".into(),
            "error: Unable to add volume [taken] because volume with that name already exists\n".into()
        )
    );
    assert_eq!(
        run("removevolume demo --volume-name data"),
        (0, "".into(), "demo: removed volume data\n".into())
    );
    assert_eq!(
        run("removevolume demo --volume-name lost"),
        (
            1,
            "".into(),
            "demo: removed volume lost\nerror: volume lost: the last writes may be lost: no space; left\n"
                .into()
        )
    );
    assert_eq!(run("addvolume demo --path /b").0, 2);
}

#[test]
fn sync_applies_a_changed_manifest() {
    let root = tempfile::tempdir().unwrap();
    let stub = StubMonitor::start(root.path(), "default", "demo");
    let file = root.path().join("vmi.yaml");
    let manifest = |memory: &str, volume: &str| {
        let text = format!(
            "apiVersion: kubevirt.io/v1\nkind: VirtualMachineInstance\nmetadata: {{name: demo}}\n\
             spec:\n  domain: {{memory: {{guest: {memory}}}, devices: {{}}}}\n  volumes:\n\
             \x20 - {{name: {volume}, dataVolume: {{name: data, hotpluggable: true}}}}\n"
        );
        std::fs::write(&file, text).unwrap();
    };
    let path = file.to_str().unwrap();
    let run = |more: &[&str]| {
        let words = [&["sync", "demo", "-f", path][..], more].concat();
        told(&output(root.path(), &words))
    };
    manifest("128Mi", "data");
    let said = "demo: added volume data\ndemo: paused\n";
    let more = ["--volume", "data=/a/b.img", "--state", "paused"];
    assert_eq!(run(&more), (0, "".into(), said.into()));
    assert_eq!(stub.status().message, "{\"data\": \"/a/b.img\"}");
    assert!(stub.status().paused);
    assert_eq!(run(&[]), (0, "".into(), "demo: nothing to change\n".into()));
    manifest("128Mi", "late");
    let said = "demo: volume late: it is; not there\n\
                error: demo does not match its manifest yet: 1 entry is pending\n";
    assert_eq!(run(&[]), (1, "".into(), said.into()));
    manifest("128Mi", "stays");
    let said = "interface old: it stays\n";
    assert_eq!(run(&[]), (2, "".into(), said.into()));
    manifest("256Mi", "data");
    let said =
        "spec.domain.memory.guest: Invalid value: too late\nspec.domain.cpu: Invalid value: too late\n";
    assert_eq!(run(&[]), (2, "".into(), said.into()));
    manifest("no", "data");
    assert_eq!(run(&[]).0, 2);
    assert_eq!(run(&["--state", "stopped"]).0, 2);
    std::fs::write(&file, "{").unwrap();
    assert_eq!(run(&[]).0, 2);
}

#[test]
fn a_refusal_is_one_line() {
    let root = tempfile::tempdir().unwrap();
    let _stub = StubMonitor::start(root.path(), "default", "demo");
    let told = told(&output(root.path(), &["reset", "demo"]));
    assert_eq!(told, (1, "".into(), "error: the VM is paused\n".into()));
}

#[test]
fn a_vm_in_another_namespace_is_mentioned() {
    let root = tempfile::tempdir().unwrap();
    let _stub = StubMonitor::start(root.path(), "test", "demo");
    let told = told(&output(root.path(), &["pause", "demo"]));
    assert_eq!(
        told,
        (
            1,
            "".into(),
            "error: no VM demo is running; running: test/demo\n".into()
        )
    );
}

#[test]
fn stop_waits_for_the_end() {
    let root = tempfile::tempdir().unwrap();
    let _stub = StubMonitor::start(root.path(), "default", "demo");
    let (code, stdout, stderr) = told(&output(root.path(), &["stop", "demo", "--grace-period", "7"]));
    assert_eq!((code, stdout.as_str()), (0, ""));
    assert_eq!(
        stderr,
        "demo: shutting down (force-off in 7 s)\ndemo: the guest powered off (ran 1.5 s)\n"
    );
    assert!(!root.path().join("default").exists());
}

#[test]
fn stop_continues_after_an_error() {
    let root = tempfile::tempdir().unwrap();
    let _stub = StubMonitor::start(root.path(), "default", "demo");
    let (code, _, stderr) = told(&output(root.path(), &["stop", "ghost", "demo", "--force"]));
    assert_eq!(code, 1);
    assert_eq!(
        stderr,
        "demo: killed (ran 1.5 s)\nerror: no VM ghost is running\n"
    );
    assert!(!root.path().join("default").exists());
}

#[test]
fn rm_stops_vms_and_removes_their_state() {
    let root = tempfile::tempdir().unwrap();
    let _stub = StubMonitor::start(root.path(), "default", "demo");
    let dead = root.path().join("default/dead");
    std::fs::create_dir_all(&dead).unwrap();
    std::fs::write(dead.join("monitor.pid"), "1\n").unwrap();
    let (code, _, stderr) = told(&output(root.path(), &["rm", "demo", "dead"]));
    assert_eq!(code, 0, "{stderr}");
    assert!(
        stderr.contains("dead: removed the state left by a dead monitor\n"),
        "{stderr}"
    );
    assert!(stderr.contains("demo: the guest powered off"), "{stderr}");
    assert!(!root.path().join("default").exists());

    assert_eq!(
        told(&output(root.path(), &["rm", "demo"])),
        (1, "".into(), "error: no VM demo is running\n".into())
    );
    assert_eq!(
        told(&output(root.path(), &["rm", "--force", "demo"])),
        (0, "".into(), "".into())
    );
}

#[test]
fn rm_waits_for_a_vm_that_is_ending() {
    let root = tempfile::tempdir().unwrap();
    for force in [&["rm", "demo"][..], &["rm", "--force", "demo"]] {
        let claimed = RuntimeDir::at(root.path()).claim("default", "demo").unwrap();
        let ends = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(700));
            claimed.remove().unwrap();
        });
        // The socket is no longer served.
        let (code, _, stderr) = told(&output(root.path(), force));
        assert_eq!((code, stderr.as_str()), (0, "demo has ended\n"), "{force:?}");
        ends.join().unwrap();
        assert!(!root.path().join("default").exists());
    }
}

#[test]
fn rm_reports_what_it_cannot_remove() {
    let root = tempfile::tempdir().unwrap();
    // Makes it a runtime directory.
    drop(StubMonitor::start(root.path(), "default", "other"));
    let dead = root.path().join("default/dead");
    std::fs::create_dir_all(&dead).unwrap();
    std::fs::write(dead.join("monitor.pid"), "1\n").unwrap();
    std::fs::write(dead.join("own"), "").unwrap();
    let (code, _, stderr) = told(&output(root.path(), &["rm", "--force", "dead"]));
    assert_eq!(code, 1, "{stderr}");
    let error = format!(
        "error: {} was not made by Husk: move it away\n",
        dead.join("own").display()
    );
    assert!(stderr.ends_with(&error), "{stderr}");
}

#[test]
fn logs_follow_to_the_end() {
    let root = tempfile::tempdir().unwrap();
    let stub = StubMonitor::start(root.path(), "default", "demo");
    assert_eq!(
        told(&output(root.path(), &["logs", "demo", "--tail", "1"])).1,
        "two\n"
    );
    let following = husk(root.path(), &["logs", "-f", "demo"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let log = root.path().join("default/demo/console.log");
    std::fs::OpenOptions::new()
        .append(true)
        .open(log)
        .unwrap()
        .write_all(b"three\n")
        .unwrap();
    stub.end(Phase::Succeeded, ExitReason::Poweroff, "");
    let (code, stdout, _) = told(&following.wait_with_output().unwrap());
    assert_eq!((code, stdout.as_str()), (0, "one\ntwo\nthree\n"));
}

#[test]
fn inspect_shows_state_plan_and_manifest() {
    let root = tempfile::tempdir().unwrap();
    let _stub = StubMonitor::start(root.path(), "default", "demo");
    let (code, stdout, _) = told(&output(root.path(), &["inspect", "demo", "-o", "json"]));
    assert_eq!(code, 0);
    let json: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(json["vmmPid"], 42);
    assert_eq!(json["plan"]["name"], "demo");
    assert_eq!(json["times"]["running"], "2023-11-14T22:13:20.05Z");
    let (_, yaml, _) = told(&output(root.path(), &["inspect", "demo"]));
    assert!(
        yaml.starts_with("namespace: default\nname: demo\nphase: Running\n"),
        "{yaml}"
    );
}

#[test]
fn a_piped_console_shows_the_answer_and_detaches() {
    let root = tempfile::tempdir().unwrap();
    let _stub = StubMonitor::start(root.path(), "default", "demo");
    let mut command = husk(root.path(), &["console", "demo"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"root\n").unwrap();
    let (code, stdout, stderr) = told(&child.wait_with_output().unwrap());
    let banner = "Successfully connected to demo console. The escape sequence is ^]\n";
    assert_eq!(
        (code, stdout, stderr.as_str()),
        (0, format!("{banner}login: ROOT\n"), "")
    );
}

/// A terminal with a command on it.
struct Terminal {
    master: std::fs::File,
    slave: OwnedFd,
    child: Child,
}

impl Terminal {
    fn run(mut command: std::process::Command) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
        let master = openpt(flags).unwrap();
        unlockpt(&master).unwrap();
        let slave = ioctl_tiocgptpeer(&master, flags).unwrap();
        let end = || Stdio::from(slave.try_clone().unwrap());
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        Self {
            master: master.into(),
            slave,
            child,
        }
    }

    /// Reads until `text` was shown; all that was shown until then.
    fn expect(&mut self, text: &str) -> String {
        let mut shown = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(10);
        while !String::from_utf8_lossy(&shown).contains(text) {
            assert!(
                Instant::now() < deadline,
                "no {text:?} in {:?}",
                String::from_utf8_lossy(&shown)
            );
            let mut byte = [0];
            self.master.read_exact(&mut byte).unwrap();
            shown.push(byte[0]);
        }
        String::from_utf8(shown).unwrap()
    }

    fn type_(&mut self, text: &str) {
        self.master.write_all(text.as_bytes()).unwrap();
    }

    /// Returns true if the line discipline edits lines, as a shell expects.
    fn is_cooked(&self) -> bool {
        let flags = tcgetattr(&self.slave).unwrap().local_modes;
        flags.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    fn wait(mut self) -> i32 {
        let code = self.child.wait().unwrap().code().expect("an exit status");
        assert!(self.is_cooked(), "the terminal is given back as it was");
        code
    }
}

const BANNER: &str = "Successfully connected to demo console. The escape sequence is ^]\r\n";

#[test]
fn the_terminal_is_raw_on_the_console_and_restored_after() {
    let root = tempfile::tempdir().unwrap();
    let stub = StubMonitor::start(root.path(), "default", "demo");
    let mut terminal = Terminal::run(husk(root.path(), &["console", "demo"]));
    assert_eq!(terminal.expect("login: "), format!("{BANNER}login: "));
    assert!(!terminal.is_cooked());
    terminal.type_("ab\u{3}");
    assert_eq!(terminal.expect("\u{3}"), "AB\u{3}", "Ctrl-C is the guest's");
    terminal.type_("\u{1d}");
    assert_eq!(terminal.wait(), 0);
    assert_eq!(stub.status().phase(), Phase::Running);
}

#[test]
fn the_terminal_is_restored_when_the_vm_ends_and_on_signals() {
    let root = tempfile::tempdir().unwrap();
    let stub = StubMonitor::start(root.path(), "default", "demo");
    let mut terminal = Terminal::run(husk(root.path(), &["console", "demo"]));
    terminal.expect("login: ");
    kill_process(Pid::from_child(&terminal.child), Signal::TERM).unwrap();
    assert_eq!(terminal.wait(), 143);

    let mut terminal = Terminal::run(husk(root.path(), &["console", "demo"]));
    terminal.expect("login: ");
    stub.end(Phase::Succeeded, ExitReason::Poweroff, "");
    terminal.expect("demo has ended\r\n");
    assert_eq!(terminal.wait(), 0);
}
