//! A node's network and its pods, as a container network plugin with a bridge sets them up.

use super::context::TestContext;
use super::netns::Netns;
use anyhow::Result;

/// A node: a namespace with the bridge `cni0`, to which its pods are attached.
#[derive(Debug)]
pub struct Node<'s> {
    ctx: &'s TestContext,
    /// Path of the namespace.
    pub netns: Netns,
    mtu: u32,
}

/// A pod's namespace. Its device is `eth0`.
#[derive(Debug)]
pub struct Pod<'s> {
    ctx: &'s TestContext,
    /// Path of the namespace.
    pub netns: Netns,
    number: u8,
}

impl<'s> Node<'s> {
    /// The node's own address.
    pub const ADDRESS: &'static str = "10.244.1.1";
    /// The node's own IPv6 address.
    pub const ADDRESS6: &'static str = "fd00:10:244:1::1";
    /// An address in a network behind the node, which has no route to the pods: see [`Node::outside`].
    pub const OUTSIDE: &'static str = "192.0.2.9";

    /// Creates a node whose pods have devices of the given MTU.
    pub fn new(ctx: &'s TestContext, mtu: u32) -> Result<Self> {
        ctx.needs_root()?;
        let node = Self {
            ctx,
            netns: Netns::create()?,
            mtu,
        };
        node.run("ip link add cni0 type bridge")?;
        node.run(&format!("ip link set dev cni0 mtu {mtu} up"))?;
        node.run(&format!("ip address add {}/24 dev cni0", Self::ADDRESS))?;
        node.run(&format!("ip address add {}/64 dev cni0 nodad", Self::ADDRESS6))?;
        node.run("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")?;
        Ok(node)
    }

    /// Runs a command on the node.
    pub fn run(&self, words: &str) -> Result<String> {
        self.netns.run(self.ctx, words)
    }

    /// Creates a pod with addresses and default routes; `number` is the last part of its addresses.
    pub fn pod(&self, number: u8) -> Result<Pod<'s>> {
        let pod = self.bare_pod(number)?;
        pod.run(&format!("ip address add {}/24 dev eth0", pod.address()))?;
        pod.run(&format!("ip address add {}/64 dev eth0 nodad", pod.address6()))?;
        pod.run(&format!("ip route add default via {}", Self::ADDRESS))?;
        pod.run(&format!("ip -6 route add default via {}", Self::ADDRESS6))?;
        Ok(pod)
    }

    /// Creates a pod whose device has no address.
    pub fn bare_pod(&self, number: u8) -> Result<Pod<'s>> {
        let pod = Pod {
            ctx: self.ctx,
            netns: Netns::create()?,
            number,
        };
        self.plug(&pod, "eth0", &pod.mac())?;
        Ok(pod)
    }

    /// Adds a device to a pod, on the node's bridge.
    pub fn plug(&self, pod: &Pod<'_>, device: &str, mac: &str) -> Result<()> {
        let (outer, mtu, path) = (self.outer(pod, device), self.mtu, pod.netns.path());
        // Renamed in the pod: the node may have a device of that name itself.
        self.run(&format!(
            "ip link add {outer} mtu {mtu} type veth peer name {device} mtu {mtu} address {mac} netns {}",
            path.display()
        ))?;
        self.run(&format!("ip link set dev {outer} master cni0 up"))?;
        pod.run(&format!("ip link set dev {device} up"))?;
        Ok(())
    }

    /// The name of the node's end of a pod's device, which may not have space for more characters.
    pub fn outer(&self, pod: &Pod<'_>, device: &str) -> String {
        format!("v{}-{device:.8}", pod.number)
    }

    /// See [`outside`].
    pub fn outside(&self) -> Result<Netns> {
        outside(self.ctx, &self.netns)
    }
}

/// A namespace in another network, at [`Node::OUTSIDE`], to which `node` routes by its device `out0`: a server there
/// sees the source addresses of packets. The device is deleted with it.
pub fn outside(ctx: &TestContext, node: &Netns) -> Result<Netns> {
    let outside = Netns::create()?;
    let path = outside.path();
    for words in [
        &format!(
            "ip link add out0 type veth peer name eth0 netns {}",
            path.display()
        ),
        "ip link set dev out0 up",
        "ip address add 192.0.2.1/24 dev out0",
    ] {
        node.run(ctx, words)?;
    }
    for words in [
        "ip link set dev eth0 up",
        &format!("ip address add {}/24 dev eth0", Node::OUTSIDE),
        "ip route add default via 192.0.2.1",
    ] {
        outside.run(ctx, words)?;
    }
    Ok(outside)
}

impl Pod<'_> {
    /// Runs a command in the pod.
    pub fn run(&self, words: &str) -> Result<String> {
        self.netns.run(self.ctx, words)
    }

    /// The pod's address.
    pub fn address(&self) -> String {
        format!("10.244.1.{}", self.number)
    }

    /// The pod's IPv6 address.
    pub fn address6(&self) -> String {
        format!("fd00:10:244:1::{}", self.number)
    }

    /// The original Ethernet address of the pod's device.
    pub fn mac(&self) -> String {
        format!("0a:58:0a:f4:01:{:02x}", self.number)
    }
}
