//! A pod as a CNI plugin leaves it, and its node.

use std::os::fd::{AsFd, AsRawFd};
use std::process::Command;

use husk_network::{Binding, Interface, MacAddr, Netns, NetworkError, PreparedNic, TapOwner, prepare};
use tempfile::TempDir;

/// MAC address of the pod's NIC.
pub const POD_MAC: MacAddr = MacAddr([0x0a, 0x58, 10, 244, 1, 5]);
/// MAC address of the node's end of the veth.
pub const NODE_MAC: MacAddr = MacAddr([0xee, 0xee, 0xee, 0xee, 0xee, 0xee]);

/// Two namespaces connected by a veth pair: `eth0` in the pod, `veth0` on the node.
#[derive(Debug)]
pub struct Pod {
    pub netns: Netns,
    pub node: Netns,
    /// State directory for records.
    pub dir: TempDir,
}

/// Owner of the taps: not root.
pub fn owner() -> TapOwner {
    TapOwner { uid: 107, gid: 107 }
}

impl Pod {
    /// A pod without addresses.
    pub fn bare() -> Pod {
        let pod = Pod {
            netns: Netns::create().unwrap(),
            node: Netns::create().unwrap(),
            dir: tempfile::tempdir().unwrap(),
        };
        pod.add_veth("veth0", NODE_MAC, "eth0", POD_MAC);
        ip(&pod.netns, "link set lo up");
        pod
    }

    /// A pod with an address and a default route in its node's network, as the CNI plugin `bridge` makes it.
    pub fn with_address() -> Pod {
        let pod = Pod::bare();
        ip(&pod.node, "addr add 10.244.1.1/24 brd + dev veth0");
        ip(&pod.netns, "addr add 10.244.1.5/24 brd + dev eth0");
        ip(&pod.netns, "route add default via 10.244.1.1");
        pod
    }

    /// As [`Pod::with_address`], with IPv6 as well.
    pub fn with_both_families() -> Pod {
        let pod = Pod::with_address();
        pod.add_ipv6();
        pod
    }

    /// As [`Pod::with_address`], with IPv6 only.
    pub fn with_ipv6() -> Pod {
        let pod = Pod::bare();
        pod.add_ipv6();
        pod
    }

    fn add_ipv6(&self) {
        ip(&self.node, "addr add fd00:1::1/64 dev veth0 nodad");
        ip(&self.netns, "addr add fd00:1::5/64 dev eth0 nodad");
        ip(&self.netns, "-6 route add default via fd00:1::1");
    }

    /// A pod whose gateway does not answer ARP, but is a static neighbour.
    pub fn with_link_local_gateway() -> Pod {
        let pod = Pod::bare();
        ip(&pod.node, "link add node0 type bridge");
        ip(&pod.node, "addr add 10.0.0.1/24 dev node0");
        ip(&pod.node, "link set node0 up");
        ip(&pod.node, "route add 10.244.1.5 dev veth0 src 10.0.0.1");
        ip(&pod.netns, "addr add 10.244.1.5/32 dev eth0");
        ip(&pod.netns, "route add 169.254.1.1 dev eth0 scope link");
        ip(&pod.netns, "route add default via 169.254.1.1 dev eth0");
        ip(
            &pod.netns,
            &format!("neigh add 169.254.1.1 lladdr {NODE_MAC} dev eth0 nud permanent"),
        );
        pod
    }

    /// Two pods without addresses on a bridge of their node. Their MAC addresses end with 1 and 2.
    pub fn neighbours() -> [Pod; 2] {
        let node = Netns::create().unwrap();
        ip(&node, "link add cni0 type bridge");
        ip(&node, "link set cni0 up");
        [1, 2].map(|i| {
            let pod = Pod {
                netns: Netns::create().unwrap(),
                node: node.clone(),
                dir: tempfile::tempdir().unwrap(),
            };
            let outer = format!("veth{i}");
            pod.add_veth(
                &outer,
                MacAddr([2, 0, 0, 0, 9, i]),
                "eth0",
                MacAddr([2, 0, 0, 0, 0, i]),
            );
            ip(&node, &format!("link set {outer} master cni0"));
            pod
        })
    }

    /// Adds a veth pair between pod and node.
    pub fn add_veth(&self, outer: &str, outer_mac: MacAddr, inner: &str, inner_mac: MacAddr) {
        let netns = self.path();
        ip(
            &self.node,
            &format!("link add {outer} mtu 1450 type veth peer name {inner} mtu 1450"),
        );
        ip(&self.node, &format!("link set {outer} address {outer_mac} up"));
        ip(&self.node, &format!("link set {inner} netns {netns}"));
        ip(&self.netns, &format!("link set {inner} address {inner_mac} up"));
    }

    pub fn prepare(&self, interfaces: &[Interface]) -> Result<Vec<PreparedNic>, NetworkError> {
        prepare(&self.netns, self.dir.path(), interfaces)
    }

    /// Prepares the one interface.
    pub fn ready(&self, interface: &Interface) -> PreparedNic {
        let mut prepared = self.prepare(std::slice::from_ref(interface)).unwrap();
        prepared.pop().unwrap()
    }

    /// Links, addresses, routes, neighbours and sysctls of the pod, without volatile state.
    pub fn state(&self) -> String {
        let mut text = String::new();
        for words in [
            "-o link show",
            "-o -4 addr show",
            "route show",
            "-6 route show",
            "-o -6 addr show scope global",
            "neigh show nud permanent",
        ] {
            let shown = self.shows(words);
            // Without an open descriptor a tap has no carrier. Link-local addresses come and go with it.
            let lines = shown.lines().filter(|line| !line.starts_with("fe80:"));
            let lasting = lines
                .flat_map(str::split_whitespace)
                .filter(|word| !matches!(*word, "UP" | "DOWN" | "UNKNOWN" | "LOWERLAYERDOWN" | "linkdown"));
            text += &lasting
                .collect::<Vec<_>>()
                .join(" ")
                .replace("NO-CARRIER,", "")
                .replace(",LOWER_UP", "");
            text.push('\n');
        }
        text + &switch(&self.netns, "ipv4/conf/all/arp_ignore") + &switch(&self.netns, "ipv4/ip_forward")
    }

    /// Path of the pod's namespace for other processes.
    pub fn path(&self) -> String {
        path(&self.netns)
    }

    /// Output of `ip` in the pod.
    pub fn shows(&self, words: &str) -> String {
        ip(&self.netns, words)
    }
}

/// The first interface of a manifest.
pub fn interface(binding: Binding) -> Interface {
    Interface {
        name: "default".to_owned(),
        nic: "eth0".to_owned(),
        index: 0,
        binding,
        mac: None,
        queues: 1,
        owner: owner(),
    }
}

/// Path of an open namespace for other processes.
pub fn path(netns: &Netns) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), netns.as_fd().as_raw_fd())
}

/// Runs `ip` in a namespace.
pub fn ip(netns: &Netns, words: &str) -> String {
    let run = || {
        Command::new("ip")
            .args(words.split_whitespace())
            .output()
            .unwrap()
    };
    let output = netns.run(run).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "ip {words}: {error}");
    text
}

/// Value of a sysctl below `net` in a namespace.
pub fn switch(netns: &Netns, name: &str) -> String {
    let path = format!("/proc/sys/net/{name}");
    let text = netns.run(|| std::fs::read_to_string(path)).unwrap().unwrap();
    text.trim().to_owned()
}
