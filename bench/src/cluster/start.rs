//! The time from `kubectl apply` to a guest's user space, and who takes it.

use super::add;
use crate::group::stat_field;
use crate::record::Record;
use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use serde_json::{Value, json};
use std::time::Duration;
use xtask::cluster::{Kubectl, Timeline};
use xtask::lab;
use xtask::progress::Progress;

/// Case of the measurements.
pub const CASE: &str = "husk";
/// A part of the time: its metric, who works then, and whether that is Husk.
pub type Part = (&'static str, &'static str, bool);
/// The parts in order. The shim's processor time is contained in others.
pub const PARTS: [Part; 9] = [
    ("api_ms", "kubectl, API server, virt-api", false),
    ("pod_ms", "virt-controller", false),
    ("scheduler_ms", "scheduler", false),
    ("containers_ms", "kubelet, containerd, shim", false),
    ("pod_status_ms", "kubelet", false),
    ("handover_ms", "virt-controller", false),
    ("agent_ms", "husk-agent", true),
    ("vmm_ms", "shim, VMM", true),
    ("guest_ms", "guest", false),
];
/// Image of the guest, which the cluster's nodes have.
const GUEST: &str = "localhost/husk/guest:6.12";
/// The first line of the guest's user space.
const USER_SPACE: &str = "HUSK-USERSPACE";
/// Lines of the shim in the log of `compute`.
const WAITS: &str = "waiting for the VMI";
const CAME: &str = "received the VMI";
const RUNS: &str = "the VM runs";
/// Time limit of a start, and of an end.
const LIMIT: Duration = Duration::from_secs(180);

/// Measures `rounds` starts of a VMI, one after the other, after one that is not measured.
pub fn run(rounds: u32, progress: &Progress, kubectl: &Kubectl, record: &mut Record) -> Result<()> {
    let step = progress.step("measuring starts");
    for round in 0..=rounds {
        step.news(&format!("start {round} of {rounds}"));
        let ms =
            start(progress, kubectl, &format!("start-{round}")).with_context(|| format!("start {round}"))?;
        if round > 0 {
            let values = ms.into_iter().map(|(metric, value)| (metric, "ms", value));
            add(record, CASE, round, values);
            let sum = |husk: bool| {
                let parts = PARTS.iter().filter(|part| !husk || part.2);
                let values = parts.filter_map(|part| record.values(CASE, part.0).last().copied());
                values.sum::<f64>()
            };
            let shim = record
                .values(CASE, "shim_cpu_ms")
                .last()
                .copied()
                .unwrap_or_default();
            let (all, own) = (sum(false), sum(true) + shim);
            let values = [
                ("to_userspace_ms", "ms", all),
                ("husk_ms", "ms", own),
                ("husk_percent", "%", 100.0 * own / all),
            ];
            add(record, CASE, round, values);
        }
    }
    step.done();
    Ok(())
}

/// Starts a VMI, measures it and deletes it.
fn start(progress: &Progress, kubectl: &Kubectl, name: &str) -> Result<Vec<(&'static str, f64)>> {
    let ahead = clock_difference(progress)?;
    let mut timeline = Timeline::watch(kubectl, name, "")?;
    let vmi = vmi(name).to_string();
    let began = Timestamp::now();
    timeline.start();
    kubectl.apply(&vmi)?;
    timeline.until_running(LIMIT, |_, _| {})?;
    let selector = format!("app={name}");
    let log = |kubectl: &Kubectl, container: &str| {
        kubectl.run(&[
            "logs",
            "-l",
            &selector,
            "-c",
            container,
            "--timestamps",
            "--tail=-1",
        ])
    };
    // Milliseconds from the start to a line of a log, whose times are those of the node.
    let at = |log: &str, words: &str| -> Result<Option<f64>> {
        let Some(line) = log.lines().find(|line| line.contains(words)) else {
            return Ok(None);
        };
        let time: Timestamp = line.split(' ').next().unwrap_or_default().parse()?;
        Ok(Some(milliseconds(began, time) - ahead))
    };
    let user_space = kubectl.until("user space", LIMIT, |kubectl| {
        at(&log(kubectl, "guest-console-log")?, USER_SPACE)
    })?;
    let shim_cpu = shim_cpu_time(progress)?;
    let compute = log(kubectl, "compute")?;
    let line =
        |words: &str| at(&compute, words)?.with_context(|| format!("compute's log has no line {words:?}"));
    let step = |what: &str| {
        Ok::<_, anyhow::Error>(1e3 * timeline.reached(what).with_context(|| format!("no {what}"))?)
    };
    let ends = [
        step("VMI Pending")?,
        step("pod created")?,
        step("pod scheduled")?,
        line(WAITS)?,
        step("containers run")?,
        step("VMI Scheduled")?,
        line(CAME)?,
        line(RUNS)?,
        user_space,
    ];
    let mut begin = 0.0;
    let mut parts = Vec::new();
    for ((metric, ..), end) in PARTS.iter().zip(ends) {
        // A watch may show two steps in the wrong order.
        let end = end.max(begin);
        parts.push((*metric, end - begin));
        begin = end;
    }
    parts.push(("shim_cpu_ms", shim_cpu));
    kubectl.run(&["delete", "vmi", name, "--timeout=120s"])?;
    kubectl.until("the pod is gone", LIMIT, |kubectl| {
        let pods = kubectl.get(&["pods", "-l", &selector])?;
        Ok(pods["items"].as_array().is_some_and(Vec::is_empty).then_some(()))
    })?;
    Ok(parts)
}

fn milliseconds(from: Timestamp, to: Timestamp) -> f64 {
    to.duration_since(from).as_secs_f64() * 1e3
}

/// Milliseconds by which the node's clock is ahead of this machine's.
fn clock_difference(progress: &Progress) -> Result<f64> {
    let script = "for i in $(seq 20); do date -u +%Y-%m-%dT%H:%M:%S.%NZ; sleep 0.05; done";
    let mut differences = Vec::new();
    on_node(progress, script, |line| {
        if let Ok(time) = line.parse::<Timestamp>() {
            differences.push(milliseconds(Timestamp::now(), time));
        }
    })?;
    // Each line is late by its way; the quickest is nearest to the truth.
    let quickest = differences.into_iter().reduce(f64::max);
    quickest.context("the node does not say its time")
}

/// Processor time of the node's only shim so far, in milliseconds.
fn shim_cpu_time(progress: &Progress) -> Result<f64> {
    let script = "for pid in $(pgrep -f '^[^ ]*[c]ontainerd-shim-husk-v2 '); do cat /proc/$pid/stat; done; getconf CLK_TCK";
    let mut lines = Vec::new();
    on_node(progress, script, |line| lines.push(line.to_owned()))?;
    let per_second: f64 = lines.pop().context("no ticks")?.trim().parse()?;
    ensure!(!lines.is_empty(), "the node has no shim");
    let mut ticks = 0;
    for line in lines {
        // `utime` and `stime`.
        for field in [14, 15] {
            ticks += stat_field(&line, field).context("not a stat file")?;
        }
    }
    Ok(1e3 * ticks as f64 / per_second)
}

fn on_node(progress: &Progress, script: &str, line: impl FnMut(&str) + Send) -> Result<()> {
    let status = lab::Command::new(["sh", "-c", script])
        .in_lab(true)
        .lines(progress, line)?;
    ensure!(status == 0, "on the node: exit status {status} of {script}");
    Ok(())
}

fn vmi(name: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": name, "namespace": "default", "labels": {"husk.io/runtime": "true", "app": name}},
        "spec": {
            "terminationGracePeriodSeconds": 30,
            "domain": {
                "memory": {"guest": "128Mi"},
                "firmware": {"kernelBoot": {
                    "kernelArgs": "console=ttyS0 quiet husk.do=button,shell",
                    "container": {
                        "image": GUEST,
                        "imagePullPolicy": "IfNotPresent",
                        "kernelPath": "/boot/vmlinuz",
                        "initrdPath": "/boot/initrd",
                    },
                }},
                "devices": {"interfaces": [{"name": "default", "masquerade": {}}]},
            },
            "networks": [{"name": "default", "pod": {}}],
        },
    })
}
