//! `husk snapshot --live`: memory is copied while the guest runs, and what it, its disks and its network wrote meanwhile
//! is in the snapshot too.

use super::{SAVE, check_load, load, manifest, text};
use crate::cases::network::guest::{self, ready};
use crate::harness::context::TestContext;
use crate::harness::datapath::Datapath;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::pod::{Node, Pod};
use crate::harness::program::Session;
use crate::harness::vm::Vm;
use crate::harness::{Case, TIMEOUT};
use anyhow::{Context, Result, ensure};
use std::process::Command;
use std::time::Duration;

pub const LIVE: Case = Case {
    name: "snapshot-live",
    about: "memory is saved while a guest runs: fio's checksums in guest and clone, and a transfer whose receiver lags, by vhost-net and by the VMM",
    limit: Duration::from_secs(900),
    run,
};

/// A port on which the guest receives a file.
const RECEIVER: u16 = 7003;
/// Bytes of the file: more than the sockets' buffers hold.
const FILE: usize = 8 << 20;

fn run(ctx: &TestContext) -> Result<()> {
    ctx.part("busy disks", || disks(ctx));
    let node = Node::new(ctx, 1450)?;
    for (datapath, number) in [(Datapath::Kernel, 9), (Datapath::Process, 10)] {
        ctx.part(&format!("a lagging receiver, {datapath:?}"), || {
            receives(ctx, &node, &node.pod(number)?, datapath)
        });
    }
    Ok(())
}

/// The snapshot of a guest whose disks are busy.
fn disks(ctx: &TestContext) -> Result<()> {
    let names = ["vda", "sda"];
    let seed = crate::cases::fio::seed()?;
    println!("fio's seed: {seed}");
    let source = Vm::start(ctx, &manifest(ctx, "source")?)?;
    let shell = Shell::small(&source)?;
    load(&shell, &names, seed)?;
    let dir = ctx.path("disks");
    let snapshot = [
        "snapshot",
        "source",
        &text(&dir),
        "--live",
        "--resume",
        "--checksums",
    ];
    ctx.run_within(&snapshot, SAVE)?
        .says(&["saving rest of memory"])?;
    check_load(&shell, &names).context("the source")?;
    source.discard()?;
    let clone = Vm::restore_with(ctx, &dir, "clone", &["--verify"])?;
    check_load(&Shell::going_on(clone.console())?, &names).context("the clone")?;
    clone.discard()?;
    Ok(std::fs::remove_dir_all(&dir)?)
}

/// A guest receives a file slowly, so that the sockets' buffers in its memory are full of frames that only the datapath
/// wrote. It is saved meanwhile, and goes on in the same pod in another process.
fn receives(ctx: &TestContext, node: &Node<'_>, pod: &Pod<'_>, datapath: Datapath) -> Result<()> {
    let manifest = Manifest::new("receiver")
        .cpu(1, 2, 1)
        .bridged(pod)
        .small(&guest::image(ctx)?, "net,shell");
    let source = Vm::start_with(ctx, &manifest, datapath)?;
    let (shell, _) = ready(&source)?;
    shell.ok(&format!(
        "mkdir -p /tmp; ((nc -l -p {RECEIVER} | while dd bs=32k count=1 of=/tmp/part 2>/dev/null && [ -s /tmp/part ]; \
         do cat /tmp/part >> /tmp/file; [ -e /tmp/fast ] || sleep 0.1; done; touch /tmp/received) >/dev/null 2>&1 &); sleep 1"
    ))?;
    let file = ctx.path("file");
    let mut random = vec![0; FILE];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut random)?;
    std::fs::write(&file, &random)?;
    let mut send = node.netns.command("socat");
    send.args(["-u", &format!("FILE:{}", file.display())])
        .arg(format!("TCP:{}:{RECEIVER}", pod.address()));
    let sender = Session::piped(send, &ctx.log("sender.log"))?;
    shell.ok("comes '[ -s /tmp/file ]'")?;

    let dir = ctx.path("receiver");
    ctx.run_within(&["snapshot", "receiver", &text(&dir), "--live"], SAVE)?
        .ok()?;
    // Without a VM the pod itself has the address, and would reset the connection.
    for words in [
        "add table inet cut",
        "add chain inet cut out { type filter hook output priority 0 ; }",
        &format!("add rule inet cut out ip daddr {} drop", pod.address()),
    ] {
        node.run(&format!("nft {words}"))?;
    }
    source.discard()?;
    ensure!(sender.ended()?.is_none(), "the file was sent before the snapshot");
    let netns = text(&pod.netns.path());
    let words = ["restore", &text(&dir), "--name", "receiver", "--netns", &netns];
    let restored = Vm::start_as(ctx, "receiver", datapath.husk(ctx, &words)?)?;
    datapath.check(&restored)?;
    node.run("nft delete table inet cut")?;
    let shell = Shell::going_on(restored.console())?;
    shell.ok_within(
        "touch /tmp/fast; until [ -e /tmp/received ]; do sleep 0.2; done",
        SAVE,
    )?;
    let received = shell.ok("wc -c < /tmp/file; sha256sum < /tmp/file")?;
    let mut sum = Command::new("sh");
    sum.args(["-c", "wc -c < $0; sha256sum < $0"]).arg(&file);
    let sent = ctx.finish(sum, TIMEOUT)?.ok()?;
    ensure!(
        received.split_whitespace().eq(sent.split_whitespace()),
        "the guest received {received}, but {sent} was sent"
    );
    restored.discard()?;
    Ok(std::fs::remove_dir_all(&dir)?)
}
