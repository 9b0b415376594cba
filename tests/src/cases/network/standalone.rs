//! `husk run` without a pod, as root: each VM has a namespace of its own behind a bridge on this machine.

use super::bridge::TO_RETURN;
use super::guest::{self, STREAM, pings, ready, request};
use crate::harness::capture::Capture;
use crate::harness::context::TestContext;
use crate::harness::manifest::Manifest;
use crate::harness::netns::Netns;
use crate::harness::pod::{self, Node};
use crate::harness::program::Session;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, TIMEOUT, flow, met, poll};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::collections::BTreeSet;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "net-standalone",
    about: "two VMs without pods: they reach this machine, each other and by its address what is outside, are reached by husk port-forward, and leave nothing",
    limit: SMALL,
    run,
};

/// Local address of a forwarded guest port.
const FORWARDED: u16 = 7080;

fn run(ctx: &TestContext) -> Result<()> {
    ctx.needs_root()?;
    let host = Netns::host()?;
    let outside = pod::outside(ctx, &host)?;
    let (before, namespaces) = (host.state()?, namespaces()?);
    let manifest = |name, binding| -> Result<Manifest> {
        Ok(Manifest::new(name)
            .pod_interface(binding)
            .small(&guest::image(ctx)?, "net,shell"))
    };
    let first = Vm::start(ctx, &manifest("first", json!({"masquerade": {}}))?)?;
    let second = Vm::start(ctx, &manifest("second", json!({"bridge": {}}))?)?;
    let (shell, _) = ready(&first)?;
    let (other, got) = ready(&second)?;
    let addresses = [address(&first)?, address(&second)?];
    ctx.part("leases", || {
        ensure!(addresses[0] != addresses[1], "the same: {addresses:?}");
        got.is("ip", &addresses[1])?;
        shell.expect_contains("ip -4 address show dev eth0", &["10.0.2.2/24"])
    });
    ctx.part("this machine", || {
        let own = own_address(ctx)?;
        let _server = flow::serve(ctx, &host, flow::PORT)?;
        for shell in [&shell, &other] {
            pings(shell, &own)?;
            request(shell, &format!("both {own}:{} 2000000", flow::PORT))?;
        }
        for address in &addresses {
            flow::request(
                ctx,
                &host,
                &format!("both {address}:{} 2000000", flow::PORT),
                STREAM,
            )?;
        }
        Ok(())
    });
    ctx.part("outside", || {
        let capture = Capture::start(ctx, &host, "out0", "tcp")?;
        let _server = flow::serve(ctx, &outside, flow::PORT)?;
        for shell in [&shell, &other] {
            request(shell, &format!("both {}:{} 2000000", Node::OUTSIDE, flow::PORT))?;
        }
        capture.sees(&["192.0.2.1.", &format!(" > {}.{}: ", Node::OUTSIDE, flow::PORT)])?;
        for address in &addresses {
            let seen = capture.lines();
            ensure!(
                !seen.iter().any(|line| line.contains(address.as_str())),
                "{address} is seen outside"
            );
        }
        Ok(())
    });
    ctx.part("each other", || {
        request(&shell, &format!("both {}:{} 2000000", addresses[1], flow::PORT))?;
        request(&other, &format!("both {}:{} 2000000", addresses[0], flow::PORT))?;
        Ok(())
    });
    ctx.part("port-forward", || {
        for name in ["first", "second"] {
            let ports = format!("{FORWARDED}:{}", flow::PORT);
            let forward = Session::piped(
                ctx.husk(&["port-forward", name, &ports]),
                &ctx.log(&format!("{name}.forward.log")),
            )?;
            forward.expect(&FORWARDED.to_string(), TIMEOUT)?;
            let words = format!("both 127.0.0.1:{FORWARDED} 2000000 3");
            flow::request(ctx, &host, &words, STREAM)?;
        }
        Ok(())
    });
    first.kill("monitorPid")?;
    first
        .run()
        .wait(Duration::from_secs(20))?
        .fails_with(1, &["monitor died"])?;
    // The next command removes the leftovers of a killed monitor.
    ctx.list()?;
    ctx.part("the other goes on", || pings(&other, Node::OUTSIDE));
    second.power_off(&other)?;
    ctx.part("nothing is left", || {
        host.returns_to(&before, TO_RETURN)?;
        poll(TO_RETURN, Duration::from_millis(200), || {
            let left = self::namespaces()?;
            met(left == namespaces, || {
                format!("namespaces: {namespaces:?} before, {left:?} now")
            })
        })
    });
    Ok(())
}

/// Address of this machine on the bridge of its VMs.
pub fn own_address(ctx: &TestContext) -> Result<String> {
    let shown = Netns::host()?.run(ctx, "ip -4 -o address show dev husk0")?;
    let own = shown
        .split_whitespace()
        .find_map(|word| Some(word.split_once('/')?.0));
    Ok(own.context("husk0 has no address")?.to_owned())
}

/// Address at which this machine reaches the VM.
fn address(vm: &Vm<'_>) -> Result<String> {
    let seen = vm.inspect()?;
    let address = seen["interfaces"][0]["addresses"][0].as_str();
    Ok(address
        .with_context(|| format!("no address: {seen:#}"))?
        .to_owned())
}

/// The network namespaces that have processes or names.
fn namespaces() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        if let Ok(link) = std::fs::read_link(entry.path().join("ns/net")) {
            found.insert(link.display().to_string());
        }
    }
    for entry in std::fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        found.insert(entry.path().display().to_string());
    }
    Ok(found)
}
