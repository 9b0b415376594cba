//! Pods whose cgroups systemd creates.

use super::ctr::LIMIT;
use super::killed::WITH_SHIM;
use super::pod::{MEMORY, node, stats, vm};
use crate::harness::containerd::leftovers::called;
use crate::harness::containerd::{BRIDGE, Containerd, Version};
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::cri::{Container, Cri, Pod};
use crate::harness::kubelet::{self, scopes, systemctl};
use crate::harness::manifest::Manifest;
use crate::harness::processes::{gone, kill};
use crate::harness::{Case, TIMEOUT, poll, until};
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use std::ffi::OsStr;
use std::process::Command;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "shim-systemd",
    about: "cgroupDriver: systemd: shim and VMM are in scopes, whose limits systemd knows, and no scope stays",
    limit: LIMIT,
    run,
};

fn run(ctx: &TestContext) -> Result<()> {
    let (containerd, cri) = node(ctx, Version::V2_1)?;
    let cri = cri.with_systemd();
    let (c, cri) = (&containerd, &cri);
    ctx.part("scopes", || {
        let (pod, id) = vm(cri, "guest", "button")?;
        let shim = c.shim(&pod.id)?;
        is_in(shim, &pod, &pod.id)?;
        is_in(vmm()?, &pod, &id)?;
        println!("the shim has {}", resident(shim)?);
        limited(&pod, &id, MEMORY)?;
        stats(cri, &pod, &id)?;
        let more = MEMORY + (64 << 20);
        cri.limit_memory(&id, more)?;
        limited(&pod, &id, more)?;
        println!("the shim has {} after an update", resident(shim)?);
        let log = cri.logs("guest").join("compute.log");
        until(|| Ok(std::fs::read_to_string(&log)?.contains("husk-button: ready")))?;
        cri.stop(&id, Duration::from_secs(60))?;
        let status = cri.status(&id)?;
        ensure!(status.exit_code == 0, "the guest did not power off: {status:?}");
        cri.remove(&id)?;
        nothing_left(c, cri, &pod)
    });
    ctx.part("refused", || {
        let pod = cri.pod("none", "husk", &[("husk.io/vmi", &manifest())])?;
        let container = |name, image| Container {
            name,
            image,
            memory: MEMORY,
            ..Container::default()
        };
        // An image without a kernel, which is detected when the VM's cgroup already exists.
        cri.start(&pod, &container("volumekernel-boot-volume", "vm"))?;
        let started = cri.start(&pod, &container("compute", "vm"));
        let error = started.err().context("there is a VM without a kernel")?;
        println!("{error:#}");
        let own = format!("cri-containerd-{}.scope", pod.id);
        until(|| Ok(scopes()? == [own.clone()])).context("a scope of the VM's stays")?;
        nothing_left(c, cri, &pod)
    });
    ctx.part("killed", || {
        let (pod, id) = vm(cri, "killed", "button")?;
        let vmm = vmm()?;
        is_in(vmm, &pod, &id)?;
        kill(c.shim(&pod.id)?, Signal::KILL)?;
        gone(vmm, WITH_SHIM)?;
        // The kubelet also retries until containerd has received the exit events.
        poll(TIMEOUT, Duration::from_secs(1), || {
            Ok(nothing_left(c, cri, &pod).map_err(|error| format!("{error:#}")))
        })
    });
    Command::new("ip").args(["link", "delete", BRIDGE]).status()?;
    systemctl(&["stop", kubelet::ALL_SLICES]).map(drop)
}

fn manifest() -> String {
    let manifest = Manifest::new("none");
    manifest.memory("128Mi").kernel_boot("button").json()
}

/// The VMM of the only VM.
fn vmm() -> Result<i32> {
    let vmms = called("husk-vmm")?;
    ensure!(vmms.len() == 1, "not one VM: {vmms:?}");
    Ok(vmms[0].pid)
}

/// Checks that a process is in the scope of a pod's container.
fn is_in(pid: i32, pod: &Pod, container: &str) -> Result<()> {
    let cgroup = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let wanted = pod.cgroup.of(container);
    let wanted = wanted.strip_prefix("/sys/fs/cgroup")?;
    expect_contains(&cgroup, &[&format!("0::/{}\n", wanted.display())])
}

/// Checks a container's limit, also after systemd has rewritten the files of its scope.
fn limited(pod: &Pod, container: &str, wanted: i64) -> Result<()> {
    let folder = pod.cgroup.of(container);
    let scope = folder.file_name().and_then(OsStr::to_str).context("no scope")?;
    let file = folder.join("memory.max");
    let is = |when: &str| {
        let limit = std::fs::read_to_string(&file)?;
        let wanted = wanted.to_string();
        ensure!(limit.trim() == wanted, "{when} {} is {limit}", file.display());
        Ok(())
    };
    is("at first")?;
    systemctl(&["daemon-reload"])?;
    is("after a daemon-reload")?;
    // Setting one property of a controller makes systemd write all of them.
    systemctl(&["set-property", "--runtime", scope, "MemoryHigh=infinity"])?;
    is("once systemd has written it anew")
}

/// Removes a pod, and checks that systemd has no scope of it either.
fn nothing_left(c: &Containerd<'_>, cri: &Cri, pod: &Pod) -> Result<()> {
    cri.remove_pod(pod)?;
    until(|| Ok(scopes()?.is_empty())).with_context(|| format!("{:?}", scopes()))?;
    c.nothing_left()
}

fn resident(pid: i32) -> Result<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|line| line.starts_with("VmRSS"));
    Ok(line.context("no VmRSS")?.to_owned())
}
