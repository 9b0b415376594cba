//! Pods without VMs: what the cases of networks stand on. They need root, and `ip`.

use anyhow::Result;
use husk_tests::harness::flow;
use husk_tests::harness::pod::Node;
use husk_tests::harness::scene::{Scene, says};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn pods_reach_each_other_their_node_and_what_is_outside() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let scene = Scene::at(folder.path().to_owned())?;
    if scene.needs_root().is_err() {
        eprintln!("not run: needs root");
        return Ok(());
    }
    let node = Node::new(&scene, 1450)?;
    let (one, two) = (node.pod(5)?, node.pod(6)?);
    let outside = node.outside()?;
    let _server = flow::serve(&scene, &two.netns, flow::PORT)?;
    let (address, address6) = (two.address(), two.address6());
    for netns in [&one.netns, &node.netns, &outside] {
        let words = format!("both {address}:{} 100000 2", flow::PORT);
        says(
            &flow::request(&scene, netns, &words, LIMIT)?,
            &["4 x 100000 bytes as sent"],
        )?;
    }
    let words = format!("both [{address6}]:{} 100000", flow::PORT);
    flow::request(&scene, &one.netns, &words, LIMIT)?;
    let shown = one.run("ip link show dev eth0")?;
    says(&shown, &["mtu 1450", &one.mac()])?;
    let shown = node.run(&format!("ip neigh show {address}"))?;
    says(&shown, &[&two.mac()])
}
