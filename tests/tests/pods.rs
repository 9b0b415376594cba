//! Pods without VMs: what the cases of networks stand on. They need root, and `ip`, `busybox`, `nft` and `tcpdump`.

use anyhow::Result;
use husk_tests::harness::capture::Capture;
use husk_tests::harness::flow;
use husk_tests::harness::pod::Node;
use husk_tests::harness::scene::{Scene, says};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// A scene, if this is root; what is in its folder goes with the other.
fn scene() -> Result<Option<(Scene, tempfile::TempDir)>> {
    let folder = tempfile::tempdir()?;
    let scene = Scene::at(folder.path().to_owned())?;
    if scene.needs_root().is_err() {
        eprintln!("not run: needs root");
        return Ok(None);
    }
    Ok(Some((scene, folder)))
}

#[test]
fn pods_reach_each_other_their_node_and_what_is_outside() -> Result<()> {
    let Some((scene, _folder)) = scene()? else {
        return Ok(());
    };
    let node = Node::new(&scene, 1450)?;
    let (one, two) = (node.pod(5)?, node.pod(6)?);
    let outside = node.outside()?;
    let _server = flow::serve(&scene, &two.netns, flow::PORT)?;
    let (address, address6) = (two.address(), two.address6());
    for netns in [&one.netns, &node.netns, &outside] {
        let words = format!("both {address}:{} 100000 2", flow::PORT);
        says(
            &flow::request(&scene, netns, &words, LIMIT)?,
            &["4 streams of 100000 to 100000 bytes as sent"],
        )?;
    }
    let words = format!("both [{address6}]:{} 100000", flow::PORT);
    flow::request(&scene, &one.netns, &words, LIMIT)?;
    let shown = one.run("ip link show dev eth0")?;
    says(&shown, &["mtu 1450", &one.mac()])?;
    let shown = node.run(&format!("ip neigh show {address}"))?;
    says(&shown, &[&two.mac()])
}

#[test]
fn what_is_in_a_pod_and_passes_it_is_seen() -> Result<()> {
    let Some((scene, _folder)) = scene()? else {
        return Ok(());
    };
    let node = Node::new(&scene, 1500)?;
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
    let capture = Capture::start(&scene, &node.netns, "cni0", "icmp")?;
    pod.run(&format!("busybox ping -c 1 {}", Node::ADDRESS))?;
    capture.sees(&[
        &pod.mac(),
        &format!("{} > {}: ICMP echo request", pod.address(), Node::ADDRESS),
    ])?;
    Ok(())
}
