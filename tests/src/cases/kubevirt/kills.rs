//! Processes of the node and of the control plane are killed while VMs are made, plugged, paused and deleted.

use crate::finish::finish;
use crate::harness::context::TestContext;
use crate::harness::kubevirt::objects::{local_volume, virtual_machine};
use crate::harness::kubevirt::{KubeVirt, VMI};
use crate::harness::{Case, met};
use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub const CASE: Case = Case {
    name: "kubevirt-kills",
    about: "agent, shim, VMM, containerd, kubelet, virt-controller, virt-api and kube-apiserver killed at random moments",
    limit: Duration::from_secs(3000),
    run,
};

/// Number of kills, unless `HUSK_KILLS` has another.
const KILLS: u32 = 40;
/// Kills between two checks that everything converges.
const ROUND: u32 = 10;
const VMS: [&str; 4] = ["kill-0", "kill-1", "kill-2", "kill-3"];
/// Folder of the plugged volumes' data on the node.
const DATA: &str = "/var/tmp/husk-kills";

/// Processes on the node, as patterns of `pkill -f` that do not match the shell whose command line has them. systemd or
/// the kubelet starts all but the VMs' own again.
const ON_NODE: [(&str, &str); 5] = [
    ("agent", "^/[h]usk-agent"),
    ("shim", "^[^ ]*[c]ontainerd-shim-husk-v2 "),
    ("VMM", "^[^ ]*[h]usk-vmm "),
    ("containerd", "/[c]ontainerd$"),
    ("kubelet", "/[k]ubelet --config"),
];
/// Processes on this machine.
const ON_HOST: [&str; 3] = ["virt-controller", "virt-api", "kube-apiserver"];

/// The pods' network namespaces, and what containerd logged of them.
const NAMESPACE_LOG: &str =
    "cd /run/netns; for n in *; do ls -la $n; journalctl -b --no-pager | grep $n | tail -n 3; done";

/// Value of an environment variable, if it is set.
fn number(variable: &str) -> Result<Option<u32>> {
    let Ok(value) = std::env::var(variable) else {
        return Ok(None);
    };
    let number = value.parse();
    number.map(Some).with_context(|| format!("{variable}={value}"))
}

fn run(ctx: &TestContext) -> Result<()> {
    let c = &KubeVirt::find(ctx)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
    let seed = number("HUSK_SEED")?.unwrap_or(now as u32);
    let kills = number("HUSK_KILLS")?.unwrap_or(KILLS);
    println!("HUSK_SEED={seed} HUSK_KILLS={kills}");
    let namespaces = number_of_namespaces()?;
    prepare(c)?;
    let result =
        killing(c, &mut Rng::with_seed(seed.into()), kills).with_context(|| format!("with HUSK_SEED={seed}"));
    if result.is_err() {
        show(c)?;
    }
    ctx.part("kills", || result);
    ctx.part("nothing is left", || nothing_is_left(c, namespaces));
    Ok(())
}

/// Prints what the cluster and the agent know of the VMs.
fn show(c: &KubeVirt<'_>) -> Result<()> {
    let uid = "custom-columns=NAME:.metadata.name,UID:.metadata.uid,PHASE:.status.phase,DELETED:.metadata.deletionTimestamp";
    for words in [
        &["get", VMI, "-o", uid][..],
        &["get", "pods", "-o", "wide"],
        &["get", "events", "--sort-by=.metadata.creationTimestamp"],
    ] {
        println!("{}", c.kubectl(words)?.text);
    }
    let log = "tail -n 80 /var/log/pods/kubevirt_husk-agent-*/husk-agent/*.log; date";
    println!("{}", on_node(log)?);
    Ok(())
}

/// The VMs, and a volume for each that can be plugged.
fn prepare(c: &KubeVirt<'_>) -> Result<()> {
    let node = c.node()?;
    for name in VMS {
        let folder = format!("{DATA}/{name}");
        on_node(&format!(
            "mkdir -p {folder} && truncate -s 8M {folder}/disk.img && chown -R 107:107 {folder}"
        ))?;
        c.apply(&local_volume(name, "Filesystem", (&folder, "8Mi"), &node))?;
        c.apply(&[virtual_machine(name, "button,shell")])?;
    }
    converged(c, &Expected::default())
}

/// Effects that the kills and commands since the last check may have.
#[derive(Debug, Default)]
struct Expected {
    /// VMs that may have been replaced: their shim or VMM was killed, or they were restarted or deleted.
    replaced: Vec<String>,
    /// VMs that may be paused.
    paused: Vec<String>,
    /// UIDs of VMIs whose shim or VMM was killed. They may still be shown as running.
    killed: Vec<String>,
}

fn killing(c: &KubeVirt<'_>, random: &mut Rng, kills: u32) -> Result<()> {
    let mut uids = uids(c)?;
    let mut expected = Expected::default();
    for kill in 1..=kills {
        let vm = VMS[random.usize(..VMS.len())];
        let action = act(c, random, vm, &mut expected)?;
        std::thread::sleep(Duration::from_millis(random.u64(..3000)));
        let victim = random.usize(..ON_NODE.len() + ON_HOST.len());
        let name = match ON_NODE.get(victim) {
            Some((name @ ("shim" | "VMM"), pattern)) => match kill_process_of_vm(c, pattern)? {
                Some((victim, uid)) => {
                    let name = format!("{name} of {victim}");
                    expected.replaced.push(victim);
                    expected.killed.push(uid);
                    name
                }
                None => format!("{name} of none"),
            },
            Some((name, pattern)) => {
                on_node(&format!("pkill -9 -f '{pattern}' || true"))?;
                (*name).to_owned()
            }
            None => {
                let name = ON_HOST[victim - ON_NODE.len()];
                kill_on_host(name)?;
                name.to_owned()
            }
        };
        println!("kill {kill}: {name} after {action} of {vm}");
        if kill % ROUND == 0 || kill == kills {
            converged(c, &expected).with_context(|| format!("after kill {kill}"))?;
            let now = self::uids(c)?;
            for (name, uid) in &now {
                let same = uids.get(name) == Some(uid);
                ensure!(
                    same || expected.replaced.contains(name) || is_rejected(c, name)?,
                    "{name} was replaced, and nobody killed it"
                );
            }
            (uids, expected) = (now, Expected::default());
        }
    }
    Ok(())
}

/// True if the kubelet ended a pod of the VM because it did not know the devices yet: one that was restarted admits its
/// running pods again, with any runtime (kubernetes/kubernetes#133382).
fn is_rejected(c: &KubeVirt<'_>, vm: &str) -> Result<bool> {
    let path = r#"{range .items[*]}{.reason} {.involvedObject.name}{"\n"}{end}"#;
    let events = c.kubectl(&["get", "events", "-o", &format!("jsonpath={path}")])?;
    let pod = format!("virt-launcher-{vm}-");
    let mut events = events.text.lines().filter_map(|line| line.split_once(' '));
    Ok(events.any(|(reason, name)| {
        let devices = reason.starts_with("OutOfdevices.kubevirt.io/") || reason == "UnexpectedAdmissionError";
        devices && name.starts_with(&pod)
    }))
}

/// Kills a process of this machine, which `cargo xtask test` starts again.
fn kill_on_host(name: &str) -> Result<()> {
    // The status is 1 while the API server is not there.
    let status = Command::new(xtask_program()?)
        .args(["cluster", "status"])
        .output()?;
    let status = String::from_utf8_lossy(&status.stdout);
    let line = status.lines().find(|line| line.starts_with(name));
    let line = line.with_context(|| format!("no {name}: {status}"))?;
    let pid = line.rsplit(' ').next().and_then(|pid| pid.parse().ok());
    let pid = pid.and_then(Pid::from_raw).context("no pid")?;
    // It may have been killed just before.
    if line.contains(" runs,") {
        let _ = kill_process(pid, Signal::KILL);
    }
    Ok(())
}

/// Kills a shim or VMM of a VM that runs. Returns the names of its VM and the UID of its VMI, or nothing if it hit none.
/// A pod whose sandbox dies while its first containers start is not one: the kubelet leaves such a pod of
/// `restartPolicy: Never` as it is, with any runtime.
fn kill_process_of_vm(c: &KubeVirt<'_>, pattern: &str) -> Result<Option<(String, String)>> {
    let found = on_node(&format!(
        "pid=$(pgrep -f '{pattern}' | shuf -n 1); [ -z \"$pid\" ] || {{ echo $pid; cat /proc/$pid/cgroup; }}"
    ))?;
    let Some((pid, cgroup)) = found.split_once('\n') else {
        return Ok(None);
    };
    let labels = r"{.metadata.labels.app}={.metadata.labels.kubevirt\.io/created-by}";
    let path = format!("jsonpath={{range .items[*]}}{{.metadata.uid}}={labels} {{end}}");
    let pods = c.kubectl(&["get", "pods", "-lkubevirt.io=virt-launcher", "-o", &path])?;
    let mut pods = pods.text.split_whitespace().map(|pod| pod.split('='));
    let victim = pods.find_map(|mut pod| {
        let (uid, name, vmi) = (pod.next()?, pod.next()?, pod.next()?);
        (cgroup.contains(uid) && !name.is_empty()).then(|| (name.to_owned(), vmi.to_owned()))
    });
    let Some((name, vmi)) = victim else {
        return Ok(None);
    };
    let state = "jsonpath={.metadata.uid}={.status.phase}";
    let running = c.kubectl(&["get", VMI, &name, "--ignore-not-found", "-o", state])?;
    if running.text.trim() != format!("{vmi}=Running") {
        return Ok(None);
    }
    on_node(&format!("kill -9 {pid} || true"))?;
    Ok(Some((name, vmi)))
}

/// Starts an operation on a VM, which may fail: the API server may be the victim of the kill before.
fn act(
    c: &KubeVirt<'_>,
    random: &mut Rng,
    vm: &'static str,
    expected: &mut Expected,
) -> Result<&'static str> {
    let volume = format!("--volume-name={vm}");
    let operations: [(&'static str, Vec<&str>); 7] = [
        ("restart", vec!["restart", vm]),
        ("delete", vec![]),
        ("pause", vec!["pause", "vmi", vm]),
        ("unpause", vec!["unpause", "vmi", vm]),
        ("addvolume", vec!["addvolume", vm, &volume, "--persist"]),
        ("removevolume", vec!["removevolume", vm, &volume, "--persist"]),
        ("nothing", vec![]),
    ];
    let (name, words) = &operations[random.usize(..operations.len())];
    if ["restart", "delete"].contains(name) {
        expected.replaced.push(vm.to_owned());
    }
    if *name == "pause" {
        expected.paused.push(vm.to_owned());
    }
    if !words.is_empty() {
        c.virtctl(words)?;
    } else if *name == "delete" {
        c.kubectl(&["delete", VMI, vm, "--wait=false"])?;
    }
    Ok(name)
}

/// Waits until all VMs run, killed VMIs are gone and no VMI is being deleted. VMIs may be paused only if that is expected.
fn converged(c: &KubeVirt<'_>, expected: &Expected) -> Result<()> {
    c.until_true("the API server does not answer", || {
        let answer = c.kubectl(&["get", "vm"])?;
        met(answer.status == 0, || answer.text)
    })?;
    c.until_true("a VMI outlives its shim or VMM", || {
        let answer = c.kubectl(&["get", VMI, "-o", "jsonpath={.items[*].metadata.uid}"])?;
        let outlives = expected.killed.iter().any(|uid| answer.text.contains(uid));
        Ok(match answer.status {
            0 if !outlives => Ok(()),
            _ => Err(format!("{:?} of {}", expected.killed, answer.text)),
        })
    })?;
    for name in VMS {
        c.until_true(&format!("{name} does not run"), || {
            let answer = c.kubectl(&["get", VMI, name, "-o", "json"])?;
            let vmi: Value = serde_json::from_str(&answer.text).unwrap_or_default();
            let is_paused = conditions(&vmi).contains(&("Paused", "True"));
            if is_paused && expected.paused.iter().any(|other| other == name) {
                c.virtctl(&["unpause", "vmi", name])?;
            }
            let up = vmi["status"]["phase"] == "Running"
                && vmi["metadata"]["deletionTimestamp"].is_null()
                && conditions(&vmi).contains(&("Ready", "True"))
                && !conditions(&vmi).contains(&("Synchronized", "False"))
                && !is_paused;
            met(up, || answer.text)
        })?;
    }
    Ok(())
}

fn conditions(vmi: &Value) -> Vec<(&str, &str)> {
    let conditions = vmi["status"]["conditions"].as_array().into_iter().flatten();
    conditions
        .filter_map(|condition| Some((condition["type"].as_str()?, condition["status"].as_str()?)))
        .collect()
}

/// UIDs of the VMIs by name.
fn uids(c: &KubeVirt<'_>) -> Result<BTreeMap<String, String>> {
    let path = "{range .items[*]}{.metadata.name}={.metadata.uid} {end}";
    let words = ["get", VMI, "-o", &format!("jsonpath={path}")];
    let text = c.kubectl(&words)?.ok()?;
    let pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
    Ok(pairs
        .map(|(name, uid)| (name.to_owned(), uid.to_owned()))
        .collect())
}

/// Counts the network namespaces of pods.
fn number_of_namespaces() -> Result<usize> {
    let count = on_node("ls /run/netns | wc -l")?;
    Ok(count.trim().parse()?)
}

/// Looks for what VMs may leave on the node, which had `namespaces` network namespaces before, perhaps one of them of a
/// pod that was still ending.
fn nothing_is_left(c: &KubeVirt<'_>, namespaces: usize) -> Result<()> {
    for name in VMS {
        c.delete("vm", name)?;
    }
    c.until_none("vm")?;
    c.until_no_guests()?;
    for name in VMS {
        c.delete("pvc", name)?;
        c.delete("pv", name)?;
    }
    let looks = [
        (
            "processes",
            "pgrep -af '[c]ontainerd-shim-husk-v2|[h]usk-vmm' || true",
        ),
        (
            "mounts",
            "grep -E '/run/husk/|kubernetes.io~empty-dir/hotplug' /proc/mounts || true",
        ),
        ("pods of Husk", "ls /run/husk/pods 2>/dev/null || true"),
        ("tap devices", "ip -o link | grep -E 'tap|husk' || true"),
        (
            "open volumes",
            "rm -r /var/tmp/husk-kills; losetup -a | grep husk-kills || true",
        ),
    ];
    for (what, command) in looks {
        c.until_true(&format!("the node has {what}"), || {
            let left = on_node(command)?;
            met(left.trim().is_empty(), || left)
        })?;
    }
    // The kubelet removes what containerd had not finished when it was killed a minute later.
    c.until_true("the node has network namespaces", || {
        let left = number_of_namespaces()?;
        if left <= namespaces {
            return Ok(Ok(()));
        }
        Ok(Err(format!(
            "{left}, not {namespaces}: {}",
            on_node(NAMESPACE_LOG)?
        )))
    })
}

/// Output of a shell command on the node, which needs neither the kubelet nor the API server.
fn on_node(command: &str) -> Result<String> {
    let words = ["lab", "run", "--", "sh", "-c", command];
    finish(Command::new(xtask_program()?).args(words))
}

fn xtask_program() -> Result<OsString> {
    std::env::var_os("HUSK_XTASK").context("HUSK_XTASK is not set")
}
