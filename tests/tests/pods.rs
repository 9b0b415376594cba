//! Pods without VMs: what the cases of networks stand on. They need root, and `ip`, `busybox`, `nft` and `tcpdump`.

use anyhow::Result;
use husk_tests::harness::capture::Capture;
use husk_tests::harness::context::{TestContext, expect_contains};
use husk_tests::harness::flow;
use husk_tests::harness::pod::Node;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// A context in a temporary folder.
fn test_context() -> Result<(TestContext, tempfile::TempDir)> {
    let folder = tempfile::tempdir()?;
    Ok((TestContext::at(folder.path().to_owned())?, folder))
}

#[test]
#[ignore = "needs root"]
fn pods_reach_each_other_the_node_and_outside_addresses() -> Result<()> {
    let (ctx, _folder) = test_context()?;
    let node = Node::new(&ctx, 1450)?;
    let (one, two) = (node.pod(5)?, node.pod(6)?);
    let outside = node.outside()?;
    let _server = flow::serve(&ctx, &two.netns, flow::PORT)?;
    let (address, address6) = (two.address(), two.address6());
    for netns in [&one.netns, &node.netns, &outside] {
        let words = format!("both {address}:{} 100000 2", flow::PORT);
        expect_contains(
            &flow::request(&ctx, netns, &words, LIMIT)?,
            &["4 streams of 100000 to 100000 bytes as sent"],
        )?;
    }
    let words = format!("both [{address6}]:{} 100000", flow::PORT);
    flow::request(&ctx, &one.netns, &words, LIMIT)?;
    let shown = one.run("ip link show dev eth0")?;
    expect_contains(&shown, &["mtu 1450", &one.mac()])?;
    let shown = node.run(&format!("ip neigh show {address}"))?;
    expect_contains(&shown, &[&two.mac()])
}

#[test]
#[ignore = "needs root"]
fn changes_in_a_pod_and_frames_through_it_are_found() -> Result<()> {
    let (ctx, _folder) = test_context()?;
    let node = Node::new(&ctx, 1500)?;
    let pod = node.pod(5)?;
    let before = pod.netns.state()?;
    pod.netns.returns_to(&before, LIMIT)?;
    for words in [
        "nft add table ip nat",
        "ip link add k6t type bridge",
        "ip link set dev eth0 mtu 1400",
    ] {
        pod.run(words)?;
    }
    let changes = before.changes(&pod.netns.state()?).join("\n");
    for line in ["+ nft table ip nat", "+ link \"k6t\" bridge", "mtu 1400"] {
        assert!(changes.contains(line), "{line}: {changes}");
    }
    let capture = Capture::start(&ctx, &node.netns, "cni0", "icmp")?;
    pod.run(&format!("busybox ping -c 1 {}", Node::ADDRESS))?;
    capture.sees(&[
        &pod.mac(),
        &format!("{} > {}: ICMP echo request", pod.address(), Node::ADDRESS),
    ])?;
    Ok(())
}
