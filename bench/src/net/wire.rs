//! The network between a guest and its peer: two namespaces, a pod's and the peer's, joined by a veth pair. In the pod,
//! Husk creates its own bridge and tap; for QEMU they are created in the same way.

use anyhow::{Context, Result, ensure};
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use xtask::finish::finish;

const POD: &str = "husk-bench-pod";
const PEER: &str = "husk-bench-peer";

/// The pod's address, which the guest takes over.
pub const GUEST: &str = "198.51.100.2/24";
const PEER_IP: &str = "198.51.100.1";
const PORT: u16 = 7000;

/// Name of the tap in the pod.
pub const TAP: &str = "tap0";

/// Address on which the peer listens.
pub fn peer() -> String {
    format!("{PEER_IP}:{PORT}")
}

/// The addresses of the peer and the guest, in the format of `guest.sh`.
pub fn addresses() -> String {
    format!("guest={GUEST}\npeer={PEER_IP}\n")
}

/// Path of the pod's namespace.
pub fn pod() -> String {
    format!("/run/netns/{POD}")
}

/// Both namespaces, which are deleted with their devices when this is dropped.
#[derive(Debug)]
pub struct Wire(());

/// The running peer, which is ended when this is dropped.
#[derive(Debug)]
pub struct Peer(Child);

impl Wire {
    /// Creates a pod as a network plugin leaves it, and its peer.
    pub fn new() -> Result<Self> {
        // They may be left over from a benchmark that was killed.
        remove();
        let wire = Self(());
        ip(None, &format!("netns add {POD}\nnetns add {PEER}\n"))?;
        // Without IPv6 addresses, whose maintenance would send additional frames.
        ip(
            Some(POD),
            &format!(
                "link set lo up\n\
                 link add eth0 type veth peer name eth0 netns {PEER}\n\
                 link set eth0 addrgenmode none up\n\
                 address add {GUEST} dev eth0\n\
                 route add default via {PEER_IP}\n"
            ),
        )?;
        ip(
            Some(PEER),
            &format!(
                "link set lo up\n\
                 link set eth0 addrgenmode none up\n\
                 address add {PEER_IP}/24 dev eth0\n"
            ),
        )?;
        Ok(wire)
    }

    /// Creates in the pod the devices of Husk's bridge binding that frames pass (`shim/network/src/bridge.rs`).
    pub fn bridge(&self) -> Result<()> {
        ip(
            Some(POD),
            &format!(
                "address flush dev eth0\n\
                 link set eth0 down\n\
                 link set eth0 name eth0-nic address 02:00:00:00:00:01\n\
                 link add k6t-eth0 address 02:00:00:00:00:02 type bridge\n\
                 link set k6t-eth0 addrgenmode none\n\
                 link set eth0-nic master k6t-eth0 up\n\
                 link set eth0-nic type bridge_slave learning off\n\
                 tuntap add dev {TAP} mode tap vnet_hdr\n\
                 link set {TAP} addrgenmode none master k6t-eth0 up\n\
                 address add 169.254.75.10/32 dev k6t-eth0\n\
                 link set k6t-eth0 up\n"
            ),
        )?;
        let mut ethtool = within(&pod());
        ethtool.args(["ethtool", "-K", "k6t-eth0", "tx", "off"]);
        finish(&mut ethtool)?;
        Ok(())
    }

    /// Starts the peer.
    pub fn serve(&self, netload: &Path) -> Result<Peer> {
        let mut serve = within(&format!("/run/netns/{PEER}"));
        serve.arg(netload).args(["serve", &peer()]).stdin(Stdio::null());
        serve.spawn().context("cannot start the peer").map(Peer)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        remove();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A command within the network namespace at `path`; the caller appends its words. It has a session of its own, as
/// Husk's monitor has: the kernel's scheduler divides a processor between sessions first (autogroups).
pub fn within(path: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={path}")).args(["--", "setsid", "--"]);
    command
}

fn remove() {
    for name in [POD, PEER] {
        let _ = Command::new("ip")
            .args(["netns", "delete", name])
            .stderr(Stdio::null())
            .status();
    }
}

/// Runs these lines with `ip -batch`, in a namespace if one is named.
fn ip(namespace: Option<&str>, lines: &str) -> Result<()> {
    let mut command = Command::new("ip");
    if let Some(namespace) = namespace {
        command.args(["-netns", namespace]);
    }
    command
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot start ip")?;
    let mut input = child.stdin.take().context("no pipe")?;
    input.write_all(lines.as_bytes())?;
    drop(input);
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "ip: {}\n{lines}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}
