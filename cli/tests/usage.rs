//! Commands that need no VM: usage, manifests, doctor, completions.

mod support;

use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use support::{husk, output, told};

fn on_stdin(runtime: &Path, args: &[&str], text: &str) -> (i32, String, String) {
    let mut command = husk(runtime, args);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    told(&child.wait_with_output().unwrap())
}

#[test]
fn usage_errors_are_status_2() {
    let root = tempfile::tempdir().unwrap();
    for args in [
        &[][..],
        &["frobnicate"],
        &["run"],
        &["run", "vm.yaml", "--detach", "--console"],
        &["run", "vm.yaml", "--initrd", "i"],
        &["run", "vm.yaml", "--volume", "x"],
        &["run", "vm.yaml", "--namespace", "../x"],
        &["stop", "../../etc"],
        &["stop", "demo", "--force", "--grace-period", "1"],
        &["stop", "demo", "--grace-period", "-1"],
        &["console"],
        &["ssh"],
        &["ssh", "demo", "uname"],
        &["port-forward", "demo"],
        &["port-forward", "demo", "http"],
        &["port-forward", "demo", "udp/53:53"],
        &["vsock", "demo"],
        &["vsock", "demo", "ssh"],
        &["vsock", "demo", "4294967295"],
        &["snapshot", "demo"],
        &["snapshot", "../x", "dir"],
        &["restore"],
        &["restore", "dir", "--name", "A"],
        &["restore", "dir", "--detach", "--console"],
        &["restore", "dir", "--replug-nics", "--paused"],
        &["addinterface", "demo"],
        &["link", "demo", "default", "sideways"],
    ] {
        let (code, stdout, stderr) = told(&output(root.path(), args));
        assert_eq!((code, stdout.as_str()), (2, ""), "{args:?}");
        assert!(!stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn an_unwritable_stderr_does_not_change_the_status() {
    let root = tempfile::tempdir().unwrap();
    for (args, code) in [
        (&["validate", "/nonexistent.yaml"][..], 2),
        (&["stop", "nobody"], 1),
        (&["list"], 0),
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let status = husk(root.path(), args).stderr(full).status().unwrap();
        let (told, ..) = told(&output(root.path(), args));
        assert_eq!((status.code(), told), (Some(code), code), "{args:?}");
    }
}

#[test]
fn a_missing_manifest_is_one_line() {
    let root = tempfile::tempdir().unwrap();
    for command in ["run", "validate"] {
        let told = told(&output(root.path(), &[command, "/nonexistent.yaml"]));
        assert_eq!(
            told,
            (
                2,
                "".into(),
                "error: /nonexistent.yaml: No such file or directory\n".into()
            )
        );
    }
}

#[test]
fn an_unreadable_manifest_is_one_line() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("vm.yaml");
    let large = "é".repeat(1 << 19) + "é";
    for (bytes, why) in [
        (&b"a: \xff"[..], "not valid UTF-8"),
        (
            large.as_bytes(),
            "the manifest is larger than the limit of 1 MiB: split it into several files",
        ),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let told = told(&output(root.path(), &["validate", path.to_str().unwrap()]));
        assert_eq!(
            told,
            (2, "".into(), format!("error: {}: {why}\n", path.display()))
        );
    }
}

const VALID: &str = "\
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: demo}
spec:
  domain:
    resources: {requests: {memory: 128Mi}}
    devices: {}
";

/// The warning that [`IGNORED`] causes.
const WARNING: &str = "spec.evictionStrategy: is ignored: it only concerns the cluster\n";
const IGNORED: &str = "  evictionStrategy: None\n";

#[test]
fn every_wrong_field_is_one_line_and_nothing_is_left() {
    let root = tempfile::tempdir().unwrap();
    let runtime = root.path().join("husk");
    let wrong = "\
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: demo}
spec:
  domain:
    resources: {requests: {memory: 128Mi}}
    devices:
      disks:
      - {name: a, disk: {bus: virtio}}
      - {name: a, disk: {bus: virtio}}
  volumes:
  - {name: a, emptyDisk: {capacity: 1Gi}}
";
    let expected = "spec.domain.devices.disks[1].name: Invalid value: \
                    spec.domain.devices.disks[1] and spec.domain.devices.disks[0] must not have the same Name.\n";
    for command in ["run", "validate"] {
        let told = on_stdin(&runtime, &[command, "-"], wrong);
        assert_eq!(told, (2, "".into(), expected.into()), "{command}");
        assert!(!runtime.exists());
    }
}

#[test]
fn a_valid_manifest_is_reported() {
    let root = tempfile::tempdir().unwrap();
    assert_eq!(
        on_stdin(root.path(), &["validate", "-"], VALID),
        (0, "demo is valid\n".into(), "".into())
    );
    assert_eq!(
        on_stdin(root.path(), &["validate", "-"], &format!("{VALID}{IGNORED}")),
        (0, "demo is valid\n".into(), format!("warning: {WARNING}"))
    );
}

#[test]
fn several_manifests_are_distinguished() {
    let root = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = root.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (good, bad) = (
        file("good.yaml", &format!("{VALID}{IGNORED}")),
        file("bad.yaml", "kind: Pod\n"),
    );
    let (code, stdout, stderr) = told(&output(root.path(), &["validate", &good, &bad]));
    assert_eq!((code, stdout), (2, format!("{good}: demo is valid\n")));
    assert!(
        stderr.starts_with(&format!("warning: {good}: {WARNING}"))
            && stderr.contains(&format!("\nerror: {bad}: no VirtualMachineInstance")),
        "{stderr}"
    );
}

#[test]
fn lines_name_the_document_if_there_are_several() {
    let root = tempfile::tempdir().unwrap();
    let runtime = root.path().join("husk");
    let other = VALID.replace("demo", "other");
    let two = format!("{VALID}{IGNORED}---\n{other}{IGNORED}");
    let (code, _, stderr) = on_stdin(&runtime, &["validate", "-"], &two);
    assert_eq!(
        (code, stderr),
        (
            0,
            format!("warning: stdin: demo: {WARNING}warning: stdin: other: {WARNING}")
        )
    );
    for (wrong, fault) in [
        (
            other.replace("devices: {}", "devces: {}"),
            "spec.domain.devces: Invalid value: spec.domain.devces in body is a forbidden property\n",
        ),
        (
            other.replace("128Mi", "64Ki"),
            "spec.domain.resources.requests.memory: ",
        ),
    ] {
        for command in ["run", "validate"] {
            let (code, stdout, stderr) = on_stdin(&runtime, &[command, "-"], &format!("{VALID}---\n{wrong}"));
            assert_eq!((code, stdout.as_str()), (2, ""));
            assert!(stderr.starts_with(&format!("stdin: other: {fault}")), "{stderr}");
        }
    }
    // Errors found only by `run` have the same form.
    let (code, _, stderr) = on_stdin(&runtime, &["run", "-"], &two);
    assert_eq!(code, 2);
    let lines = stderr.lines().filter_map(|line| line.split_once(": spec."));
    assert_eq!(
        lines.map(|(place, _)| place).collect::<Vec<_>>(),
        ["stdin: demo", "stdin: other"],
        "{stderr}"
    );
}

#[test]
fn run_rejects_invalid_requests_before_it_starts() {
    let root = tempfile::tempdir().unwrap();
    let runtime = root.path().join("husk");
    let two = format!("{VALID}---\n{}", VALID.replace("demo", "other"));
    let twice = format!("{VALID}---\n{VALID}");
    let placed = VALID.replace("{name: demo}", "{name: demo, namespace: prod}");
    for (args, text, error) in [
        (
            &["run", "-", "--console"][..],
            &two[..],
            "--console needs exactly one VM; the manifest has 2",
        ),
        (
            &["run", "-", "--netns", "/run/netns/x"],
            &two,
            "--netns needs exactly one VM; the manifest has 2",
        ),
        (&["run", "-"], &twice, "stdin: two VMs have the name demo"),
        (
            &["run", "-", "--namespace", "test"],
            &placed,
            "the manifest puts demo in the namespace prod, not test: omit --namespace",
        ),
        (
            &["run", "-", "--volume", "root=/x"],
            VALID,
            "--volume root: no VM in the manifest has a volume with this name",
        ),
    ] {
        let told = on_stdin(&runtime, args, text);
        assert_eq!(told, (2, "".into(), format!("error: {error}\n")), "{args:?}");
        assert!(!runtime.exists());
    }
}

#[test]
fn a_volume_is_passed_to_the_vms_that_have_it() {
    let root = tempfile::tempdir().unwrap();
    let with_disk = |name: &str| {
        let volume = format!("  volumes: [{{name: {name}, containerDisk: {{image: x}}}}]\n");
        let disk = format!("devices: {{disks: [{{name: {name}, disk: {{bus: virtio}}}}]}}");
        let vm = VALID.replace("demo", name).replace("devices: {}", &disk);
        format!("{vm}{volume}")
    };
    let kernel = "    firmware: {kernelBoot: {container: {image: x, kernelPath: /k}}}\n    resources";
    let third = VALID.replace("demo", "c").replace("    resources", kernel);
    let text = format!("{}---\n{}---\n{third}", with_disk("a"), with_disk("b"));
    let volumes = ["a=/x", "b=/x", "kernel-boot-volume=/x"];
    let given: Vec<&str> = volumes.iter().flat_map(|volume| ["--volume", volume]).collect();
    let mut command = husk(&root.path().join("run"), &["run", "-"]);
    let mut child = command
        .args(&given)
        .env("HUSK_KVM", "/dev/null")
        .env("HUSK_VMM", "/bin/false")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let (code, _, stderr) = told(&child.wait_with_output().unwrap());
    // It got as far as opening the first VM's data.
    assert_eq!(code, 1, "{stderr}");
    assert!(
        stderr.ends_with("error: a: volume \"a\": /x: No such file or directory\n"),
        "{stderr}"
    );
}

#[test]
fn missing_files_are_reported_with_their_option() {
    let root = tempfile::tempdir().unwrap();
    let manifest = root.path().join("vm.yaml");
    std::fs::write(&manifest, VALID).unwrap();
    for (kvm, args, error) in [
        (
            "/nonexistent",
            &["--detach", "--kernel", "k"][..],
            "error: no access to KVM: HUSK_KVM=/nonexistent: No such file or directory: \
             set it to a KVM device, or leave it out\n",
        ),
        (
            "/dev/null",
            &["--detach", "--kernel", "/nonexistent"],
            "error: demo: --kernel: /nonexistent: No such file or directory\n",
        ),
        (
            "/dev/null",
            &["--kernel", "/proc/version", "--initrd", "/proc"],
            "error: demo: --initrd: /proc is a directory, not a regular file\n",
        ),
    ] {
        let mut command = husk(&root.path().join("run"), &["run", manifest.to_str().unwrap()]);
        command
            .args(args)
            .env("HUSK_KVM", kvm)
            .env("HUSK_VMM", "/bin/false");
        let (code, stdout, stderr) = told(&command.output().unwrap());
        assert_eq!((code, stdout.as_str()), (1, ""), "{args:?}");
        assert!(stderr.ends_with(error), "{stderr}");
        assert!(!root.path().join("run/default").exists());
    }
}

#[test]
fn without_vms_lists_are_empty_and_names_not_found() {
    let root = tempfile::tempdir().unwrap();
    assert_eq!(
        told(&output(root.path(), &["list"])),
        (0, "".into(), "no VM is running\n".into())
    );
    assert_eq!(
        told(&output(root.path(), &["list", "-o", "json"])),
        (0, "[]\n".into(), "".into())
    );
    for command in [
        &["console"][..],
        &["pause"],
        &["resume"],
        &["reset"],
        &["soft-reboot"],
        &["stop"],
        &["rm"],
        &["logs"],
        &["inspect"],
        &["ssh"],
        &["port-forward", "8080:80"],
        &["snapshot", "dir"],
        &["addinterface", "blue"],
        &["removeinterface", "blue"],
        &["link", "blue", "up"],
    ] {
        let words = [&command[..1], &["test/demo"], &command[1..]].concat();
        let told = told(&output(root.path(), &words));
        assert_eq!(
            told,
            (1, "".into(), "error: no VM test/demo is running\n".into()),
            "{command:?}"
        );
    }
}

#[test]
fn what_is_no_complete_snapshot_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let runtime = root.path().join("husk");
    let snap = root.path().join("snap");
    let shown = snap.display();
    let restore = || told(&output(&runtime, &["restore", snap.to_str().unwrap()]));
    let refused = |reason: &str| (1, String::new(), format!("error: {shown}{reason}\n"));
    assert_eq!(restore(), refused(": No such file or directory"));
    std::fs::create_dir(&snap).unwrap();
    assert_eq!(restore(), refused(" is not a snapshot: it has no snapshot.json"));
    std::fs::write(snap.join("memory"), "").unwrap();
    assert_eq!(
        restore(),
        refused(" is not a complete snapshot: it was interrupted; remove it")
    );
    std::fs::write(snap.join("snapshot.json"), "{\"version\": 99}").unwrap();
    let (code, stdout, stderr) = restore();
    assert_eq!((code, stdout.as_str(), stderr.lines().count()), (1, "", 1));
    assert!(
        stderr.contains("/snapshot.json: version 99 is unknown"),
        "{stderr}"
    );
    assert!(!runtime.exists());
}

#[test]
fn rm_reports_every_missing_vm() {
    let root = tempfile::tempdir().unwrap();
    assert_eq!(
        told(&output(root.path(), &["rm", "a", "b"])),
        (
            1,
            "".into(),
            "error: no VM a is running\nerror: no VM b is running\n".into()
        )
    );
    assert_eq!(told(&output(root.path(), &["rm", "--force", "a", "b"])).0, 0);
}

#[test]
fn control_characters_in_names_are_escaped() {
    let root = tempfile::tempdir().unwrap();
    let manifest = root.path().join("a\x1b[31m\nerror: b.yaml");
    let shown = manifest
        .display()
        .to_string()
        .replace('\x1b', "\\u{1b}")
        .replace('\n', "\\n");
    let path = manifest.to_str().unwrap();
    let (_, _, stderr) = told(&output(root.path(), &["validate", path]));
    assert_eq!(stderr, format!("error: {shown}: No such file or directory\n"));
    std::fs::write(&manifest, format!("{VALID}{IGNORED}")).unwrap();
    let (_, stdout, stderr) = told(&output(root.path(), &["validate", path, path]));
    assert!(
        stderr.starts_with(&format!("warning: {shown}: {WARNING}")),
        "{stderr}"
    );
    assert!(
        stdout.starts_with(&format!("{shown}: demo is valid\n")),
        "{stdout}"
    );
}

#[test]
fn the_doctors_json_agrees_with_its_status() {
    let root = tempfile::tempdir().unwrap();
    let (code, stdout, stderr) = told(&output(root.path(), &["doctor", "--json"]));
    assert_eq!(stderr, "");
    let json: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(code == 0, json["canRunVms"].as_bool().unwrap());
    assert!(json["summary"].is_string());
    let checks = json["checks"].as_array().unwrap();
    for check in checks {
        assert!(
            check["name"].is_string() && check["detail"].is_string(),
            "{check}"
        );
        assert!(
            ["present", "missing"].contains(&check["status"].as_str().unwrap()),
            "{check}"
        );
        assert!(
            ["required", "optional"].contains(&check["severity"].as_str().unwrap()),
            "{check}"
        );
        assert!(check["fix"].is_string() || check["fix"].is_null(), "{check}");
    }
    let blocked = checks
        .iter()
        .any(|check| check["severity"] == "required" && check["status"] == "missing");
    assert_eq!(blocked, code == 1);
    let (table_code, table, _) = told(&output(root.path(), &["doctor"]));
    assert_eq!(table_code, code);
    assert!(!table.contains('\x1b'), "no colours in a pipe");
}

#[test]
fn completions_for_every_shell() {
    let root = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (code, stdout, _) = told(&output(root.path(), &["completions", shell]));
        assert_eq!(code, 0);
        assert!(
            stdout.contains("console") && stdout.contains("grace-period"),
            "{shell}"
        );
    }
}

#[test]
fn help_is_complete_and_hides_the_service() {
    let root = tempfile::tempdir().unwrap();
    let (code, stdout, _) = told(&output(root.path(), &["--help"]));
    assert_eq!(code, 0);
    assert!(!stdout.contains("\n  service"), "{stdout}");
    for variable in [
        "HUSK_RUNTIME_DIR",
        "HUSK_SCRATCH_DIR",
        "HUSK_VMM",
        "HUSK_MONITOR",
        "HUSK_KVM",
    ] {
        assert!(stdout.contains(variable), "{stdout}");
    }
    let (_, stdout, _) = told(&output(root.path(), &["run", "--help"]));
    for status in ["10 ", "11 ", "12 ", "129 ", "130 ", "143 "] {
        assert!(stdout.contains(&format!("  {status}")), "{stdout}");
    }
    for (words, same) in [
        (&["help"][..], &["--help"][..]),
        (&["help", "run"], &["run", "--help"]),
    ] {
        assert_eq!(
            told(&output(root.path(), words)),
            told(&output(root.path(), same))
        );
    }
    let (_, stdout, _) = told(&output(root.path(), &["--version"]));
    assert_eq!(stdout, concat!("husk ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    let root = tempfile::tempdir().unwrap();
    let mut child = husk(root.path(), &["completions", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let (code, _, stderr) = told(&child.wait_with_output().unwrap());
    assert_eq!((code, stderr.as_str()), (0, ""));
}
