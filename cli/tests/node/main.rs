//! `husk node install --restart` and its removal, on a node whose containerd and systemd are played.

mod fake;
mod rig;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use rig::Rig;

/// A configuration that imports drop-in files.
const IMPORTING: &str = "version = 3\nimports = ['NODE/conf.d/*.toml']\n";
/// One that does not, without a newline at its end.
const PLAIN: &str = "version = 2\n[grpc]\n  uid = 0";

const CASES: &[(&str, fn())] = &[
    ("a_second_run_changes_nothing", a_second_run_changes_nothing),
    ("a_plain_configuration_is_edited", a_plain_configuration_is_edited),
    ("pods_keep_their_version", pods_keep_their_version),
    (
        "a_rejected_configuration_is_rolled_back",
        a_rejected_configuration_is_rolled_back,
    ),
    ("a_lost_handler_is_undone", a_lost_handler_is_undone),
    (
        "a_containerd_that_does_not_start_gets_its_configuration_back",
        a_containerd_that_does_not_start_gets_its_configuration_back,
    ),
    (
        "a_containerd_that_never_starts_is_reported",
        a_containerd_that_never_starts_is_reported,
    ),
    ("removal_leaves_nothing", removal_leaves_nothing),
    ("removal_waits_for_pods", removal_waits_for_pods),
    (
        "programs_that_a_unit_file_names_stay",
        programs_that_a_unit_file_names_stay,
    ),
    (
        "removal_keeps_what_a_late_pod_needs",
        removal_keeps_what_a_late_pod_needs,
    ),
    (
        "removal_finds_the_containerd_of_the_installation",
        removal_finds_the_containerd_of_the_installation,
    ),
    ("the_journal_is_private", the_journal_is_private),
    ("a_killed_install_is_repaired", a_killed_install_is_repaired),
    ("a_killed_removal_is_repaired", a_killed_removal_is_repaired),
    (
        "a_containerd_without_a_unit_is_left_alone",
        a_containerd_without_a_unit_is_left_alone,
    ),
];

fn main() -> ExitCode {
    let mut words = std::env::args();
    let name = words.next().unwrap_or_default();
    let name = Path::new(&name).file_name().and_then(|name| name.to_str());
    if let Some(status) = fake::play(name.unwrap_or_default(), &words.collect::<Vec<_>>()) {
        return status;
    }
    let trials = CASES.iter().map(|(name, case)| {
        Trial::test(*name, move || {
            case();
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

fn a_second_run_changes_nothing() {
    let rig = Rig::new(IMPORTING);
    let before = rig.text("config.toml");
    let told = rig.done("install");
    let [version] = &rig.versions()[..] else {
        panic!("{:?}", rig.versions())
    };
    for line in [
        format!("created {}\n", version.display()),
        format!("created {}\n", rig.at("conf.d/husk.toml").display()),
        "restarting containerd (".to_owned(),
        "containerd answers\n".to_owned(),
    ] {
        assert!(told.contains(&line), "{told}");
    }
    rig.check_loaded(Some(version));
    assert_eq!((rig.text("config.toml"), rig.restarts()), (before, 1));
    let told = rig.done("install");
    assert!(
        told.lines().take(2).all(|line| line.starts_with("unchanged ")),
        "{told}"
    );
    assert_eq!((rig.versions().len(), rig.restarts()), (1, 1));
    assert!(!rig.at("opt/.change").exists());
}

fn a_plain_configuration_is_edited() {
    for old in [true, false] {
        let rig = Rig::new(if old { IMPORTING } else { PLAIN });
        let before = rig.text("config.toml");
        if old {
            rig.fault("old");
        }
        rig.done("install");
        assert!(rig.text("config.toml").starts_with(&before));
        assert!(!rig.at("conf.d").exists());
        rig.check_loaded(rig.versions().first().map(|path| path.as_path()));
        rig.done("install");
        assert_eq!(rig.restarts(), 1);
        rig.done("uninstall");
        assert_eq!((rig.text("config.toml"), rig.restarts()), (before, 2));
        rig.check_loaded(None);
    }
}

fn pods_keep_their_version() {
    let rig = Rig::new(IMPORTING);
    rig.done("install");
    let first = rig.versions()[0].clone();
    let shim = Rig::shim(&first);
    rig.build("two");
    rig.done("install");
    let mut second = rig.versions();
    assert_eq!(second.len(), 2);
    second.retain(|version| *version != first);
    rig.check_loaded(Some(&second[0]));
    assert_eq!(fs::read_to_string(first.join("husk-vmm")).unwrap(), "one");
    drop(shim);
    // containerd has not cleaned up after the shim yet.
    let task = rig.at("state/io.containerd.runtime.v2.task/k8s.io/pod");
    fs::create_dir_all(&task).unwrap();
    let path = first.join("containerd-shim-husk-v2");
    fs::write(task.join("shim-binary-path"), path.to_str().unwrap()).unwrap();
    rig.done("install");
    assert_eq!(rig.versions().len(), 2);
    fs::remove_dir_all(task).unwrap();
    let told = rig.done("install");
    assert!(told.contains(&format!("removed {}\n", first.display())), "{told}");
    assert_eq!((rig.versions(), rig.restarts()), (second, 2));
}

fn a_rejected_configuration_is_rolled_back() {
    for config in [IMPORTING, PLAIN] {
        let rig = Rig::new(config);
        let before = rig.text("config.toml");
        rig.fault("reject");
        let why = rig.refused("install");
        assert!(
            why.contains("config.toml: containerd would not run with the handler"),
            "{why}"
        );
        assert!(why.ends_with(": containerd: invalid handler\n"), "{why}");
        assert_eq!((rig.text("config.toml"), rig.restarts()), (before, 0));
        assert!(!rig.at("conf.d").exists());
        rig.no_fault("reject");
        rig.done("install");
        rig.check_loaded(Some(&rig.versions()[0]));
    }
}

fn a_lost_handler_is_undone() {
    let rig = Rig::new(IMPORTING);
    rig.fault("lose");
    let why = rig.refused("install");
    assert!(why.ends_with("it would lose the runtime handler runc\n"), "{why}");
    assert!(!rig.at("conf.d").exists());
    assert_eq!(rig.restarts(), 0);
}

fn a_containerd_that_does_not_start_gets_its_configuration_back() {
    for fault in ["no-start", "mute"] {
        let rig = Rig::new(IMPORTING);
        let before = rig.text("config.toml");
        rig.fault(fault);
        let why = rig.refused("install");
        let told =
            "containerd did not run with the handler, so its former configuration is back, and it runs: ";
        assert!(why.contains(told), "{why}");
        assert_eq!((rig.text("config.toml"), rig.restarts()), (before, 2));
        assert!(!rig.at("conf.d").exists() && !rig.at("opt/.change").exists());
        rig.check_loaded(None);
        rig.no_fault(fault);
        rig.done("install");
        rig.check_loaded(Some(&rig.versions()[0]));
    }
}

fn a_containerd_that_never_starts_is_reported() {
    let rig = Rig::new(IMPORTING);
    rig.done("install");
    let first = rig.versions()[0].clone();
    rig.build("two");
    rig.fault("no-start");
    let why = rig.refused("install");
    assert!(why.contains("nor with its former configuration"), "{why}");
    // A process with the programs that it had before repairs the node.
    rig.no_fault("no-start");
    let told = rig.done("install");
    assert!(
        told.starts_with("created ") || told.starts_with("unchanged "),
        "{told}"
    );
    rig.check_loaded(
        rig.versions()
            .iter()
            .find(|version| **version != first)
            .map(|path| path.as_path()),
    );
    assert!(!rig.at("opt/.change").exists());
}

fn removal_leaves_nothing() {
    for config in [IMPORTING, PLAIN] {
        let rig = Rig::new(config);
        let before = rig.text("config.toml");
        fs::create_dir_all(rig.at("run/.ended")).unwrap();
        fs::write(rig.at("run/.ended/pod"), "").unwrap();
        fs::write(
            rig.at("run/.lock"),
            "Husk keeps the state of its VMs in this directory.\n",
        )
        .unwrap();
        rig.done("install");
        rig.build("two");
        rig.done("install");
        let told = rig.done("uninstall");
        assert!(told.contains("restarting containerd"), "{told}");
        assert_eq!((rig.text("config.toml"), rig.restarts()), (before, 3));
        for name in ["conf.d", "opt"] {
            assert!(!rig.at(name).exists(), "{name}");
        }
        // On the node of a container the directory stays, empty.
        let run = fs::read_dir(rig.at("run"));
        match rustix::process::geteuid().is_root() {
            true => assert_eq!(run.unwrap().count(), 0),
            false => assert!(run.is_err()),
        }
        rig.check_loaded(None);
        // Again, on a node that has nothing.
        rig.done("uninstall");
        assert_eq!(rig.restarts(), 3);
        assert!(!rig.at("opt").exists());
    }
}

fn removal_waits_for_pods() {
    let rig = Rig::new(IMPORTING);
    rig.done("install");
    let version = rig.versions()[0].clone();
    let shim = Rig::shim(&version);
    let why = rig.refused("uninstall");
    assert!(why.contains("shims of pods still run (processes "), "{why}");
    rig.check_loaded(Some(&version));
    drop(shim);
    rig.done("uninstall");
    rig.check_loaded(None);
}

fn programs_that_a_unit_file_names_stay() {
    let rig = Rig::new(IMPORTING);
    rig.done("install");
    let first = rig.versions()[0].clone();
    let unit = rig.at("home/systemd/user/husk@.service");
    fs::create_dir_all(unit.parent().unwrap()).unwrap();
    let husk = first.join("husk");
    fs::write(&unit, format!("ExecStart=\"{}\" service %i\n", husk.display())).unwrap();
    rig.build("two");
    rig.done("install");
    assert_eq!(rig.versions().len(), 2);
    let why = rig.refused("uninstall");
    let told = format!(
        "{} runs VMs by {}: delete these VMs",
        unit.display(),
        husk.display()
    );
    assert!(why.contains(&told) && why.ends_with("or use --force\n"), "{why}");
    assert_eq!((rig.versions().len(), rig.restarts()), (2, 2));
    let forced = rig.command("uninstall").arg("--force").output().unwrap();
    assert!(forced.status.success());
    assert!(!rig.at("opt").exists());
    rig.check_loaded(None);
}

fn removal_keeps_what_a_late_pod_needs() {
    let rig = Rig::new(IMPORTING);
    rig.done("install");
    let version = rig.versions()[0].clone();
    let task = rig.at("state/io.containerd.runtime.v2.task/k8s.io/pod");
    fs::create_dir_all(&task).unwrap();
    let shim = version.join("containerd-shim-husk-v2");
    fs::write(task.join("shim-binary-path"), shim.to_str().unwrap()).unwrap();
    let why = rig.refused("uninstall");
    assert!(why.contains("a pod still needs"), "{why}");
    assert!(shim.exists());
    rig.check_loaded(None);
    fs::remove_dir_all(task).unwrap();
    rig.done("uninstall");
    assert!(!rig.at("opt").exists());
}

fn removal_finds_the_containerd_of_the_installation() {
    let rig = Rig::new(IMPORTING);
    rig.done("install");
    assert_eq!(rig.without_socket("uninstall"), "");
    rig.check_loaded(None);
    assert!(!rig.at("opt").exists());
}

fn the_journal_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let rig = Rig::new(PLAIN);
    let mode = |name: &str| fs::metadata(rig.at(name)).unwrap().permissions().mode() & 0o777;
    fs::set_permissions(rig.at("config.toml"), PermissionsExt::from_mode(0o600)).unwrap();
    rig.killed("install");
    assert_eq!([mode("opt/.change"), mode("config.toml")], [0o600, 0o600]);
    rig.done("install");
    rig.done("uninstall");
    assert_eq!(mode("config.toml"), 0o600);
}

fn a_killed_install_is_repaired() {
    for config in [IMPORTING, PLAIN] {
        let rig = Rig::new(config);
        let before = rig.text("config.toml");
        rig.killed("install");
        assert!(rig.at("opt/.change").exists());
        // containerd does not run: the journal has its program and unit.
        let told = rig.done("install");
        assert!(told.contains("an earlier command was interrupted"), "{told}");
        rig.check_loaded(Some(&rig.versions()[0]));
        assert_eq!(rig.restarts(), 2);
        // Killed before the restart: containerd runs with its former settings.
        rig.build("two");
        rig.killed("install");
        assert!(fake::start(&rig.at("")));
        rig.done("install");
        rig.check_loaded(Some(rig.versions().last().unwrap()));
        assert!(!rig.at("opt/.change").exists());
        rig.done("uninstall");
        assert_eq!(rig.text("config.toml"), before);
    }
}

fn a_killed_removal_is_repaired() {
    let rig = Rig::new(IMPORTING);
    let before = rig.text("config.toml");
    rig.done("install");
    rig.killed("uninstall");
    rig.done("uninstall");
    rig.check_loaded(None);
    assert_eq!(rig.text("config.toml"), before);
    assert!(!rig.at("opt").exists() && !rig.at("conf.d").exists());
    // The next command may also be an install.
    rig.done("install");
    rig.killed("uninstall");
    rig.done("install");
    rig.check_loaded(Some(&rig.versions()[0]));
}

fn a_containerd_without_a_unit_is_left_alone() {
    let rig = Rig::new(IMPORTING);
    rig.fault("shared");
    let why = rig.refused("install");
    assert!(why.contains("not the main process of a systemd unit"), "{why}");
    assert!(!rig.at("conf.d").exists());
    assert_eq!(rig.restarts(), 0);
}
