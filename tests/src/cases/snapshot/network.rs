//! The network over a snapshot: a stream goes on, as does a connection whose peer waited until the guest was restored.

use super::{SAVE, text};
use crate::cases::network::guest::{self, STREAM, pings, ready};
use crate::harness::context::TestContext;
use crate::harness::datapath::Datapath;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::pod::Node;
use crate::harness::program::Session;
use crate::harness::vm::Vm;
use crate::harness::{Case, TIMEOUT, flow};
use anyhow::{Context, Result};
use std::time::Duration;

pub const NETWORK: Case = Case {
    name: "snapshot-network",
    about: "a TCP stream goes on over a snapshot, and a connection whose peer waits goes on over a restore in the same pod; by vhost-net and by the VMM",
    limit: Duration::from_secs(900),
    run,
};

/// A port of the guest that echoes.
const ECHO: u16 = 7002;

fn run(ctx: &TestContext) -> Result<()> {
    let node = Node::new(ctx, 1450)?;
    for datapath in [Datapath::Kernel, Datapath::Process] {
        over(ctx, &node, datapath)?;
    }
    Ok(())
}

fn over(ctx: &TestContext, node: &Node<'_>, datapath: Datapath) -> Result<()> {
    let pod = node.pod(8)?;
    let manifest = Manifest::new("connected")
        .cpu(1, 2, 1)
        .bridged(&pod)
        .small(&guest::image(ctx)?, "net,shell");
    let source = Vm::start_with(ctx, &manifest, datapath)?;
    let (shell, _) = ready(&source)?;
    shell.ok(&format!("nc -l -p {ECHO} -e /bin/cat >/dev/null 2>&1 & sleep 1"))?;
    let address = pod.address();
    // The terminal must not echo: only the guest does.
    let mut socat = node.netns.command("sh");
    socat.args([
        "-c",
        &format!("stty -echo; echo ready; exec socat - TCP:{address}:{ECHO}"),
    ]);
    let connection = Session::on_terminal(socat, &ctx.log("connection.log"))?;
    connection.expect("ready", TIMEOUT)?;
    echoes(&connection, "before")?;

    let (first, second) = (ctx.path("first"), ctx.path("second"));
    ctx.part(&format!("a stream, {datapath:?}"), || {
        let words = format!("both {address}:{} 40000000", flow::PORT);
        let stream = flow::begin(ctx, &node.netns, &words)?;
        let snapshot = ["snapshot", "connected", &text(&first), "--resume"];
        ctx.run_within(&snapshot, SAVE)?.ok()?;
        stream.wait(STREAM)?.ok().context("the stream")?;
        echoes(&connection, "resumed")
    });
    ctx.part(&format!("a peer that waits, {datapath:?}"), || {
        ctx.run_within(&["snapshot", "connected", &text(&second)], SAVE)?
            .ok()?;
        source.discard()?;
        let netns = text(&pod.netns.path());
        let words = [
            "restore",
            &text(&second),
            "--name",
            "connected",
            "--netns",
            &netns,
        ];
        let restored = Vm::start_as(ctx, "connected", datapath.husk(ctx, &words)?)?;
        datapath.check(&restored)?;
        echoes(&connection, "restored")?;
        let shell = Shell::going_on(restored.console())?;
        pings(&shell, Node::ADDRESS)?;
        let words = format!("both {address}:{} 2000000", flow::PORT);
        flow::request(ctx, &node.netns, &words, STREAM)?;
        restored.discard()?;
        std::fs::remove_dir_all(&first)?;
        std::fs::remove_dir_all(&second)?;
        Ok(())
    });
    Ok(())
}

fn echoes(connection: &Session, word: &str) -> Result<()> {
    connection.send(&format!("{word}\n"))?;
    connection.expect(&format!("{word}\n"), TIMEOUT)?;
    Ok(())
}
