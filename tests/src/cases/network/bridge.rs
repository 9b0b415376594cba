//! The bridge binding: the guest takes over the pod's address, and frames pass unchanged.

use super::guest::{self, STREAM, leased, pings, ready, request};
use crate::harness::capture::Capture;
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::datapath::Datapath;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::netns::{Netns, State};
use crate::harness::pod::{Node, Pod};
use crate::harness::vm::Vm;
use crate::harness::{Case, TIMEOUT, flow, privileges};
use anyhow::{Result, ensure};
use regex::Regex;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "net-bridge",
    about: "two guests and a process in pods on one bridge: leases, devices as in KubeVirt, unchanged frames, one MAC; nothing is left after poweroff and kill -9",
    limit: Duration::from_secs(480),
    run,
};

const MTU: u32 = 1450;

/// The Ethernet address in the second guest's manifest.
const CHOSEN: &str = "02:00:00:aa:bb:cc";

/// Time limit until a pod's network is restored.
pub const TO_RETURN: Duration = Duration::from_secs(15);

fn run(ctx: &TestContext) -> Result<()> {
    let node = Node::new(ctx, MTU)?;
    let (one, two, process) = (node.pod(5)?, node.pod(6)?, node.pod(7)?);
    let before = [one.netns.state()?, two.netns.state()?];
    let manifest = |name, pod: &Pod<'_>, interface| -> Result<Manifest> {
        Ok(Manifest::new(name)
            .pod_interface(interface)
            .netns(&pod.netns.path())
            .small(&guest::image(ctx)?, "net,shell"))
    };
    let first = Vm::start(ctx, &manifest("one", &one, json!({"bridge": {}}))?)?;
    let chosen = json!({"bridge": {}, "macAddress": CHOSEN});
    let second = Vm::start_with(ctx, &manifest("two", &two, chosen)?, Datapath::Process)?;
    let (shell, got) = ready(&first)?;
    let (other, others) = ready(&second)?;

    ctx.part("lease", || {
        for (name, value) in [
            ("ip", one.address().as_str()),
            ("mask", "24"),
            ("router", Node::ADDRESS),
            ("staticroutes", &format!("0.0.0.0/0 {}", Node::ADDRESS)),
            ("mtu", "1450"),
            ("lease", "86313600"),
            ("serverid", "169.254.75.10"),
            ("hostname", "one"),
        ] {
            got.is(name, value)?;
        }
        shell.expect_contains("cat /sys/class/net/eth0/address", &[&one.mac()])?;
        shell.expect_contains("cat /sys/class/net/eth0/mtu", &["1450"])?;
        shell.expect_contains("ip route", &[&format!("default via {} dev eth0", Node::ADDRESS)])
    });
    ctx.part("address of the manifest", || {
        other.expect_contains("cat /sys/class/net/eth0/address", &[CHOSEN])?;
        others.is("ip", &two.address())
    });
    ctx.part("devices of the pod", || devices(&one));
    ctx.part("inspect", || inspect(&first, &one));
    ctx.part("everybody reaches everybody", || {
        let _listeners = [
            flow::serve(ctx, &process.netns, flow::PORT)?,
            flow::serve(ctx, &node.netns, flow::PORT)?,
        ];
        for target in [process.address(), two.address(), Node::ADDRESS.to_owned()] {
            pings(&shell, &target)?;
            request(&shell, &format!("both {target}:{} 2000000", flow::PORT))?;
        }
        request(&other, &format!("both {}:{} 2000000", one.address(), flow::PORT))?;
        for (from, target) in [
            (&process.netns, &one),
            (&process.netns, &two),
            (&node.netns, &one),
        ] {
            let words = format!("both {}:{} 2000000", target.address(), flow::PORT);
            flow::request(ctx, from, &words, STREAM)?;
        }
        Ok(())
    });
    ctx.part("captures", || captures(ctx, &shell, &one, &process));
    ctx.part("one Ethernet address", || {
        one_answers(ctx, &process, &one.address(), &one.mac())?;
        one_answers(ctx, &process, &two.address(), CHOSEN)
    });
    ctx.part("renewal", || renewal(ctx, &shell, &one));
    ctx.part("privileges", || {
        let namespaces: [&Netns; 2] = [&one.netns, &node.netns];
        for vm in [&first, &second] {
            privileges::confined(vm.pid("vmmPid")?)?;
        }
        privileges::cannot_change_networks(first.pid("vmmPid")?, &namespaces)?;
        privileges::cannot_change_networks(second.pid("vmmPid")?, &namespaces)
    });
    shell.send("poweroff -f")?;
    first.run().wait(TIMEOUT)?.says(&["powered off"])?;
    let [one_before, two_before] = &before;
    returns(ctx, "pod after poweroff", &one.netns, one_before);
    second.kill("vmmPid")?;
    second.end(Duration::from_secs(20))?.fails(1)?;
    returns(ctx, "pod after kill -9 of the VMM", &two.netns, two_before);
    Ok(())
}

/// Checks a namespace for leftovers.
pub fn returns(ctx: &TestContext, name: &str, netns: &Netns, before: &State) {
    ctx.part(name, || netns.returns_to(before, TO_RETURN));
}

/// Checks that the pod has the devices and addresses that KubeVirt leaves in one.
fn devices(pod: &Pod<'_>) -> Result<()> {
    let names = pod.run("ip -o link show")?;
    let mut names: Vec<&str> = names
        .lines()
        .filter_map(|line| line.split(": ").nth(1)?.split('@').next())
        .collect();
    names.sort_unstable();
    ensure!(
        names == ["eth0", "eth0-nic", "k6t-eth0", "lo", "tap0"],
        "{names:?}"
    );
    let placeholder = pod.run("ip -d address show dev eth0")?;
    expect_contains(
        &placeholder,
        &["dummy", &format!("inet {}/24", pod.address()), "state DOWN"],
    )?;
    expect_contains(
        &pod.run("ip -d address show dev k6t-eth0")?,
        &["bridge", "inet 169.254.75.10/32", "mtu 1450"],
    )?;
    expect_contains(
        &pod.run("ip -d link show dev tap0")?,
        &["master k6t-eth0", "mtu 1450", "tun type tap"],
    )?;
    let moved = pod.run("ip -d link show dev eth0-nic")?;
    expect_contains(&moved, &["veth", "master k6t-eth0", "learning off", "mtu 1450"])?;
    ensure!(
        !moved.contains(&pod.mac()),
        "the pod's device kept its address: {moved}"
    );
    expect_contains(&pod.run("sysctl net.ipv4.conf.all.arp_ignore")?, &["= 1"])?;
    let routes = pod.run("ip route show")?;
    ensure!(routes.is_empty(), "the pod has routes: {routes}");
    Ok(())
}

fn inspect(vm: &Vm<'_>, pod: &Pod<'_>) -> Result<()> {
    let seen = vm.inspect()?;
    let interface = &seen["interfaces"][0];
    for (field, value) in [
        ("name", json!("default")),
        ("mac", json!(pod.mac())),
        ("binding", json!("bridge")),
        ("device", json!("eth0")),
        ("mtu", json!(MTU)),
        ("linkUp", json!(true)),
        ("vhost", json!(Path::new("/dev/vhost-net").exists())),
    ] {
        ensure!(interface[field] == value, "{field} is not {value}: {interface:#}");
    }
    let addresses = interface["addresses"].as_array().map_or(&[][..], Vec::as_slice);
    ensure!(
        addresses.first() == Some(&Value::from(pod.address())),
        "no {}: {interface:#}",
        pod.address()
    );
    Ok(())
}

/// A ping has the same addresses on every device on its path.
fn captures(ctx: &TestContext, shell: &Shell<'_>, pod: &Pod<'_>, peer: &Pod<'_>) -> Result<()> {
    let mut captures = Vec::new();
    for device in ["tap0", "k6t-eth0", "eth0-nic"] {
        captures.push(Capture::start(ctx, &pod.netns, device, "icmp")?);
    }
    pings(shell, &peer.address())?;
    let (ours, theirs) = (pod.address(), peer.address());
    for capture in &captures {
        let there = [
            format!("{} > {}, ", pod.mac(), peer.mac()),
            format!("{ours} > {theirs}: ICMP echo request"),
        ];
        let back = [
            format!("{} > {}, ", peer.mac(), pod.mac()),
            format!("{theirs} > {ours}: ICMP echo reply"),
        ];
        capture.sees(&there.each_ref().map(String::as_str))?;
        capture.sees(&back.each_ref().map(String::as_str))?;
    }
    Ok(())
}

/// An ARP request for `address` gets one reply, from `mac`.
fn one_answers(ctx: &TestContext, from: &Pod<'_>, address: &str, mac: &str) -> Result<()> {
    let asked = 2;
    let text = from
        .netns
        .run(ctx, &format!("busybox arping -c {asked} -w 10 -I eth0 {address}"))?;
    let answers: Vec<String> = Regex::new(r"\[([0-9A-Fa-f:]{17})\]")?
        .captures_iter(&text)
        .map(|found| found[1].to_lowercase())
        .collect();
    ensure!(
        answers.len() == asked && answers.iter().all(|answer| answer == mac),
        "not {mac} once for each question: {text}"
    );
    Ok(())
}

/// The client renews its lease, first by unicast, and then by broadcast, as it cannot reach the server.
fn renewal(ctx: &TestContext, shell: &Shell<'_>, pod: &Pod<'_>) -> Result<()> {
    let capture = Capture::start(ctx, &pod.netns, "tap0", "udp port 67")?;
    for (prepare, to) in [
        ("true", "169.254.75.10"),
        ("ip route add blackhole 169.254.75.10", "255.255.255.255"),
    ] {
        shell.ok(&format!(
            "rm /lease.eth0; {prepare} && kill -USR1 $(cat /udhcpc.eth0) && comes '[ -s /lease.eth0 ]'"
        ))?;
        capture.sees(&[&format!("{}.68 > {to}.67: ", pod.address())])?;
        let renewed = leased(shell, "eth0")?;
        renewed.is("event", "renew")?;
        renewed.is("ip", &pod.address())?;
        renewed.is("lease", "86313600")?;
    }
    shell.ok("ip route del blackhole 169.254.75.10")?;
    Ok(())
}
