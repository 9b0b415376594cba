//! Interfaces that are plugged into a running VM and unplugged.

use super::bridge::returns;
use super::guest::{self, STREAM, lease, pings, ready};
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::pod::{Node, Pod};
use crate::harness::vm::Vm;
use crate::harness::{Case, TIMEOUT, flow};
use anyhow::{Result, ensure};
use std::time::Duration;

pub const CASE: Case = Case {
    name: "net-hotplug",
    about: "husk addinterface and removeinterface: a stock kernel finds the NIC and lets go of it, beside streams on another, and after a reboot",
    limit: Duration::from_secs(480),
    run,
};

/// KubeVirt's name for the pod's device of the network `red`, which is a hash of the network's name.
const RED: &str = "podb1f51a511f1";
const RED_MAC: &str = "02:00:00:00:07:02";

/// The Ethernet address of the other interface.
const CHOSEN: &str = "02:00:00:bb:bb:bb";

fn run(ctx: &TestContext) -> Result<()> {
    let node = Node::new(ctx, 1500)?;
    let (pod, peer) = (node.pod(5)?, node.pod(6)?);
    node.plug(&pod, RED, RED_MAC)?;
    pod.run(&format!("ip address add 192.168.7.2/24 dev {RED}"))?;
    node.plug(&pod, "net1", "02:00:00:00:08:02")?;
    node.run("ip address add 192.168.7.1/24 dev cni0")?;
    let before = pod.netns.state()?;
    let manifest = Manifest::new("plug")
        .bridged(&pod)
        .small(&guest::image(ctx)?, "net,shell");
    let vm = Vm::start(ctx, &manifest)?;
    {
        let (shell, _) = ready(&vm)?;
        ctx.part("added and removed beside streams", || {
            let words = format!("both {}:{} 60000000 2 30", pod.address(), flow::PORT);
            let streams = flow::begin(ctx, &peer.netns, &words)?;
            for _ in 0..3 {
                husk(&vm, &["addinterface", "plug", "red"])?;
                comes(&shell, "eth1", RED_MAC)?;
                husk(&vm, &["removeinterface", "plug", "red"])?;
                goes(&shell, "eth1")?;
            }
            streams.wait(STREAM)?.ok()?;
            given_back(&pod)
        });
        ctx.part("lease of the pod's device", || {
            husk(&vm, &["addinterface", "plug", "red"])?;
            comes(&shell, "eth1", RED_MAC)?;
            let got = lease(&shell, "eth1")?;
            got.is("ip", "192.168.7.2")?;
            got.is("router", "")?;
            pings(&shell, "192.168.7.1")
        });
        ctx.part("another device and address", || {
            husk(
                &vm,
                &[
                    "addinterface",
                    "plug",
                    "blue",
                    "--device",
                    "net1",
                    "--mac",
                    CHOSEN,
                ],
            )?;
            comes(&shell, "eth2", CHOSEN)?;
            shell.ok("ip address add 192.168.7.3/24 dev eth2 && ip link set dev eth2 up")?;
            shell.ok("ping -n -c 2 -W 5 -I eth2 192.168.7.1")?;
            let interfaces = vm.inspect()?["interfaces"].clone();
            let names: Vec<&str> = interfaces
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|interface| interface["name"].as_str())
                .collect();
            ensure!(names == ["default", "red", "blue"], "{interfaces:#}");
            Ok(())
        });
        ctx.part("refused", || refused(ctx));
        shell.send("reboot -f")?;
    }
    let (shell, _) = ready(&vm)?;
    ctx.part("after a reboot", || {
        comes(&shell, "eth1", RED_MAC)?;
        comes(&shell, "eth2", CHOSEN)?;
        lease(&shell, "eth1")?.is("ip", "192.168.7.2")?;
        pings(&shell, "192.168.7.1")?;
        husk(&vm, &["removeinterface", "plug", "blue"])?;
        goes(&shell, "eth2")
    });
    vm.kill("monitorPid")?;
    vm.end(Duration::from_secs(20))?.fails(1)?;
    // One was removed before; the other was still there.
    returns(ctx, "pod after kill -9 of the monitor", &pod.netns, &before);
    Ok(())
}

/// Runs a `husk` command that must succeed.
fn husk(vm: &Vm<'_>, words: &[&str]) -> Result<()> {
    let ctx = vm.ctx();
    ctx.run_within(words, TIMEOUT)?.ok()?;
    Ok(())
}

/// Waits for the device and its driver.
fn comes(shell: &Shell<'_>, device: &str, mac: &str) -> Result<()> {
    shell.ok(&format!("comes '[ -e /sys/class/net/{device}/address ]'"))?;
    shell.expect_contains(&format!("cat /sys/class/net/{device}/address"), &[mac])
}

fn goes(shell: &Shell<'_>, device: &str) -> Result<()> {
    shell.ok(&format!("comes '[ ! -e /sys/class/net/{device} ]'"))?;
    Ok(())
}

/// Checks that the device is as it was before it was added.
fn given_back(pod: &Pod<'_>) -> Result<()> {
    let shown = pod.run(&format!("ip address show dev {RED}"))?;
    expect_contains(&shown, &["UP", RED_MAC, "inet 192.168.7.2/24"])?;
    let names = pod.run("ip -o link show")?;
    // Bridge and tap names contain the same digits.
    ensure!(names.matches(&RED["pod".len()..]).count() == 1, "{names}");
    Ok(())
}

/// A request that cannot be met is refused with its reason and changes nothing.
fn refused(ctx: &TestContext) -> Result<()> {
    for (words, told) in [
        (&["addinterface", "plug", "green", "--device", "net7"][..], "net7"),
        (&["addinterface", "plug", "green", "--device", "net1"], "net1"),
        (&["removeinterface", "plug", "default"], "default"),
        (&["removeinterface", "plug", "green"], "green"),
    ] {
        ctx.run(words)?.fails_with(1, &[told])?;
    }
    Ok(())
}
