//! Objects and claims of a machine, by commands that need no systemd: what is stored, refused and deleted.

mod support;

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{FlockOperation, fcntl_lock};
use support::{husk, told};

/// A user's data directory, and a folder for manifests.
struct Store {
    root: tempfile::TempDir,
}

impl Store {
    fn new() -> Store {
        Store {
            root: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = husk(&self.path("run"), args);
        command
            .env("HUSK_DATA_DIR", self.path("data"))
            .current_dir(self.root.path());
        command
    }

    fn run(&self, args: &[&str]) -> (i32, String, String) {
        told(&self.command(args).output().unwrap())
    }

    /// Output of a command that succeeds.
    fn ok(&self, args: &[&str]) -> String {
        let (code, stdout, stderr) = self.run(args);
        assert_eq!(code, 0, "{args:?}: {stderr}");
        stdout
    }

    /// Applies a manifest. Returns the status, and both outputs.
    fn apply(&self, manifest: &str) -> (i32, String) {
        fs::write(self.path("manifest.yaml"), manifest).unwrap();
        let (code, stdout, stderr) = self.run(&["apply", "-f", "manifest.yaml"]);
        (code, stdout + &stderr)
    }

    fn names(&self, kind: &str) -> String {
        self.ok(&["get", kind, "-o", "name"])
    }

    /// Stores a blank DataVolume, as a person may do by hand, and makes its claim. Returns the claim's image.
    fn blank(&self, name: &str) -> PathBuf {
        let folder = self.path("data/objects/default/datavolume");
        fs::create_dir_all(&folder).unwrap();
        let manifest = format!(
            "apiVersion: cdi.kubevirt.io/v1beta1\nkind: DataVolume\n\
             metadata: {{name: {name}, uid: 5f0b7c2e-1111-4222-8333-{:0>12}}}\n\
             spec: {{source: {{blank: {{}}}}, storage: {{resources: {{requests: {{storage: 1Mi}}}}}}}}\n",
            name.len()
        );
        fs::write(folder.join(format!("{name}.yaml")), manifest).unwrap();
        self.ok(&["import-volume", &format!("default:{name}")]);
        self.path("data/volumes/default").join(name).join("disk.img")
    }
}

/// Locks an image as a running VM does.
fn lock(image: &Path) -> File {
    let image = File::options().read(true).write(true).open(image).unwrap();
    fcntl_lock(&image, FlockOperation::NonBlockingLockExclusive).unwrap();
    image
}

fn secret(name: &str, value: &str, more: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: {name}}}\nstringData: {{password: {value}}}\n{more}"
    )
}

fn claim(name: &str, size: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\n\
         spec: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: {size}}}}}}}\n"
    )
}

#[test]
fn objects_are_created_configured_and_deleted() {
    let store = Store::new();
    let both = |value: &str| format!("{}---\n{}", secret("key", value, ""), claim("data", "2Mi"));
    let (code, told) = store.apply(&both("one"));
    assert_eq!(code, 0, "{told}");
    assert_eq!(told, "persistentvolumeclaim/data created\nsecret/key created\n");
    let (code, told) = store.apply(&both("one"));
    assert_eq!((code, told.matches(" unchanged\n").count()), (0, 2), "{told}");
    let (code, told) = store.apply(&both("two").replace("2Mi", "3Mi"));
    assert_eq!((code, told.matches(" configured\n").count()), (0, 2), "{told}");
    assert_eq!(
        (store.names("secret"), store.names("pvc")),
        ("key\n".into(), "data\n".into())
    );
    let length = fs::metadata(store.path("data/volumes/default/data/disk.img"))
        .unwrap()
        .len();
    assert_eq!(length, 3 << 20);
    let (code, _, stderr) = store.run(&["delete", "-f", "manifest.yaml"]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(
        (store.names("secret"), store.names("pvc")),
        (String::new(), String::new())
    );
    assert_eq!(store.run(&["delete", "-f", "manifest.yaml"]).0, 1);
    store.ok(&["delete", "-f", "manifest.yaml", "--ignore-not-found"]);
}

#[test]
fn nothing_is_stored_if_one_object_is_wrong() {
    let store = Store::new();
    let immutable = secret("fixed", "one", "immutable: true\n");
    assert_eq!(
        store
            .apply(&format!("{immutable}---\n{}", claim("data", "2Mi")))
            .0,
        0
    );
    let new = secret("new", "one", "");
    for (wrong, reason) in [
        (claim("data", "1Mi"), "spec.resources.requests.storage: Forbidden"),
        (immutable.replace("one", "two"), "secret/fixed is immutable"),
        (secret("Wrong", "one", ""), "metadata.name"),
        (new.clone(), "two objects secret/new"),
    ] {
        let (code, told) = store.apply(&format!("{new}---\n{wrong}"));
        assert_eq!(code, 2, "{told}");
        assert!(told.contains(reason), "{told}");
        assert_eq!(store.names("secret"), "fixed\n", "{wrong}");
    }
}

#[test]
fn vms_cannot_multiply_a_large_preference_without_bound() {
    let store = Store::new();
    let annotations: Vec<String> = (0..20_000).map(|number| format!("a{number}: {number}")).collect();
    let mut manifest = format!(
        "apiVersion: instancetype.kubevirt.io/v1beta1\nkind: VirtualMachinePreference\nmetadata: {{name: large}}\n\
         spec: {{annotations: {{{}}}}}\n",
        annotations.join(", ").replace(": ", ": v")
    );
    let mut differs = |count: usize| {
        for number in 0..count {
            manifest += &format!(
                "---\napiVersion: kubevirt.io/v1\nkind: VirtualMachine\nmetadata: {{name: vm{count}-{number}}}\n\
                 spec:\n  runStrategy: Halted\n  preference: {{name: large, kind: VirtualMachinePreference}}\n  \
                 template: {{spec: {{domain: {{devices: {{}}, memory: {{guest: 64Mi}}}}}}}}\n"
            );
        }
        fs::write(store.path("manifest.yaml"), &manifest).unwrap();
        store.run(&["diff", "-f", "manifest.yaml"])
    };
    let (code, _, stderr) = differs(1);
    assert_eq!((code, stderr.as_str()), (1, ""));
    let (code, _, stderr) = differs(40);
    assert_eq!((code, stderr.lines().count()), (2, 1), "{stderr}");
    assert!(
        stderr.contains("add more than 4 MiB to this VM and those before it"),
        "{stderr}"
    );
}

#[test]
fn a_diff_shows_what_changes_and_no_secret() {
    let store = Store::new();
    assert_eq!(store.apply(&secret("key", "SECRET-one", "")).0, 0);
    assert_eq!(store.run(&["diff", "-f", "manifest.yaml"]).0, 0);
    fs::write(store.path("manifest.yaml"), secret("key", "SECRET-two", "")).unwrap();
    let (code, stdout, stderr) = store.run(&["diff", "-f", "manifest.yaml"]);
    assert_eq!(code, 1, "{stderr}");
    assert!(
        stdout.contains("+  password: ") && !stdout.contains("SECRET"),
        "{stdout}"
    );
}

#[test]
fn a_refused_deletion_is_forgotten() {
    let store = Store::new();
    let image = store.blank("data");
    let used = lock(&image);
    let (code, _, stderr) = store.run(&["delete", "dv", "data"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("a running VM uses the volume data"), "{stderr}");
    // Otherwise any later command would delete the data as soon as the VM has ended.
    drop(used);
    store.ok(&["delete", "secret", "none", "--ignore-not-found"]);
    assert!(image.exists() && store.names("dv") == "data\n");
    store.ok(&["delete", "dv", "data"]);
    assert!(!image.exists() && store.names("dv").is_empty());
}

/// Leaves the DataVolume `data` as a deletion that was cut off does. Returns its file.
fn begin_deletion(store: &Store) -> PathBuf {
    let file = store.path("data/objects/default/datavolume/data.yaml");
    let text = fs::read_to_string(&file).unwrap();
    let begun = text.replace(
        "{name: data,",
        "{name: data, deletionTimestamp: 2026-01-01T00:00:00Z,",
    );
    fs::write(&file, begun).unwrap();
    file
}

#[test]
fn a_deletion_that_was_cut_off_is_ended_by_the_next_command() {
    let store = Store::new();
    let image = store.blank("data");
    let file = begin_deletion(&store);
    store.ok(&["delete", "secret", "none", "--ignore-not-found"]);
    assert!(!image.exists() && !file.exists());
}

#[test]
fn a_deletion_that_was_cut_off_is_forgotten_if_a_vm_uses_the_data() {
    let store = Store::new();
    let image = store.blank("data");
    begin_deletion(&store);
    let used = lock(&image);
    store.ok(&["delete", "secret", "none", "--ignore-not-found"]);
    drop(used);
    store.ok(&["delete", "secret", "none", "--ignore-not-found"]);
    assert!(image.exists() && store.names("dv") == "data\n");
}

#[test]
fn a_claim_that_a_data_volume_did_not_make_stays() {
    let store = Store::new();
    store.ok(&["volume", "create", "data", "--size", "1Mi"]);
    let image = store.blank("data");
    store.ok(&["delete", "dv", "data"]);
    assert!(image.exists() && store.names("pvc") == "data\n");
}

#[test]
fn the_data_of_a_damaged_data_volume_is_named() {
    let store = Store::new();
    let image = store.blank("data");
    let file = store.path("data/objects/default/datavolume/data.yaml");
    fs::write(&file, "kind:").unwrap();
    let (code, _, stderr) = store.run(&["delete", "dv", "data"]);
    assert_eq!((code, stderr.lines().count()), (0, 1), "{stderr}");
    assert!(stderr.contains(&file.display().to_string()), "{stderr}");
    assert!(
        stderr.ends_with("its claim stays, with its data: `husk delete pvc data` deletes it\n"),
        "{stderr}"
    );
    store.ok(&["delete", "pvc", "data"]);
    assert!(!image.exists());
}

#[test]
fn a_vm_that_never_ran_keeps_the_mark_of_its_first_start() {
    let store = Store::new();
    let folder = store.path("data/objects/default/virtualmachineinstance");
    fs::create_dir_all(&folder).unwrap();
    let manifest = "apiVersion: kubevirt.io/v1\nkind: VirtualMachineInstance\nmetadata: {name: demo}\n\
                    spec: {domain: {memory: {guest: 64Mi}, devices: {}}}\n";
    fs::write(folder.join("demo.yaml"), manifest).unwrap();
    let mark = folder.join(".demo.not-started");
    fs::write(&mark, "Once").unwrap();
    let (code, _, stderr) = store.run(&["service", "default:demo"]);
    assert_eq!(code, 2, "{stderr}");
    assert!(mark.exists());
}

#[test]
fn the_journal_of_a_vm_is_shown_also_if_it_does_not_run() {
    let store = Store::new();
    let folder = store.path("data/objects/default/virtualmachineinstance");
    fs::create_dir_all(&folder).unwrap();
    let manifest = "apiVersion: kubevirt.io/v1\nkind: VirtualMachineInstance\nmetadata: {name: demo}\n\
                    spec: {domain: {devices: {}}}\n";
    fs::write(folder.join("demo.yaml"), manifest).unwrap();
    let journalctl = store.path("journalctl");
    fs::write(&journalctl, "#!/bin/sh\necho \"$@\"\n").unwrap();
    fs::set_permissions(&journalctl, fs::Permissions::from_mode(0o755)).unwrap();
    let logs = |args: &[&str]| {
        let mut command = store.command(args);
        told(&command.env("PATH", store.root.path()).output().unwrap())
    };
    let (code, stdout, stderr) = logs(&["logs", "demo", "--monitor"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.ends_with("--unit husk@default:demo.service\n"), "{stdout}");
    for args in [&["logs", "demo"][..], &["logs", "other", "--monitor"]] {
        let (code, _, stderr) = logs(args);
        assert_eq!(code, 1, "{args:?}");
        assert!(stderr.ends_with(" is running\n"), "{stderr}");
    }
}

#[test]
fn what_only_a_cluster_has_is_refused() {
    let store = Store::new();
    let vmi = |networks: &str, volumes: &str, interfaces: &str| {
        let disks = if volumes == "[]" {
            ""
        } else {
            ", disks: [{name: token, disk: {}}]"
        };
        store.apply(&format!(
            "apiVersion: kubevirt.io/v1\nkind: VirtualMachineInstance\nmetadata: {{name: vm}}\n\
             spec: {{domain: {{memory: {{guest: 64Mi}}, devices: {{interfaces: {interfaces}{disks}}}}}, \
             networks: {networks}, volumes: {volumes}}}\n"
        ))
    };
    let red = "[{name: red, multus: {networkName: red-net}}]";
    let (code, told) = vmi(red, "[]", "[{name: red, bridge: {}}]");
    assert_eq!(code, 2, "{told}");
    assert!(
        told.contains(
            "spec.networks[0].multus: Unsupported value: VMs of `husk apply` have the pod network only"
        ),
        "{told}"
    );
    let volumes = "[{name: token, serviceAccount: {serviceAccountName: default}}]";
    let (code, told) = vmi("[]", volumes, "[]");
    assert_eq!(code, 2, "{told}");
    assert!(
        told.contains("spec.volumes[0].serviceAccount: Unsupported value: a machine without a cluster"),
        "{told}"
    );
    assert_eq!(store.names("vmi"), "");
}
