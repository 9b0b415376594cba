//! `cargo xtask demo --kubevirt`: a VirtualMachine under KubeVirt's stock control plane, by `kubectl` and `virtctl`.

use super::console::Console;
use super::show::{Message, Show};
use crate::binaries::Profile;
use crate::cluster::{self, Kubectl, Options, Timeline};
use crate::progress::Progress;
use crate::serial::Serial;
use crate::{checkout, images, lab, shell};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Names of the VM and of the pod from which it is reached, as in their manifests.
const VM: &str = "husk-demo";
const POD: &str = "husk-demo-client";
const USER: &str = "debian";
const PASSWORD: &str = "husk";
const IMAGE: &str = "debian-13-cloud";
/// Claims of the root disk and of the disk that is plugged.
const ROOT: &str = "husk-demo-root";
const DATA: &str = "husk-demo-data";
/// Folder of the claims' files on the node.
const FILES: &str = "/var/tmp/husk-demo";

/// Time limit of a state of the cluster, and of a boot of the guest, on a busy machine.
const CHANGE: Duration = Duration::from_secs(180);
const BOOT: Duration = Duration::from_secs(400);
/// Interval at which the guest's newest line is shown.
const GLANCE: Duration = Duration::from_millis(250);

/// Starts a cluster with KubeVirt from the checkout `source`, unless one runs, and shows the life of a VM. A cluster
/// that this function started ends with it.
pub fn run(source: &Path) -> Result<()> {
    let progress = Progress::on_stderr();
    let mut show = Show::new();
    show.title("A Debian VM under KubeVirt's own control plane, on a node with Husk");
    cluster::need_root(&format!("demo --kubevirt {}", source.display()))?;
    images::ensure(&progress, &[IMAGE])?;
    let started = !cluster::exists();
    if started {
        let options = Options {
            nodes: 1,
            profile: Profile::EndToEnd,
            build: true,
        };
        cluster::up(source, &options)?;
    } else if !cluster::runs() {
        bail!("the cluster is incomplete: end it by cargo xtask cluster down");
    }
    let mut demonstration = Demonstration {
        kubectl: Kubectl::new(&cluster::folder()?),
        progress: &progress,
        show: &mut show,
    };
    demonstration.remove();
    let result = demonstration.run();
    if started {
        result.and(cluster::down())
    } else {
        demonstration.remove();
        result
    }
}

#[derive(Debug)]
struct Demonstration<'a> {
    kubectl: Kubectl,
    progress: &'a Progress,
    show: &'a mut Show,
}

impl Demonstration<'_> {
    fn run(&mut self) -> Result<()> {
        self.storage()?;
        let folder = checkout::root().join("tests/manifests");
        let manifest = |name: &str| folder.join(name).display().to_string();
        self.kubectl
            .run(&["apply", "-f", &manifest("demo-cluster-pod.yaml")])?;

        self.heading("A VirtualMachine with its disk on a claim");
        let mut timeline = Timeline::watch(&self.kubectl, VM, "")?;
        timeline.start();
        self.shown("kubectl", &["apply", "-f", &manifest("demo-cluster-vm.yaml")])?;
        let (mut vm, up) = self.boots(&mut timeline)?;
        let mut shares = timeline.shares();
        let before: f64 = shares.iter().map(|(_, share)| share).sum();
        shares.push(("guest, to its login prompt", up - before));
        drop(timeline);
        self.shown("kubectl", &["get", "vm,vmi"])?;
        self.shown_in_guest(&mut vm, "hostname; uname -sr; lsblk -o NAME,SIZE,MOUNTPOINTS")?;

        self.heading("From another pod");
        self.until("pod", POD, ".status.phase", "Running")?;
        let address = self.field("vmi", VM, ".status.interfaces[0].ipAddress")?;
        self.shown("kubectl", &["exec", POD, "--", "ping", "-c", "3", &address])?;
        self.shown("virtctl", &["expose", "vm", VM, "--name", VM, "--port", "22"])?;
        let service = self.field("service", VM, ".spec.clusterIP")?;
        // The SSH server greets first. The rules of the Service may come later than the Service.
        let greet = format!(
            "for i in $(seq 60); do nc -w 5 {service} 22 </dev/null | grep SSH && exit; sleep 1; done; exit 1"
        );
        self.shown("kubectl", &["exec", POD, "--", "sh", "-c", &greet])?;

        self.heading("A disk is plugged");
        let volume = format!("--volume-name={DATA}");
        self.shown(
            "virtctl",
            &["addvolume", VM, &volume, "--serial=DATA", "--persist"],
        )?;
        let phase = format!(".status.volumeStatus[?(@.name==\"{DATA}\")].phase");
        self.until("vmi", VM, &phase, "Ready")?;
        vm.console
            .run("until lsblk -no SERIAL | grep -q DATA; do sleep 0.2; done")?;
        self.shown_in_guest(&mut vm, "lsblk -o NAME,SIZE,SERIAL")?;
        drop(vm);

        self.heading("A restart");
        let earlier = self.field("vmi", VM, ".metadata.uid")?;
        let mut timeline = Timeline::watch(&self.kubectl, VM, &earlier)?;
        timeline.start();
        self.shown("virtctl", &["restart", VM])?;
        let (mut vm, _) = self.boots(&mut timeline)?;
        drop(timeline);
        self.shown_in_guest(&mut vm, "lsblk -o NAME,SIZE,SERIAL")?;
        drop(vm);

        self.heading("Deletion");
        self.shown("kubectl", &["delete", "vm", VM, "--timeout=180s"])?;
        self.until_none(&format!("app={VM}"))?;

        self.heading("From kubectl apply to the login prompt");
        for (by, seconds) in &shares {
            let percent = 100.0 * seconds / up;
            self.show
                .line(&format!("{seconds:>7.2} s  {percent:>3.0} %  {by}"));
        }
        self.show.line(&format!("{up:>7.2} s         in all"));
        Ok(())
    }

    /// Follows a start to the login prompt; returns the VM's console, logged in, and the seconds to the prompt.
    fn boots(&mut self, timeline: &mut Timeline) -> Result<(VmConsole, f64)> {
        let show = &mut *self.show;
        timeline.until_running(CHANGE, |seconds, what| moment(show, seconds, what))?;
        let mut vm = VmConsole::attach(&self.kubectl)?;
        let deadline = Instant::now() + BOOT;
        let when = loop {
            ensure!(
                Instant::now() < deadline,
                "no login prompt within {} s",
                BOOT.as_secs()
            );
            let output = &mut vm.console.output;
            if let Some((_, when)) = output.poll(&["login: "], Instant::now() + GLANCE)? {
                break when;
            }
            self.show.take(&Message::News(output.last_line()));
        };
        let up = timeline.seconds(when);
        moment(self.show, up, "login prompt");
        vm.console.log_in(USER, PASSWORD)?;
        // The kernel's messages would mix with the output of commands.
        vm.console.run("sudo dmesg --console-off")?;
        Ok((vm, up))
    }

    /// Makes the files of the claims on the node, and the claims.
    fn storage(&mut self) -> Result<()> {
        let step = self.progress.step("copying the disk image to the node");
        let image = images::path(IMAGE)?.join("disk.img");
        let (root, data) = (format!("{FILES}/root"), format!("{FILES}/data"));
        self.on_node(&format!(
            "mkdir -p {root} {data} && cp --sparse=always {} {root}/disk.img && \
             truncate -s 1G {data}/disk.img && chown -R 107:107 {FILES}",
            shell::quote(&image.display().to_string())
        ))?;
        step.done();
        let node = self.field("nodes", "-lhusk.io/node", ".items[0].metadata.name")?;
        let volumes = [(ROOT, &root, "3Gi"), (DATA, &data, "1Gi")];
        let objects = volumes.map(|(name, path, size)| claim(name, path, size, &node));
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects.concat()});
        self.kubectl.apply(&list.to_string())
    }

    /// Runs a shell command on the node.
    fn on_node(&self, script: &str) -> Result<()> {
        let command = lab::Command::new(["sh", "-c", script]).in_lab(true);
        let mut output = Vec::new();
        let status = command.lines(self.progress, |line| output.push(line.to_owned()))?;
        ensure!(status == 0, "on the node: {}", output.join("\n"));
        Ok(())
    }

    /// Removes all objects and files of the demonstration that exist.
    fn remove(&self) {
        let kinds = "vm,pod,service,pvc,pv";
        let names = [VM, POD, ROOT, DATA];
        let words = [
            &["delete", kinds, "--ignore-not-found", "--timeout=150s"][..],
            &names,
        ]
        .concat();
        let removed = self
            .kubectl
            .run(&words)
            .map(drop)
            .and_then(|()| self.on_node(&format!("rm -rf {FILES}")));
        if let Err(error) = removed {
            eprintln!("objects of the demonstration are left: {error:#}");
        }
    }

    fn heading(&mut self, text: &str) {
        self.show.take(&Message::Heading(text.to_owned()));
    }

    /// Runs a client with `words`, and shows the command and its output.
    fn shown(&mut self, client: &str, words: &[&str]) -> Result<()> {
        let root = format!("{}/", checkout::root().display());
        let text = words.join(" ").replace(&root, "");
        self.show.take(&Message::Command(format!("{client} {text}")));
        let mut command = if client == "virtctl" {
            self.kubectl.virtctl(words)
        } else {
            self.kubectl.command(words)
        };
        let output = command
            .output()
            .with_context(|| format!("cannot start {client}"))?;
        for line in [&output.stdout, &output.stderr]
            .iter()
            .flat_map(|text| text.split(|byte| *byte == b'\n'))
        {
            if !line.is_empty() {
                self.show.line(&String::from_utf8_lossy(line));
            }
        }
        ensure!(output.status.success(), "{client} {text}: {}", output.status);
        Ok(())
    }

    fn shown_in_guest(&mut self, vm: &mut VmConsole, command: &str) -> Result<()> {
        self.show.take(&Message::Command(format!("virtctl console {VM}")));
        for line in vm.console.run(command)?.lines() {
            self.show.line(line);
        }
        Ok(())
    }

    fn field(&self, kind: &str, name: &str, path: &str) -> Result<String> {
        self.kubectl
            .run(&["get", kind, name, "-o", &format!("jsonpath={{{path}}}")])
    }

    fn until(&self, kind: &str, name: &str, path: &str, value: &str) -> Result<()> {
        let what = format!("{kind} {name}: {path} is {value}");
        self.kubectl.until(&what, CHANGE, |_| {
            Ok((self.field(kind, name, path)? == value).then_some(()))
        })
    }

    /// Waits until no VM, VMI or pod with the label is left.
    fn until_none(&mut self, label: &str) -> Result<()> {
        let words = ["get", "vm,vmi,pods", "-l", label, "-o", "name"];
        self.kubectl.until("deletion", CHANGE, |kubectl| {
            Ok(kubectl.run(&words)?.is_empty().then_some(()))
        })?;
        self.shown("kubectl", &["get", "vm,vmi,pods", "-l", label])
    }
}

fn moment(show: &mut Show, seconds: f64, what: &str) {
    show.take(&Message::Moment(seconds, what.to_owned(), String::new()));
}

/// A volume of a folder of the node, and a claim that is bound to it.
fn claim(name: &str, path: &str, size: &str, node: &str) -> [Value; 2] {
    let spec = json!({
        "accessModes": ["ReadWriteOnce"],
        "volumeMode": "Filesystem",
        "storageClassName": "local",
    });
    let here = json!({"key": "kubernetes.io/hostname", "operator": "In", "values": [node]});
    let mut volume = json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}});
    volume["spec"] = spec.clone();
    volume["spec"]["capacity"] = json!({"storage": size});
    volume["spec"]["local"] = json!({"path": path});
    volume["spec"]["nodeAffinity"] =
        json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}});
    let mut claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}});
    claim["spec"] = spec;
    claim["spec"]["volumeName"] = json!(name);
    claim["spec"]["resources"] = json!({"requests": {"storage": size}});
    [volume, claim]
}

/// `virtctl console` of the VM. It ends when this is dropped.
#[derive(Debug)]
struct VmConsole {
    client: Child,
    console: Console,
}

impl VmConsole {
    fn attach(kubectl: &Kubectl) -> Result<Self> {
        let virtctl = kubectl.virtctl(&["console", VM]);
        let words = std::iter::once(virtctl.get_program()).chain(virtctl.get_args());
        let line = shell::join(words.map(|word| word.to_string_lossy().into_owned()));
        // virtctl needs a terminal.
        let mut command = std::process::Command::new("script");
        command.args(["--quiet", "--return", "--flush", "--command", &line, "/dev/null"]);
        for (name, value) in virtctl.get_envs() {
            if let Some(value) = value {
                command.env(name, value);
            }
        }
        let mut client = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start script, of Debian's package bsdutils")?;
        let keyboard = client.stdin.take().context("no pipe")?;
        let output = Serial::watch(client.stdout.take().context("no pipe")?);
        Ok(Self {
            client,
            console: Console::new(keyboard, output),
        })
    }
}

impl Drop for VmConsole {
    fn drop(&mut self) {
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}
