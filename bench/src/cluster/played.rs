//! Many VMIs under the stock control plane. Kubelets and shims are played by one program; each agent is a process.

use super::add;
use super::audit::{AGENT, Requests};
use crate::record::Record;
use crate::smaps::resident;
use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use xtask::binaries::Profile;
use xtask::cluster::{self, Kubectl};
use xtask::lab::Process;
use xtask::progress::Progress;

/// VMIs on the first node.
const FIRST: u32 = 100;
/// VMIs in one call of kubectl.
const BATCH: u32 = 50;
/// Time limit for all nodes to be schedulable.
const NODES: Duration = Duration::from_secs(120);
/// Time limit for a VMI to run or to be gone, in addition to others.
const CHANGE: Duration = Duration::from_secs(10);
/// Time for the last writes before the agents are idle.
const SETTLE: Duration = Duration::from_secs(20);

/// What to measure.
#[derive(Debug)]
pub struct Plan {
    /// Number of VMIs.
    pub vmis: u32,
    /// Number of nodes.
    pub nodes: u32,
    /// Time in which the idle agents are measured.
    pub idle: Duration,
}

impl Plan {
    /// Number of the node that runs VMI `number`; both count from 0.
    fn node(&self, number: u32) -> u32 {
        match number.checked_sub(FIRST) {
            Some(rest) if self.nodes > 1 => 1 + rest % (self.nodes - 1),
            _ => 0,
        }
    }

    /// Number of VMIs of a node.
    fn on_node(&self, node: u32) -> u32 {
        (0..self.vmis).filter(|number| self.node(*number) == node).count() as u32
    }

    fn change_limit(&self) -> Duration {
        CHANGE * self.vmis.max(30)
    }
}

/// Runs the VMIs from their creation to their end, and measures the agents.
pub fn run(plan: &Plan, progress: &Progress, kubectl: &Kubectl, record: &mut Record) -> Result<()> {
    // Sockets have short paths.
    let dir = tempfile::Builder::new().prefix("husk-").tempdir()?;
    let agents = start(plan, progress, kubectl, dir.path())?;
    let began = Timestamp::now();
    let step = progress.step(format!("starting {} VMIs", plan.vmis));
    let clock = Instant::now();
    for first in (0..plan.vmis).step_by(BATCH as usize) {
        let last = (first + BATCH).min(plan.vmis);
        let items: Vec<Value> = (first..last)
            .map(|number| vmi(number, plan.node(number)))
            .collect();
        kubectl.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())?;
    }
    kubectl.until("all VMIs run", plan.change_limit(), |kubectl| {
        let phases = phases(kubectl)?;
        let running = phases.iter().filter(|phase| *phase == "Running").count() as u32;
        step.news(&format!("{running} run"));
        Ok((running == plan.vmis).then_some(()))
    })?;
    let values = [("start_s", "s", clock.elapsed().as_secs_f64())];
    add(record, AGENT, 1, values);
    step.done();
    idle(plan, progress, &agents, record)?;
    let step = progress.step("ending the VMIs");
    kubectl.run(&["delete", "vmi", "--all", "--wait=false"])?;
    kubectl.until("all VMIs are gone", plan.change_limit(), |kubectl| {
        let left = phases(kubectl)?.len();
        step.news(&format!("{left} left"));
        Ok((left == 0).then_some(()))
    })?;
    step.done();
    std::thread::sleep(SETTLE);
    requests(
        plan,
        &Requests::read(&cluster::audit_log()?, began, Timestamp::now())?,
        record,
    )
}

/// Starts the nodes with their agents; returns the agents, by node.
fn start(plan: &Plan, progress: &Progress, kubectl: &Kubectl, dir: &Path) -> Result<Vec<Process>> {
    let step = progress.step(format!("starting {} nodes", plan.nodes));
    let programs = Profile::Release.folder();
    let mut nodes = Command::new(programs.join("husk-played-nodes"));
    nodes
        .args(["--nodes", &plan.nodes.to_string()])
        .arg("--agent")
        .arg(programs.join("husk-agent"))
        .arg("--dir")
        .arg(dir);
    cluster::start_process("husk-played-nodes", kubectl.as_client(&mut nodes))?;
    kubectl.until("all nodes are schedulable for VMIs", NODES, |kubectl| {
        let nodes = kubectl.get(&["nodes", "-l", "kubevirt.io/schedulable=true"])?;
        let count = nodes["items"].as_array().map_or(0, Vec::len);
        step.news(&format!("{count} are schedulable"));
        Ok((count == plan.nodes as usize).then_some(()))
    })?;
    let agent = |number| {
        let file = dir.join(format!("played-{number}/agent.pid"));
        let pid = std::fs::read_to_string(&file)?.parse()?;
        Process::running(pid).with_context(|| format!("husk-agent {number} has ended"))
    };
    let agents = (1..=plan.nodes).map(agent).collect::<Result<_>>()?;
    step.done();
    Ok(agents)
}

/// A small VMI without a VM object, which Husk runs.
fn vmi(number: u32, node: u32) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": format!("vmi-{number}"), "namespace": "default", "labels": {"husk.io/runtime": "true"}},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": format!("played-{}", node + 1)},
            "terminationGracePeriodSeconds": 30,
            "domain": {
                "memory": {"guest": "128Mi"},
                "devices": {
                    "disks": [{"name": "root", "disk": {"bus": "virtio"}}],
                    "interfaces": [{"name": "default", "masquerade": {}}],
                },
            },
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [{"name": "root", "containerDisk": {"image": "registry.example/guest:1"}}],
        },
    })
}

/// Phases of all VMIs.
fn phases(kubectl: &Kubectl) -> Result<Vec<String>> {
    let text = kubectl.run(&[
        "get",
        "vmi",
        "-o",
        "jsonpath={range .items[*]}{.status.phase}{\"\\n\"}{end}",
    ])?;
    // One without a phase has an empty line.
    Ok(text.lines().map(str::to_owned).collect())
}

/// Measures the agents while nothing happens to their VMIs.
fn idle(plan: &Plan, progress: &Progress, agents: &[Process], record: &mut Record) -> Result<()> {
    let step = progress.step(format!("measuring idle agents for {} s", plan.idle.as_secs()));
    std::thread::sleep(SETTLE);
    let cpu = || -> Result<Vec<Duration>> {
        let times = agents
            .iter()
            .map(|agent| agent.cpu_time().context("an agent has ended"));
        times.collect()
    };
    let (before, clock) = (cpu()?, Instant::now());
    std::thread::sleep(plan.idle);
    let (after, seconds) = (cpu()?, clock.elapsed().as_secs_f64());
    for (node, agent) in (0..).zip(agents) {
        let vmis = plan.on_node(node);
        let before = before[node as usize];
        let used = after[node as usize].saturating_sub(before);
        let memory = resident(u32::try_from(agent.pid)?, 0)?;
        // The first node has more VMIs than the others.
        let case = if node == 0 { "first" } else { "others" };
        let values = [
            ("vmis", "count", vmis.into()),
            ("rss_kib", "KiB", memory.own_kib as f64),
            ("pss_kib", "KiB", memory.own_pss_kib as f64),
            ("idle_cpu_percent", "%", 100.0 * used.as_secs_f64() / seconds),
            ("cpu_before_idle_ms", "ms", before.as_secs_f64() * 1e3),
        ];
        add(record, case, 1, values);
    }
    step.done();
    Ok(())
}

/// Adds the requests of each program per VMI, and the agents' writes.
fn requests(plan: &Plan, requests: &Requests, record: &mut Record) -> Result<()> {
    let per_vmi = |count: u32| f64::from(count) / f64::from(plan.vmis);
    ensure!(
        requests.status_writes.len() as u32 >= plan.vmis,
        "the audit log has {} VMIs, not {}",
        requests.status_writes.len(),
        plan.vmis
    );
    for ((program, verb), count) in &requests.by_verb {
        let values = [(format!("requests_{verb}"), "count", per_vmi(*count))];
        add(record, program, 1, values);
    }
    let writes = requests.agent_writes.iter();
    let writes = writes.map(|(resource, count)| (format!("writes_{resource}"), "count", per_vmi(*count)));
    add(record, AGENT, 1, writes);
    let most = requests.status_writes.values().max().copied().unwrap_or_default();
    let values = [
        ("writes", "count", per_vmi(requests.agent_writes_for_vmis())),
        ("status_writes_max", "count", most.into()),
    ];
    add(record, AGENT, 1, values);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(vmis: u32, nodes: u32) -> Vec<u32> {
        let plan = Plan {
            vmis,
            nodes,
            idle: Duration::ZERO,
        };
        (0..nodes).map(|node| plan.on_node(node)).collect()
    }

    #[test]
    fn the_first_node_has_a_hundred_vmis_and_the_others_share_the_rest() {
        assert_eq!(shares(500, 10), [100, 45, 45, 45, 45, 44, 44, 44, 44, 44]);
        assert_eq!(shares(40, 3), [40, 0, 0]);
        assert_eq!(shares(120, 1), [120]);
    }
}
