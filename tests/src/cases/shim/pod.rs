//! Pods that are made by CRI, as a kubelet makes them, on a bridge of a CNI plugin.

use super::ctr::LIMIT;
use crate::cases::network::guest as network;
use crate::harness::attach::Attached;
use crate::harness::containerd::image::Image;
use crate::harness::containerd::{BRIDGE, Containerd, Version};
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::cri::api::ContainerState;
use crate::harness::cri::{Container, Cri, NAMESPACE, OOM_SCORE_ADJ, Pod};
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::program::Session;
use crate::harness::{Case, TIMEOUT};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

pub const ON_1_7: Case = Case {
    name: "shim-pod-1.7",
    about: "CRI of containerd 1.7: a pod that is a VM, at its own address, and one that is not; logs, attach, stats, stop",
    limit: LIMIT,
    run: |ctx| run(ctx, Version::V1_7),
};

pub const ON_2_1: Case = Case {
    name: "shim-pod-2.1",
    about: "the same with containerd 2.1",
    limit: LIMIT,
    run: |ctx| run(ctx, Version::V2_1),
};

pub const ON_NEWEST: Case = Case {
    name: "shim-pod-newest",
    about: "the same with the newest containerd",
    limit: LIMIT,
    run: |ctx| run(ctx, Version::Newest),
};

pub const TWENTY: Case = Case {
    name: "shim-pod-20",
    about: "20 pods with VMs, made at once and stopped at once",
    limit: Duration::from_secs(900),
    run: twenty,
};

/// Memory limit: guest memory, the overhead that `create` requires, and a reserve.
pub(super) const MEMORY: i64 = (128 + 48) << 20;

/// A containerd with all the images, and a client.
pub(super) fn node(ctx: &TestContext, version: Version) -> Result<(Containerd<'_>, Cri)> {
    let containerd = Containerd::start(ctx, version)?;
    let kernel = network::image(ctx)?;
    Image::new(ctx, "kernel")?
        .kernel(&kernel)?
        .import(&containerd, NAMESPACE)?;
    Image::new(ctx, "vm")?
        .bytes("/empty", b"")?
        .import(&containerd, NAMESPACE)?;
    let busybox = Path::new("/bin/busybox");
    for (name, words) in [
        ("pause", &["/bin/busybox", "sleep", "100000"][..]),
        ("busybox", &[]),
    ] {
        let image = Image::new(ctx, name)?
            .file("/bin/busybox", busybox)?
            .command(words);
        image.import(&containerd, NAMESPACE)?;
    }
    let cri = containerd.cri()?;
    Ok((containerd, cri))
}

/// A pod with a VM that runs `words`, and the VM's container.
pub(super) fn vm(cri: &Cri, name: &str, words: &str) -> Result<(Pod, String)> {
    let manifest = Manifest::new(name)
        .memory("128Mi")
        .kernel_boot(words)
        .pod_interface(json!({"bridge": {}}));
    let pod = cri.pod(name, "husk", &[("husk.io/vmi", &manifest.json())])?;
    let kernel = Container {
        name: "volumekernel-boot-volume",
        image: "kernel",
        ..Container::default()
    };
    cri.start(&pod, &kernel)?;
    let compute = Container {
        name: "compute",
        image: "vm",
        memory: MEMORY,
        tty: true,
        ..Container::default()
    };
    let id = cri.start(&pod, &compute)?;
    Ok((pod, id))
}

fn run(ctx: &TestContext, version: Version) -> Result<()> {
    let (containerd, cri) = node(ctx, version)?;
    let (pod, id) = vm(&cri, "guest", "net,button,shell")?;
    let address = cri.address(&pod)?;
    let name = format!("pods/{}", pod.uid);
    let words = ["console", &name];
    let console = Session::on_terminal(ctx.husk(&words), &ctx.log("guest.console.log"))?;
    let shell = Shell::small_on(&console)?;
    ctx.part("address", || {
        let lease = network::configured(&shell)?;
        lease.is("ip", &address)
    });
    ctx.part("neighbours", || neighbours(&cri, &shell, &address));
    ctx.part("attach", || {
        let attached = Attached::new(&cri.attach(&id)?)?;
        attached.send("echo attached-$((40 + 2))\n")?;
        attached.output().expect("attached-42", TIMEOUT)?;
        Ok(())
    });
    ctx.part("stats", || stats(&cri, &pod, &id));
    ctx.part("OOM score", || {
        let vmm = std::fs::read_to_string(pod.cgroup.of(&id).join("cgroup.procs"))?;
        let score = std::fs::read_to_string(format!("/proc/{}/oom_score_adj", vmm.trim()))?;
        ensure!(score.trim() == OOM_SCORE_ADJ.to_string(), "the VMM has {score}");
        Ok(())
    });
    ctx.part("logs", || {
        let log = std::fs::read_to_string(cri.logs("guest").join("compute.log"))?;
        expect_contains(&log, &["Linux version 6.12", "HUSK-USERSPACE", "attached-42"])
    });
    ctx.run(&["pause", &name])?.ok()?;
    containerd.kill()?;
    containerd.restart_without_path()?;
    let cri = containerd.cri()?;
    ctx.part("restart of containerd", || {
        let status = cri.status(&id)?;
        ensure!(status.state() == ContainerState::ContainerRunning, "{status:?}");
        let vm = ctx.json(&["inspect", &name, "-o", "json"])?;
        ensure!(vm["paused"] == true, "the VM went on");
        ctx.run(&["resume", &name])?.ok()?;
        shell.expect_contains("echo still-$((40 + 2))", &["still-42"])?;
        stats(&cri, &pod, &id)
    });
    drop(console);
    ctx.part("stop", || {
        cri.stop(&id, Duration::from_secs(60))?;
        let status = cri.status(&id)?;
        ensure!(status.exit_code == 0, "the guest did not power off: {status:?}");
        cri.remove(&id)
    });
    cri.remove_pod(&pod)?;
    containerd.nothing_left()?;
    Command::new("ip").args(["link", "delete", BRIDGE]).status()?;
    Ok(())
}

/// A pod with an ordinary process reaches the VM at the pod's address, and the VM reaches that pod.
fn neighbours(cri: &Cri, shell: &Shell<'_>, address: &str) -> Result<()> {
    let pod = cri.pod("process", "runc", &[])?;
    let own = cri.address(&pod)?;
    network::pings(shell, &own)?;
    let ping = Container {
        name: "ping",
        image: "busybox",
        command: &["/bin/busybox", "ping", "-c", "3", "-W", "5", address],
        ..Container::default()
    };
    let id = cri.start(&pod, &ping)?;
    let status = cri.wait(&id, TIMEOUT)?;
    let said = std::fs::read_to_string(cri.logs("process").join("ping.log"))?;
    ensure!(status == 0, "the guest at {address} does not answer: {said}");
    cri.remove_pod(&pod)
}

/// CRI's statistics of the VM agree with its cgroup.
pub(super) fn stats(cri: &Cri, pod: &Pod, id: &str) -> Result<()> {
    stats_are_those_of(&pod.cgroup.of(id), || cri.usage(id))
}

/// Checks that `usage`, nanoseconds and bytes, agrees with a cgroup within 5 %.
pub(super) fn stats_are_those_of(cgroup: &Path, usage: impl Fn() -> Result<(u64, u64)>) -> Result<()> {
    let read = |name: &str| -> Result<String> {
        std::fs::read_to_string(cgroup.join(name))
            .with_context(|| format!("{} of {}", name, cgroup.display()))
    };
    let field = |text: &str, name: &str| -> Result<u64> {
        let mut lines = text.lines();
        let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(value.with_context(|| format!("no {name}"))?.trim().parse()?)
    };
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let (time, memory) = usage()?;
        let own_time = field(&read("cpu.stat")?, "usage_usec")? * 1000;
        let own_memory =
            read("memory.current")?.trim().parse::<u64>()? - field(&read("memory.stat")?, "inactive_file")?;
        let close = |a: u64, b: u64| a.abs_diff(b) * 20 <= a.max(b);
        // Containerd and the kubelet sample only at intervals.
        if close(time, own_time) && close(memory, own_memory) {
            println!("stats: {time} ns of {own_time} ns, {memory} bytes of {own_memory} bytes");
            // A guest that has booted has used more than that.
            ensure!(time > 100_000_000 && memory > 32 << 20, "far too little");
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{time} ns of {own_time} ns, {memory} bytes of {own_memory} bytes"
        );
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn twenty(ctx: &TestContext) -> Result<()> {
    let (containerd, _) = node(ctx, Version::V2_1)?;
    let started = Instant::now();
    let (socket, logs) = (containerd.socket(), ctx.path("pods"));
    // Each has a separate connection, as they are all made at once.
    let all = |number: u32| -> Result<()> {
        let cri = Cri::connect(socket.clone(), logs.clone())?;
        let name = format!("many{number}");
        let (pod, id) = vm(&cri, &name, "button")?;
        let log = cri.logs(&name).join("compute.log");
        let deadline = Instant::now() + Duration::from_secs(500);
        while !std::fs::read_to_string(&log).is_ok_and(|text| text.contains("husk-button: ready")) {
            ensure!(Instant::now() < deadline, "{name} is not up");
            std::thread::sleep(Duration::from_millis(500));
        }
        println!("{name} is up after {:.1} s", started.elapsed().as_secs_f64());
        cri.stop(&id, Duration::from_secs(120))?;
        let status = cri.status(&id)?;
        ensure!(status.exit_code == 0, "{name} did not power off: {status:?}");
        cri.remove_pod(&pod)
    };
    let all = &all;
    let failed = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=20).map(|number| scope.spawn(move || all(number))).collect();
        let ended = threads.into_iter().filter_map(|thread| thread.join().ok()?.err());
        ended.map(|error| format!("{error:#}")).collect::<Vec<_>>()
    });
    ensure!(failed.is_empty(), "{} of 20: {}", failed.len(), failed.join("; "));
    Command::new("ip").args(["link", "delete", BRIDGE]).status()?;
    containerd.nothing_left()
}
