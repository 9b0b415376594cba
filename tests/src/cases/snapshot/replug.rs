//! A clone with NICs of its own: the guest sees those of the snapshot unplugged, and others plugged into their slots.

use super::{SAVE, text};
use crate::cases::network::guest::{self, STREAM, lease, pings, ready};
use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::pod::{Node, Pod};
use crate::harness::vm::Vm;
use crate::harness::{Case, TIMEOUT, flow};
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::time::Duration;

pub const REPLUG: Case = Case {
    name: "snapshot-replug",
    about: "a clone on a bridge gets NICs with MAC addresses of its own, a plugged one too; a guest that cannot is refused",
    limit: Duration::from_secs(900),
    run,
};

/// KubeVirt's name for the pod's device of the network `red`, which is a hash of the network's name.
const RED: &str = "podb1f51a511f1";

/// A pod with another device, whose network the node is in.
fn pod<'s>(node: &Node<'s>, number: u8) -> Result<Pod<'s>> {
    let pod = node.pod(number)?;
    node.plug(&pod, RED, &red_mac(number))?;
    pod.run(&format!("ip address add {}/24 dev {RED}", red_address(number)))?;
    Ok(pod)
}

fn red_mac(number: u8) -> String {
    format!("02:00:00:00:07:{number:02x}")
}

fn red_address(number: u8) -> String {
    format!("192.168.7.{number}")
}

/// The VM's MAC addresses in `husk inspect`, in the order of its interfaces.
fn macs(vm: &Vm<'_>) -> Result<Vec<String>> {
    let seen = vm.inspect()?;
    let interfaces = seen["interfaces"].as_array().context("no interfaces")?;
    let macs = interfaces
        .iter()
        .filter_map(|interface| interface["mac"].as_str());
    Ok(macs.map(str::to_owned).collect())
}

fn save(ctx: &TestContext, vm: &Vm<'_>, dir: &Path) -> Result<()> {
    ctx.run_within(&["snapshot", vm.name(), &text(dir)], SAVE)?.ok()?;
    stop(ctx, vm)
}

/// Kills the VM. Others may run.
fn stop(ctx: &TestContext, vm: &Vm<'_>) -> Result<()> {
    ctx.run(&["stop", "--force", vm.name()])?.ok()?;
    vm.run().wait(TIMEOUT)?;
    Ok(())
}

/// Waits until the guest's device has this address and a driver.
fn comes(shell: &Shell<'_>, device: &str, mac: &str) -> Result<()> {
    shell.ok(&format!(
        "comes 'grep -q {mac} /sys/class/net/{device}/address 2>/dev/null'"
    ))?;
    Ok(())
}

/// Requests leases of both networks, and reaches the node in both.
fn is_connected(shell: &Shell<'_>, pod: &Pod<'_>, number: u8) -> Result<()> {
    lease(shell, "eth0")?.is("ip", &pod.address())?;
    lease(shell, "eth1")?.is("ip", &red_address(number))?;
    pings(shell, Node::ADDRESS)?;
    pings(shell, "192.168.7.1")
}

fn run(ctx: &TestContext) -> Result<()> {
    let node = Node::new(ctx, 1450)?;
    node.run("ip address add 192.168.7.1/24 dev cni0")?;
    let (home, away) = (pod(&node, 8)?, pod(&node, 9)?);
    let image = guest::image(ctx)?;
    let manifest = Manifest::new("source").bridged(&home).small(&image, "net,shell");
    let source = Vm::start(ctx, &manifest)?;
    let dir = ctx.path("snapshot");
    {
        let (shell, _) = ready(&source)?;
        ctx.run(&["addinterface", "source", "red"])?.ok()?;
        comes(&shell, "eth1", &red_mac(8))?;
        is_connected(&shell, &home, 8)?;
        shell.ok("kill $(cat /udhcpc.eth0) $(cat /udhcpc.eth1)")?;
    }
    let before = macs(&source)?;
    save(ctx, &source, &dir)?;

    let netns = text(&away.netns.path());
    let words = ["restore", &text(&dir), "--name", "clone", "--netns", &netns];
    ctx.run_within(&words, TIMEOUT)?
        .fails_with(1, &["default", "bridge", "--replug-nics"])?;

    let clone = Vm::restore_with(ctx, &dir, "clone", &["--replug-nics", "--netns", &netns])?;
    let new = macs(&clone)?;
    ctx.part("a clone with addresses of its own", || {
        ensure!(
            new.len() == 2 && new.iter().all(|mac| !before.contains(mac)),
            "{before:?}, then {new:?}"
        );
        let shell = Shell::going_on(clone.console())?;
        comes(&shell, "eth0", &new[0])?;
        comes(&shell, "eth1", &new[1])?;
        is_connected(&shell, &away, 9)?;
        shell.ok("kill $(cat /udhcpc.eth0) $(cat /udhcpc.eth1)")?;
        let words = format!("both {}:{} 2000000", away.address(), flow::PORT);
        flow::request(ctx, &node.netns, &words, STREAM)?;
        // The source is gone, so a frame with its address can only have come from the clone.
        for device in ["eth0", RED] {
            let port = node.outer(&away, device);
            let learned = node.run(&format!("bridge fdb show brport {port}"))?;
            let old = before.iter().find(|mac| learned.contains(*mac));
            ensure!(old.is_none(), "the clone has sent with {old:?}:\n{learned}");
        }
        Ok(())
    });
    ctx.part("the VM itself beside it", || {
        let home_path = text(&home.netns.path());
        let source = Vm::restore_with(ctx, &dir, "source", &["--netns", &home_path])?;
        ensure!(macs(&source)? == before, "{before:?}, then {:?}", macs(&source)?);
        let shell = Shell::going_on(source.console())?;
        pings(&shell, &away.address())?;
        pings(&shell, &red_address(9))?;
        ctx.run_within(&["removeinterface", "source", "red"], TIMEOUT)?
            .ok()?;
        shell.ok("comes '[ ! -e /sys/class/net/eth1 ]'")?;
        stop(ctx, &source)
    });
    ctx.part("a snapshot of the clone", || {
        let again = ctx.path("again");
        save(ctx, &clone, &again)?;
        let clone = Vm::restore_with(ctx, &again, "clone", &["--netns", &netns])?;
        ensure!(macs(&clone)? == new, "{new:?}, then {:?}", macs(&clone)?);
        let shell = Shell::going_on(clone.console())?;
        is_connected(&shell, &away, 9)?;
        stop(ctx, &clone)
    });
    ctx.part("a guest without hotplug", || {
        let deaf = Manifest::new("deaf").bridged(&home);
        let vm = Vm::start(ctx, &deaf.small_with(&image, "net,shell", "acpiphp.disable=1"))?;
        ready(&vm)?;
        let dir = ctx.path("deaf");
        save(ctx, &vm, &dir)?;
        let words = [
            "restore",
            &text(&dir),
            "--replug-nics",
            "--netns",
            &text(&home.netns.path()),
        ];
        ctx.run_within(&words, TIMEOUT)?
            .fails_with(1, &["default", "has not released", "--replug-nics"])
    });
    ctx.nothing_left(Duration::from_secs(10))
}
