//! The life of a VirtualMachine.

use crate::harness::context::TestContext;
use crate::harness::kubevirt::objects::{condition, virtual_machine};
use crate::harness::kubevirt::{KubeVirt, VMI};
use crate::harness::{Case, until};
use anyhow::{Context, Result, ensure};
use std::time::Duration;

pub const CASE: Case = Case {
    name: "kubevirt-life",
    about: "a VirtualMachine: start, console, pause, reset, restart, power-off, stop, delete; columns, conditions, events",
    limit: Duration::from_secs(900),
    run,
};

const VM: &str = "life";

fn run(ctx: &TestContext) -> Result<()> {
    let c = &KubeVirt::find(ctx)?;
    ctx.part("start", || start(c));
    ctx.part("console", || console(c));
    ctx.part("subresources", || subresources(c));
    ctx.part("restart", || restart(c));
    ctx.part("stop", || stop(c));
    c.delete("vm", VM)?;
    for kind in ["vm", "vmi", "pods"] {
        c.until_none(kind)?;
    }
    Ok(())
}

fn start(c: &KubeVirt<'_>) -> Result<()> {
    c.apply(&[virtual_machine(VM, "button,shell")])?;
    c.until("vm", VM, ".status.printableStatus", "Running")?;
    c.until_condition(VMI, VM, "Ready", "True")?;
    let pod = c.field("pods", "-lkubevirt.io=virt-launcher", ".items[0].metadata.name")?;
    let address = c.field("pod", &pod, ".status.podIP")?;
    let own = c.field(VMI, VM, ".status.interfaces[0].ipAddress")?;
    ensure!(!address.is_empty() && own == address, "{own}, not {address}");
    let class = c.field("pod", &pod, ".spec.runtimeClassName")?;
    ensure!(class == "husk", "runtime class {class}");
    // 128 MiB, 1/512 of it and 1 MiB for the vCPU; RuntimeClass adds its overhead.
    let request = c.field("pod", &pod, ".spec.containers[0].resources.requests.memory")?;
    ensure!(request == "135528448", "compute requests {request}");
    let migratable = c.field(VMI, VM, &condition("LiveMigratable", "status"))?;
    ensure!(migratable == "False", "LiveMigratable {migratable}");
    // The VMI is Running before its guest has booted.
    until_boots(c, 1)?;
    c.until_events(
        VM,
        &[
            "VirtualMachineInstance defined.",
            "VirtualMachineInstance started.",
        ],
    )
}

/// Waits until the console's log shows that the guest has booted `boots` times.
fn until_boots(c: &KubeVirt<'_>, boots: usize) -> Result<()> {
    let pod = c.field("pods", "-lkubevirt.io=virt-launcher", ".items[0].metadata.name")?;
    until(|| {
        let log = c.kubectl(&["logs", &pod, "-c", "guest-console-log"])?.ok()?;
        Ok(log.matches("husk-button: ready").count() == boots)
    })
    .with_context(|| format!("boot {boots} in the console's log"))
}

fn console(c: &KubeVirt<'_>) -> Result<()> {
    c.in_guest(VM, |shell| shell.expect_contains("echo $((6 * 7))", &["42"]))
}

fn subresources(c: &KubeVirt<'_>) -> Result<()> {
    c.pause_and_resume(VM)?;
    // Each boots the guest again in the same VM.
    let uid = c.field(VMI, VM, ".metadata.uid")?;
    for (command, boots) in [("reset", 2), ("soft-reboot", 3)] {
        c.virtctl(&[command, VM])?.ok()?;
        until_boots(c, boots).context(command)?;
    }
    ensure!(uid == c.field(VMI, VM, ".metadata.uid")?, "another VMI");
    // Without a guest agent these are KubeVirt's own errors.
    for command in ["guestosinfo", "userlist", "fslist"] {
        c.virtctl(&[command, VM])?
            .fails_with(1, &["VMI does not have guest agent connected"])?;
    }
    let expected = [
        "VirtualMachineInstance paused",
        "VirtualMachineInstance unpaused",
        "VirtualMachineInstance reset",
        "VirtualMachineInstance soft rebooted",
    ];
    c.until_events(VM, &expected)
}

fn restart(c: &KubeVirt<'_>) -> Result<()> {
    let uid = || c.field(VMI, VM, ".metadata.uid");
    let before = uid()?;
    c.virtctl(&["restart", VM])?.ok()?;
    c.until_replaced(VM, &before)?;
    // A guest that powers off ends its VMI; `Always` starts the next.
    let before = uid()?;
    c.power_off(VM)?;
    c.until_replaced(VM, &before)?;
    c.until_events(VM, &["The VirtualMachineInstance was shut down."])
}

/// The power button ends the guest within its grace period.
fn stop(c: &KubeVirt<'_>) -> Result<()> {
    c.virtctl(&["stop", VM])?.ok()?;
    c.until("vm", VM, ".status.printableStatus", "Stopped")?;
    c.until_no_guests()?;
    c.until_events(VM, &["Signaled Graceful Shutdown"])
}
