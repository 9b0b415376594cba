//! Long-running streams, which are not part of the tests: see `cargo xtask soak`.

use super::guest::ready;
use super::wire::manifest;
use crate::harness::context::TestContext;
use crate::harness::datapath::Datapath;
use crate::harness::pod::Node;
use crate::harness::vm::Vm;
use crate::harness::{Case, flow};
use anyhow::{Context, Result};
use std::time::{Duration, Instant};

pub const KERNEL: Case = Case {
    name: "net-soak-vhost",
    about: "vhost-net: 20 GiB each way with TSO on, every byte checked, no stream ever still for 10 s",
    limit: LIMIT,
    run: |ctx| run(ctx, Datapath::Kernel),
};

pub const PROCESS: Case = Case {
    name: "net-soak-vmm",
    about: "the same by the VMM's own workers",
    limit: LIMIT,
    run: |ctx| run(ctx, Datapath::Process),
};

const LIMIT: Duration = Duration::from_secs(90 * 60);

const ROUNDS: u32 = 20;

/// Bytes of each of a round's two streams per direction: together a gibibyte each way.
const BYTES: u64 = 512 << 20;

fn run(ctx: &TestContext, datapath: Datapath) -> Result<()> {
    let node = Node::new(ctx, 1500)?;
    let (pod, peer) = (node.pod(5)?, node.pod(6)?);
    let vm = Vm::start_with(ctx, &manifest(ctx, &pod)?, datapath)?;
    let (shell, _) = ready(&vm)?;
    shell.expect_contains("ethtool -k eth0", &["tcp-segmentation-offload: on"])?;
    let _server = flow::serve(ctx, &peer.netns, flow::PORT)?;
    for round in 1..=ROUNDS {
        let started = Instant::now();
        let words = format!("husk-flow both {}:{} {BYTES} 2", peer.address(), flow::PORT);
        let text = shell
            .ok_within(&words, LIMIT)
            .with_context(|| format!("round {round}"))?;
        println!(
            "{round} GiB each way, the last in {:.0} s: {text}",
            started.elapsed().as_secs_f64()
        );
    }
    vm.power_off(&shell)
}
