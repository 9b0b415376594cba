//! The masquerade binding: the guest has an address of its own behind the pod's.

use super::bridge::returns;
use super::guest::{self, STREAM, pings, ready, request, serve};
use crate::harness::capture::Capture;
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::pod::{Node, Pod};
use crate::harness::program::Session;
use crate::harness::vm::Vm;
use crate::harness::{Case, TIMEOUT, flow};
use anyhow::{Result, ensure};
use serde_json::json;
use std::net::Ipv6Addr;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "net-masquerade",
    about: "guests behind their pods' addresses, one with listed ports and model e1000: out, in, IPv6; nothing is left after kill -9 and poweroff",
    limit: Duration::from_secs(480),
    run,
};

/// A port that the first guest's manifest does not list.
const CLOSED: u16 = 7001;

/// The guest's IPv6 state.
const GUEST6: Ipv6Addr = Ipv6Addr::new(0xfd10, 0, 2, 0, 0, 0, 0, 2);

fn run(ctx: &TestContext) -> Result<()> {
    let node = Node::new(ctx, 1450)?;
    let (listed, open, process) = (node.pod(8)?, node.pod(9)?, node.pod(10)?);
    let outside = node.outside()?;
    let before = [listed.netns.state()?, open.netns.state()?];
    let manifest = |name, pod: &Pod<'_>, interface| -> Result<Manifest> {
        Ok(Manifest::new(name)
            .pod_interface(interface)
            .netns(&pod.netns.path())
            .small(&guest::image(ctx)?, "net,shell"))
    };
    let interface = json!({
        "masquerade": {}, "model": "e1000",
        "ports": [{"name": "flow", "protocol": "TCP", "port": flow::PORT}],
    });
    let first = Vm::start(ctx, &manifest("listed", &listed, interface)?)?;
    let second = Vm::start(ctx, &manifest("open", &open, json!({"masquerade": {}}))?)?;
    let (shell, got) = ready(&first)?;
    serve(&shell, CLOSED)?;
    let (other, _) = ready(&second)?;
    serve(&other, CLOSED)?;

    ctx.part("lease", || {
        for (name, value) in [
            ("ip", "10.0.2.2"),
            ("mask", "24"),
            ("router", "10.0.2.1"),
            ("serverid", "10.0.2.1"),
            ("mtu", "1450"),
            ("lease", "86313600"),
        ] {
            got.is(name, value)?;
        }
        shell.expect_contains(
            "ip route",
            &["default via 10.0.2.1 dev eth0", "10.0.2.0/24 dev eth0"],
        )
    });
    ctx.part("e1000 is virtio", || {
        shell.expect_contains("readlink /sys/class/net/eth0/device/driver", &["virtio_net"])
    });
    ctx.part("pod", || {
        let pod = listed.run("ip address show")?;
        expect_contains(
            &pod,
            &[
                &format!("inet {}/24", listed.address()),
                "inet 10.0.2.1/24",
                "02:00:00:00:00:00",
            ],
        )?;
        expect_contains(
            &listed.run("nft list tables")?,
            &["table ip nat", "table ip6 nat"],
        )
    });
    ctx.part("out", || {
        let server = flow::serve(ctx, &outside, flow::PORT)?;
        pings(&shell, Node::ADDRESS)?;
        request(&shell, &format!("both {}:{} 2000000", Node::OUTSIDE, flow::PORT))?;
        drop(server);
        sees_pod(ctx, &node, &shell, &listed)
    });
    ctx.part("in", || {
        for pod in [&listed, &open] {
            let words = format!("both {}:{} 2000000", pod.address(), flow::PORT);
            flow::request(ctx, &process.netns, &words, STREAM)?;
            flow::request(ctx, &node.netns, &words, STREAM)?;
        }
        let words = format!("both {}:{} 2000000", open.address(), flow::PORT);
        request(&shell, &words)?;
        Ok(())
    });
    ctx.part("ports", || {
        // Without a list of ports, all ports are forwarded to the guest.
        let words = format!("both {}:{CLOSED} 1000 1 5", open.address());
        flow::request(ctx, &process.netns, &words, STREAM)?;
        let words = format!("both {}:{CLOSED} 1000 1 5", listed.address());
        let answer = flow::begin(ctx, &process.netns, &words)?.wait(TIMEOUT)?;
        ensure!(
            answer.status == 1 && answer.text.contains("cannot connect"),
            "a port that is not listed answers: {}",
            answer.text
        );
        Ok(())
    });
    ctx.part("IPv6", || ipv6(ctx, &shell, &listed, &process, &node));
    first.kill("monitorPid")?;
    first.run().wait(Duration::from_secs(20))?.fails(1)?;
    // The next command removes the leftovers of a killed monitor.
    ctx.list()?;
    let [listed_before, open_before] = &before;
    returns(
        ctx,
        "pod after kill -9 of the monitor",
        &listed.netns,
        listed_before,
    );
    second.power_off(&other)?;
    returns(ctx, "pod after poweroff", &open.netns, open_before);
    Ok(())
}

/// From outside, the guest has its pod's address.
fn sees_pod(ctx: &TestContext, node: &Node<'_>, shell: &Shell<'_>, pod: &Pod<'_>) -> Result<()> {
    let capture = Capture::start(ctx, &node.netns, "out0", "icmp")?;
    pings(shell, Node::OUTSIDE)?;
    let line = format!("{} > {}: ICMP echo request", pod.address(), Node::OUTSIDE);
    capture.sees(&[&line])?;
    Ok(())
}

/// Checks a router advertisement, an address by DHCPv6, and streams in both directions.
fn ipv6(ctx: &TestContext, shell: &Shell<'_>, pod: &Pod<'_>, peer: &Pod<'_>, node: &Node<'_>) -> Result<()> {
    shell.ok("comes 'ip -6 route show default | grep -q \"via fe80\"'")?;
    let address = solicit(shell)?;
    ensure!(address.parse() == Ok(GUEST6), "{address}");
    shell.ok(&format!("ip -6 address add {GUEST6}/128 dev eth0 nodad"))?;
    pings(shell, Node::ADDRESS6)?;
    let _server: Session = flow::serve(ctx, &node.netns, flow::PORT)?;
    request(
        shell,
        &format!("both [{}]:{} 2000000", Node::ADDRESS6, flow::PORT),
    )?;
    let words = format!("both [{}]:{} 2000000", pod.address6(), flow::PORT);
    flow::request(ctx, &peer.netns, &words, STREAM)?;
    Ok(())
}

/// The address that DHCPv6 assigns.
fn solicit(shell: &Shell<'_>) -> Result<String> {
    // Its script also gets variables.
    shell.ok(
        "printf '#!/bin/sh\\n[ -z \"$ipv6\" ] || echo \"$ipv6\" > /lease6\\n' > /bin/lease6; chmod 755 /bin/lease6; \
         udhcpc6 -i eth0 -n -q -t 30 -T 1 -s /bin/lease6",
    )?;
    shell.ok("cat /lease6")
}
