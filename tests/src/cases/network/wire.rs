//! Traffic of all kinds through either datapath, and events that must not interrupt it.

use super::bridge::returns;
use super::guest::{self, STREAM, lease, pings, ready, request, serve};
use crate::harness::capture::Capture;
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::datapath::Datapath;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::pod::{Node, Pod};
use crate::harness::program::Session;
use crate::harness::vm::Vm;
use crate::harness::{Case, flow};
use anyhow::{Result, ensure};
use serde_json::json;
use std::path::Path;
use std::time::Duration;

pub const KERNEL: Case = Case {
    name: "net-wire-vhost",
    about: "vhost-net: jumbo frames, IPv6, VLANs, checked streams with TSO on two queues; they outlive rebinding, links and queues that change, and a reboot",
    limit: Duration::from_secs(600),
    run: |ctx| run(ctx, Datapath::Kernel),
};

pub const PROCESS: Case = Case {
    name: "net-wire-vmm",
    about: "the same by the VMM's own workers",
    limit: Duration::from_secs(600),
    run: |ctx| run(ctx, Datapath::Process),
};

/// Bytes of each of four streams that must only arrive.
const BYTES: u64 = 64 << 20;

fn run(ctx: &TestContext, datapath: Datapath) -> Result<()> {
    let node = Node::new(ctx, 9000)?;
    let (pod, peer) = (node.pod(5)?, node.pod(6)?);
    let before = pod.netns.state()?;
    let manifest = manifest(ctx, &pod)?;
    let vm = Vm::start_with(ctx, &manifest, datapath)?;
    let (shell, _) = ready(&vm)?;
    let _server = flow::serve(ctx, &peer.netns, flow::PORT)?;
    let there = format!("{}:{}", peer.address(), flow::PORT);

    ctx.part("two queues", || {
        shell.expect_contains("ls /sys/class/net/eth0/queues", &["rx-0", "rx-1", "tx-0", "tx-1"])?;
        queues(&shell, 2)
    });
    ctx.part("jumbo frames", || {
        shell.expect_contains("cat /sys/class/net/eth0/mtu", &["9000"])?;
        shell.ok(&format!("ping -n -c 2 -W 5 -M do -s 8972 {}", peer.address()))?;
        Ok(())
    });
    ctx.part("IPv6", || {
        shell.ok(&format!("ip address add {}/64 dev eth0 nodad", pod.address6()))?;
        shell.ok(&format!("ping -n -c 2 -W 5 -M do -s 8952 {}", peer.address6()))?;
        request(
            &shell,
            &format!("both [{}]:{} 5000000", peer.address6(), flow::PORT),
        )?;
        let words = format!("both [{}]:{} 5000000", pod.address6(), flow::PORT);
        flow::request(ctx, &peer.netns, &words, STREAM)?;
        Ok(())
    });
    ctx.part("VLANs", || vlans(ctx, &shell, &pod, &peer));
    ctx.part("segmentation offload", || {
        shell.expect_contains("ethtool -k eth0", &["tcp-segmentation-offload: on"])?;
        // A frame of one segment is shorter. The number of segments in a frame depends on the sender's speed.
        let capture = Capture::start(ctx, &pod.netns, "tap0", "tcp and greater 2500")?;
        request(&shell, &format!("both {there} 5000000"))?;
        capture.sees(&[
            &format!("{}.", pod.address()),
            &format!(" > {}.{}: ", peer.address(), flow::PORT),
        ])?;
        capture.sees(&[&format!("{}.{} > ", peer.address(), flow::PORT)])?;
        Ok(())
    });
    ctx.part("streams", || {
        let said = request(&shell, &format!("both {there} {BYTES} 2"))?;
        println!("{said}");
        Ok(())
    });
    let load = Load {
        ctx,
        vm: &vm,
        shell: &shell,
        pod: &pod,
        peer: &peer,
    };
    load.outlives("queues change under load", || {
        for count in [1, 2, 1, 2] {
            shell.ok(&format!("ethtool -L eth0 combined {count}"))?;
            queues(&shell, count)?;
        }
        Ok(())
    });
    load.outlives("link down and up under load", || load.cable());
    load.outlives("driver unbound and bound under load", || load.rebind());
    ctx.part("reboot under load", || load.reboot());
    vm.console().send("poweroff -f\n")?;
    vm.powered_off()?;
    returns(ctx, "pod after poweroff", &pod.netns, &before);
    Ok(())
}

/// A guest with two processors and a pair of queues for each.
pub fn manifest(ctx: &TestContext, pod: &Pod<'_>) -> Result<Manifest> {
    Ok(Manifest::new("wire")
        .cpu(1, 2, 1)
        .set("/domain/devices/networkInterfaceMultiqueue", json!(true))
        .bridged(pod)
        .small(&guest::image(ctx)?, "net,shell"))
}

/// Checks how many pairs of queues the driver uses.
fn queues(shell: &Shell<'_>, count: u32) -> Result<()> {
    let shown = shell.ok("ethtool -l eth0")?;
    let current = shown
        .split("Current hardware settings")
        .nth(1)
        .unwrap_or_default();
    let mut words = current.split_whitespace().skip_while(|word| *word != "Combined:");
    ensure!(
        words.nth(1) == Some(&count.to_string()),
        "not {count} queues: {shown}"
    );
    Ok(())
}

/// Tagged frames pass unchanged: the other end removes the tag.
fn vlans(ctx: &TestContext, shell: &Shell<'_>, pod: &Pod<'_>, peer: &Pod<'_>) -> Result<()> {
    for words in [
        "ip link add link eth0 name eth0.5 type vlan id 5",
        "ip address add 192.168.5.2/24 dev eth0.5",
        "ip link set dev eth0.5 up",
    ] {
        peer.run(words)?;
        shell.ok(&words.replace("192.168.5.2", "192.168.5.1"))?;
    }
    let capture = Capture::start(ctx, &pod.netns, "tap0", "vlan 5")?;
    pings(shell, "192.168.5.2")?;
    capture.sees(&["vlan 5", "192.168.5.1 > 192.168.5.2: ICMP echo request"])?;
    request(shell, &format!("both 192.168.5.2:{} 5000000", flow::PORT))?;
    shell.ok("ip link delete eth0.5")?;
    peer.run("ip link delete eth0.5")?;
    Ok(())
}

/// Streams in both directions that continue while an action is applied to the guest.
struct Load<'a> {
    ctx: &'a TestContext,
    vm: &'a Vm<'a>,
    shell: &'a Shell<'a>,
    pod: &'a Pod<'a>,
    peer: &'a Pod<'a>,
}

/// Maximum time that TCP may take to retransmit after a pause, in seconds.
const TIMEOUT: u32 = 60;

impl Load<'_> {
    /// Starts streams that continue until the file exists.
    fn begin(&self, until: &Path) -> Result<Session> {
        let (address, until) = (self.pod.address(), until.display());
        let words = format!("both {address}:{} {until} 2 {TIMEOUT}", flow::PORT);
        let session = flow::begin(self.ctx, &self.peer.netns, &words)?;
        std::thread::sleep(Duration::from_secs(1));
        Ok(session)
    }

    /// Checks that streams arrive that start before `what` and end after it.
    fn outlives(&self, name: &str, what: impl FnOnce() -> Result<()>) {
        self.ctx.part(name, || {
            let until = self.ctx.path("until");
            let streams = self.begin(&until)?;
            what()?;
            std::thread::sleep(Duration::from_secs(1));
            std::fs::write(&until, "")?;
            println!("{}", streams.wait(STREAM)?.ok()?.trim());
            Ok(())
        });
        // The file is missing if the streams failed.
        let _ = std::fs::remove_file(self.ctx.path("until"));
    }

    fn cable(&self) -> Result<()> {
        for (word, carrier) in [("down", "0"), ("up", "1"), ("down", "0"), ("up", "1")] {
            self.ctx.run(&["link", self.vm.name(), "default", word])?.ok()?;
            self.shell.ok(&format!(
                "comes '[ $(cat /sys/class/net/eth0/carrier) = {carrier} ]'"
            ))?;
        }
        Ok(())
    }

    /// Unbinds and binds the driver; the new `eth0` gets the old one's addresses.
    fn rebind(&self) -> Result<()> {
        for _ in 0..2 {
            self.shell.ok(
                "device=$(basename $(readlink /sys/class/net/eth0/device)) && kill $(cat /udhcpc.eth0) && \
                 cd /sys/bus/virtio/drivers/virtio_net && echo $device > unbind && [ ! -e /sys/class/net/eth0 ] && \
                 echo $device > bind && cd / && comes '[ -e /sys/class/net/eth0 ]'",
            )?;
            lease(self.shell, "eth0")?.is("ip", &self.pod.address())?;
        }
        Ok(())
    }

    /// A reboot ends the streams; the next ones arrive.
    fn reboot(&self) -> Result<()> {
        let streams = self.begin(&self.ctx.path("never"))?;
        self.shell.send("reboot -f")?;
        let shell = guest::shell(self.vm)?;
        lease(&shell, "eth0")?.is("ip", &self.pod.address())?;
        serve(&shell, flow::PORT)?;
        queues(&shell, 2)?;
        drop(streams);
        let words = format!("both {}:{} 5000000 2", self.pod.address(), flow::PORT);
        expect_contains(
            &flow::request(self.ctx, &self.peer.netns, &words, STREAM)?,
            &["as sent"],
        )
    }
}
