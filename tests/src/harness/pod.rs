//! A node's network and the pods on it, as a container network plugin with a bridge leaves them.

use super::context::TestContext;
use super::netns::Netns;
use anyhow::Result;

/// A node: a namespace with the bridge `cni0`, on which its pods are.
#[derive(Debug)]
pub struct Node<'s> {
    ctx: &'s TestContext,
    /// Its path.
    pub netns: Netns,
    mtu: u32,
}

/// A pod's namespace. Its device is `eth0`.
#[derive(Debug)]
pub struct Pod<'s> {
    ctx: &'s TestContext,
    /// Its path.
    pub netns: Netns,
    number: u8,
}

impl<'s> Node<'s> {
    /// The node's own address.
    pub const ADDRESS: &'static str = "10.244.1.1";
    /// The same of IPv6.
    pub const ADDRESS6: &'static str = "fd00:10:244:1::1";
    /// One of a network behind the node, which knows of no pod's address: see [`Node::outside`].
    pub const OUTSIDE: &'static str = "192.0.2.9";

    /// A node whose pods have devices of that MTU.
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

    /// A pod with addresses and default routes; `number` is the last of its addresses.
    pub fn pod(&self, number: u8) -> Result<Pod<'s>> {
        let pod = self.bare_pod(number)?;
        pod.run(&format!("ip address add {}/24 dev eth0", pod.address()))?;
        pod.run(&format!("ip address add {}/64 dev eth0 nodad", pod.address6()))?;
        pod.run(&format!("ip route add default via {}", Self::ADDRESS))?;
        pod.run(&format!("ip -6 route add default via {}", Self::ADDRESS6))?;
        Ok(pod)
    }

    /// A pod whose device has no address.
    pub fn bare_pod(&self, number: u8) -> Result<Pod<'s>> {
        let pod = Pod {
            ctx: self.ctx,
            netns: Netns::create()?,
            number,
        };
        self.plug(&pod, "eth0", &pod.mac())?;
        Ok(pod)
    }

    /// One more device for a pod, on the node's bridge.
    pub fn plug(&self, pod: &Pod<'_>, device: &str, mac: &str) -> Result<()> {
        let (outer, mtu, path) = (self.outer(pod, device), self.mtu, pod.netns.path());
        // Named in the pod: the node may have a device of that name itself.
        self.run(&format!(
            "ip link add {outer} mtu {mtu} type veth peer name {device} mtu {mtu} address {mac} netns {}",
            path.display()
        ))?;
        self.run(&format!("ip link set dev {outer} master cni0 up"))?;
        pod.run(&format!("ip link set dev {device} up"))?;
        Ok(())
    }

    /// The node's end of a pod's device, whose name may leave no room for more.
    pub fn outer(&self, pod: &Pod<'_>, device: &str) -> String {
        format!("v{}-{device:.8}", pod.number)
    }

    /// See [`outside`].
    pub fn outside(&self) -> Result<Netns> {
        outside(self.ctx, &self.netns)
    }
}

/// A namespace in another network, at [`Node::OUTSIDE`], to which `node` routes by its device `out0`: who is there sees by
/// which address packets come. The device goes with it.
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

    /// Its address.
    pub fn address(&self) -> String {
        format!("10.244.1.{}", self.number)
    }

    /// Its address of IPv6.
    pub fn address6(&self) -> String {
        format!("fd00:10:244:1::{}", self.number)
    }

    /// The Ethernet address its device was made with.
    pub fn mac(&self) -> String {
        format!("0a:58:0a:f4:01:{:02x}", self.number)
    }
}
