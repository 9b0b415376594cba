//! A plugin that gives pods a gateway without ARP: 169.254.1.1, which the pod reaches by a static neighbour entry.

use super::bridge::returns;
use super::guest::{self, STREAM, pings, ready, request};
use crate::harness::context::TestContext;
use crate::harness::manifest::Manifest;
use crate::harness::pod::{Node, Pod};
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, flow};
use anyhow::{Result, ensure};

pub const CASE: Case = Case {
    name: "net-link-local",
    about: "a pod with a /32 address and the gateway 169.254.1.1: the guest needs to know nothing of it, and is lost without the static neighbour",
    limit: SMALL,
    run,
};

/// The node's own address, which is in no network of the pod.
const NODE: &str = "10.0.0.1";

/// The node's end of the pod's veth, where frames for the gateway go.
const GATEWAY_MAC: &str = "ee:ee:ee:ee:ee:ee";

fn run(ctx: &TestContext) -> Result<()> {
    let node = Node::new(ctx, 1500)?;
    let pod = routed_pod(&node)?;
    let before = pod.netns.state()?;
    let manifest = Manifest::new("calico")
        .bridged(&pod)
        .small(&guest::image(ctx)?, "net,shell");
    let vm = Vm::start(ctx, &manifest)?;
    let (shell, got) = ready(&vm)?;
    ctx.part("lease", || {
        got.is("ip", &pod.address())?;
        got.is("mask", "32")?;
        got.is("router", "169.254.1.1")?;
        got.is("staticroutes", "169.254.1.1/32 0.0.0.0 0.0.0.0/0 169.254.1.1")
    });
    ctx.part("reached and reaches", || {
        pings(&shell, NODE)?;
        let _server = flow::serve(ctx, &node.netns, flow::PORT)?;
        request(&shell, &format!("both {NODE}:{} 2000000", flow::PORT))?;
        let words = format!("both {}:{} 2000000", pod.address(), flow::PORT);
        flow::request(ctx, &node.netns, &words, STREAM)?;
        shell.expect_contains("ip neigh show 169.254.1.1", &[GATEWAY_MAC])
    });
    ctx.part("not without the neighbour", || {
        pod.run("ip link set dev eth0-nic type bridge_slave proxy_arp_wifi off")?;
        shell.ok("ip neigh flush all")?;
        let (status, text) = shell.run(&format!("ping -n -c 2 -W 2 {NODE}"), STREAM)?;
        ensure!(status != 0, "somebody else answers: {text}");
        pod.run("ip link set dev eth0-nic type bridge_slave proxy_arp_wifi on")?;
        pings(&shell, NODE)
    });
    vm.power_off(&shell)?;
    returns(ctx, "pod after poweroff", &pod.netns, &before);
    Ok(())
}

/// A pod to which the node routes, as Calico sets it up, except that Calico has proxy ARP on the node's side: the test
/// shows that the guest does not need it.
fn routed_pod<'s>(node: &Node<'s>) -> Result<Pod<'s>> {
    let pod = node.bare_pod(5)?;
    let outer = node.outer(&pod, "eth0");
    let address = pod.address();
    for words in [
        "ip address flush dev cni0".to_owned(),
        format!("ip address add {NODE}/24 dev cni0"),
        format!("ip link set dev {outer} nomaster"),
        format!("ip link set dev {outer} address {GATEWAY_MAC}"),
        format!("ip route add {address} dev {outer} src {NODE}"),
    ] {
        node.run(&words)?;
    }
    for words in [
        format!("ip address add {address}/32 dev eth0"),
        "ip route add 169.254.1.1 dev eth0 scope link".to_owned(),
        "ip route add default via 169.254.1.1 dev eth0".to_owned(),
        format!("ip neigh add 169.254.1.1 lladdr {GATEWAY_MAC} dev eth0 nud permanent"),
    ] {
        pod.run(&words)?;
    }
    Ok(pod)
}
