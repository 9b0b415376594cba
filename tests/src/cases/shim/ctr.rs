//! VMs that `ctr` starts, from the kernel's first message to their exit.

use crate::harness::containerd::image::Image;
use crate::harness::containerd::{Containerd, Version};
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::manifest::Manifest;
use crate::harness::program::Session;
use crate::harness::{Case, TIMEOUT, images, privileges};
use anyhow::{Context, Result, ensure};
use rustix::fs::{CWD, Mode, mkfifoat};
use serde_json::json;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

pub const ON_1_7: Case = Case {
    name: "shim-ctr-1.7",
    about: "ctr of containerd 1.7: VMs from an image, with devices and mounts; console, states, signals, exit statuses",
    limit: LIMIT,
    run: |ctx| run(ctx, Version::V1_7),
};

pub const ON_2_1: Case = Case {
    name: "shim-ctr-2.1",
    about: "the same with containerd 2.1",
    limit: LIMIT,
    run: |ctx| run(ctx, Version::V2_1),
};

pub const ON_NEWEST: Case = Case {
    name: "shim-ctr-newest",
    about: "the same with the newest containerd",
    limit: LIMIT,
    run: |ctx| run(ctx, Version::Newest),
};

/// Time limit of a case with a containerd.
pub const LIMIT: Duration = Duration::from_secs(600);

/// Path in the pod of the VMI's volume `data`.
const DATA: &str = "/var/run/kubevirt-private/vmi-disks/data";

/// A small VM from the image `small`, which runs `words`.
pub fn vm(words: &str) -> Manifest {
    Manifest::new("vm").memory("128Mi").kernel_boot(words)
}

/// A containerd that has the image `small`.
pub fn with_small(ctx: &TestContext, version: Version) -> Result<Containerd<'_>> {
    let containerd = Containerd::start(ctx, version)?;
    let small = images::small("6.12")?;
    Image::new(ctx, "small")?
        .kernel(&small)?
        .import(&containerd, OWN)?;
    Ok(containerd)
}

/// The namespace of `ctr`.
pub const OWN: &str = crate::harness::containerd::NAMESPACE;

fn run(ctx: &TestContext, version: Version) -> Result<()> {
    let containerd = with_small(ctx, version)?;
    let c = &containerd;
    ctx.part("poweroff", || {
        let said = c.run(&vm("poweroff"), &[], "small", "off")?.ok()?;
        // From power-on: the kernel's first message.
        expect_contains(&said, &["Linux version 6.12", "HUSK-USERSPACE"])?;
        c.nothing_left()
    });
    ctx.part("panic", || {
        c.run(&vm("panic"), &[], "small", "panic")?
            .fails_with(10, &["husk-panic: now", "panic"])?;
        c.nothing_left()
    });
    ctx.part("console", || console(c));
    ctx.part("states", || states(c));
    ctx.part("button", || {
        c.detached(&vm("button"), &[], "small", "button")?;
        let attached = attach(c, "button")?;
        attached.expect("husk-button: ready", TIMEOUT)?;
        // As `ctr run` passes on when its terminal is resized.
        c.ctr(&["tasks", "kill", "--signal", "SIGWINCH", "button"])?
            .ok()?;
        std::thread::sleep(Duration::from_secs(3));
        ensure!(
            !attached.output().all().contains("husk-button: pressed"),
            "SIGWINCH presses the button"
        );
        c.ctr(&["tasks", "kill", "--signal", "SIGTERM", "button"])?.ok()?;
        // It deletes the task once that has ended.
        let answer = attached.wait(TIMEOUT)?;
        expect_contains(&answer.text, &["husk-button: pressed"])?;
        ensure!(answer.status == 0, "not a poweroff: {}", answer.status);
        c.ctr(&["containers", "rm", "button"])?.ok()?;
        c.nothing_left()
    });
    ctx.part("grace period", || {
        let deaf = vm("sleep").set("/terminationGracePeriodSeconds", json!(3));
        c.detached(&deaf, &[], "small", "deaf")?;
        c.ctr(&["tasks", "kill", "deaf"])?.ok()?;
        c.until("deaf", "STOPPED", TIMEOUT)?;
        ends_with(c, "deaf", 137)?;
        c.nothing_left()
    });
    ctx.part("privileges", || confined(c));
    ctx.part("devices", || devices(c));
    ctx.part("mounts", || mounts(c));
    ctx.part("hotplug", || super::hotplug::plugged(c));
    ctx.part("uninstall", || c.uninstall());
    Ok(())
}

/// Deletes a task that has ended, and checks its exit status.
fn ends_with(c: &Containerd<'_>, name: &str, status: i32) -> Result<()> {
    let seen = c.remove(name)?;
    ensure!(seen == status, "{name} ended with {seen} instead of {status}");
    Ok(())
}

fn attach(c: &Containerd<'_>, name: &str) -> Result<Session> {
    let log = c.ctx().log(&format!("{name}.attach.log"));
    Session::piped(c.ctr_command(&["tasks", "attach", name]), &log)
}

/// A shell in the guest, on a terminal of `ctr run`.
fn console(c: &Containerd<'_>) -> Result<()> {
    let session = c.on_terminal(&vm("shell"), &[], "small", "shell")?;
    session.expect(r"(?m)^[^\n]*# $", TIMEOUT)?;
    session.send("echo said-$((40 + 2))\n")?;
    session.expect("said-42\n", TIMEOUT)?;
    // `husk console` shows the same console.
    let state = c.ctx().runtime_dir().join("pods/shell");
    let socket = state.join("pod.sock");
    let kind = socket
        .metadata()
        .with_context(|| format!("{}", socket.display()))?
        .file_type();
    ensure!(kind.is_socket(), "{} is no socket", socket.display());
    session.send("poweroff -f\n")?;
    ensure!(session.wait(TIMEOUT)?.status == 0, "not a poweroff");
    c.nothing_left()
}

/// Tests containerd's requests to a running task.
fn states(c: &Containerd<'_>) -> Result<()> {
    c.detached(&vm("sleep"), &[], "small", "states")?;
    let (pid, state) = c.task("states")?.context("no task")?;
    ensure!(state == "RUNNING" && pid > 1, "pid {pid}, {state}");
    let command = std::fs::read_to_string(format!("/proc/{pid}/comm"))?;
    ensure!(command.trim() == "husk-vmm", "the task's process is {command}");
    for (asked, state) in [("pause", "PAUSED"), ("resume", "RUNNING")] {
        c.ctr(&["tasks", asked, "states"])?.ok()?;
        c.until("states", state, Duration::from_secs(10))?;
    }
    c.ctr(&["tasks", "ps", "states"])?.says(&[&pid.to_string()])?;
    c.ctr(&["tasks", "metrics", "states"])?
        .says(&["memory.usage", "cpu.usage"])?;
    let exec = c.ctr(&["tasks", "exec", "--exec-id", "x", "states", "ls"])?;
    ensure!(exec.status != 0, "exec did something: {}", exec.text);
    expect_contains(&exec.text, &["exec is not supported", "attach to the console"])?;
    c.ctr(&["tasks", "kill", "--signal", "SIGKILL", "states"])?.ok()?;
    c.until("states", "STOPPED", TIMEOUT)?;
    ends_with(c, "states", 137)?;
    c.nothing_left()
}

/// The VMM's entries in `/proc`.
fn confined(c: &Containerd<'_>) -> Result<()> {
    c.detached(&vm("sleep"), &[], "small", "confined")?;
    let (pid, _) = c.task("confined")?.context("no task")?;
    privileges::none(pid)?;
    let cgroup = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    expect_contains(&cgroup, &[&format!("/{OWN}/confined")])?;
    c.ctr(&["tasks", "kill", "--signal", "SIGKILL", "confined"])?
        .ok()?;
    c.until("confined", "STOPPED", TIMEOUT)?;
    c.remove("confined")?;
    c.nothing_left()
}

/// A block device of the container is a disk.
fn devices(c: &Containerd<'_>) -> Result<()> {
    let disk = LoopDevice::new(c.ctx(), "device.img", 8)?;
    let name = disk
        .0
        .file_name()
        .and_then(|name| name.to_str())
        .context("no name")?
        .to_owned();
    let manifest =
        vm("disks,write,poweroff").disk(&name, json!({"persistentVolumeClaim": {"claimName": "any"}}));
    let path = disk.0.display().to_string();
    std::fs::write(&disk.0, vec![0xa5; 4096])?;
    c.run(&manifest, &["--device", &path], "small", "device")?
        .says(&["husk-disk-vda: size=16384 ro=0", "husk-write:"])?;
    let mut first = [0xff; 4096];
    std::io::Read::read_exact(&mut std::fs::File::open(&disk.0)?, &mut first)?;
    ensure!(first == [0; 4096], "nothing was written to the device");
    c.nothing_left()
}

/// A mounted volume with `disk.img`, and mounts that must not be treated as volumes.
fn mounts(c: &Containerd<'_>) -> Result<()> {
    let folder = c.ctx().path("data");
    std::fs::create_dir_all(&folder)?;
    let image = folder.join("disk.img");
    let manifest = vm("disks,poweroff").disk("data", json!({"persistentVolumeClaim": {"claimName": "any"}}));
    let mount = format!("type=bind,src={},dst={DATA},options=rbind:rw", folder.display());
    let attempt = |name: &str| c.run(&manifest, &["--mount", &mount], "small", name);
    std::fs::File::create(&image)?.set_len(4 << 20)?;
    attempt("mount")?.says(&["husk-disk-vda: size=8192 ro=0"])?;
    std::fs::remove_file(&image)?;
    std::os::unix::fs::symlink("/etc/shadow", &image)?;
    refused(&attempt("symlink")?.text, "symbolic link")?;
    std::fs::remove_file(&image)?;
    mkfifoat(CWD, &image, Mode::RWXU)?;
    refused(&attempt("fifo")?.text, "disk.img")?;
    c.nothing_left()
}

fn refused(text: &str, why: &str) -> Result<()> {
    ensure!(!text.contains("HUSK-USERSPACE"), "it ran:\n{text}");
    expect_contains(text, &["data", why])
}

/// A file as a block device.
pub(super) struct LoopDevice(pub(super) PathBuf);

impl LoopDevice {
    pub(super) fn new(ctx: &TestContext, file: &str, mib: u64) -> Result<Self> {
        let path = ctx.path(file);
        std::fs::File::create(&path)?.set_len(mib << 20)?;
        let said = ctx.host(&["losetup", "--find", "--show", &path.display().to_string()])?;
        Ok(Self(Path::new(said.trim()).to_path_buf()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}
