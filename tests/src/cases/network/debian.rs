//! A stock Debian in a pod, with its own DHCP client and without network settings in its image or manifest.

use super::bridge::TO_RETURN;
use crate::harness::capture::Capture;
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::guest::{Shell, TO_LOGIN};
use crate::harness::manifest::Manifest;
use crate::harness::pod::Node;
use crate::harness::vm::Vm;
use crate::harness::{Case, DEBIAN, images};
use anyhow::Result;

pub const CASE: Case = Case {
    name: "net-debian",
    about: "stock Debian 13 in a pod: cloud-init and systemd-networkd take the pod's address, routes and MTU, and renew the lease",
    limit: DEBIAN,
    run,
};

const USER_DATA: &str = "#cloud-config\npassword: husk\nchpasswd: {expire: false}\n";

fn run(ctx: &TestContext) -> Result<()> {
    let node = Node::new(ctx, 1450)?;
    let (pod, process) = (node.pod(5)?, node.pod(6)?);
    pod.run(&format!("ip route add 10.96.0.0/12 via {}", process.address()))?;
    let before = pod.netns.state()?;
    let manifest = Manifest::new("stock")
        .memory("768Mi")
        .container_disk("rootdisk", &images::disk("debian-13-cloud")?)
        .cloud_init(USER_DATA)
        .bridged(&pod);
    let vm = Vm::start(ctx, &manifest)?;
    vm.console().expect(r"Linux version 6\.12\.", TO_LOGIN)?;
    let shell = Shell::log_in(&vm, "debian", "husk")?;
    let device = shell.ok("basename $(ls -d /sys/class/net/e*)")?;
    let check = || -> Result<()> {
        shell.expect_contains(
            &format!("ip address show dev {device}"),
            &[&format!("inet {}/24", pod.address()), &pod.mac(), "mtu 1450"],
        )?;
        let routes = shell.ok("ip route show")?;
        let to_service = format!("10.96.0.0/12 via {}", process.address());
        expect_contains(&routes, &[&format!("default via {}", Node::ADDRESS), &to_service])?;
        let lease = shell.ok("cat /run/systemd/netif/leases/*")?;
        expect_contains(
            &lease,
            &[
                "LIFETIME=2y 8month 3w 4d",
                "SERVER_ADDRESS=169.254.75.10",
                "MTU=1450",
            ],
        )?;
        shell.ok(&format!("ping -n -c 2 -W 5 {}", process.address()))?;
        process.run(&format!("ping -n -c 2 -W 5 {}", pod.address()))?;
        Ok(())
    };
    ctx.part("lease", check);
    ctx.part("renewal", || {
        let capture = Capture::start(ctx, &pod.netns, "tap0", "udp port 67")?;
        shell.ok(&format!("networkctl renew {device}"))?;
        capture.sees(&[&format!("{}.68 > 169.254.75.10.67: ", pod.address())])?;
        // The renewal goes through the gateway, which has no server for it. The lease lasts for years, so it stays.
        check()
    });
    shell.send("systemctl poweroff")?;
    vm.powered_off()?;
    ctx.part("pod after poweroff", || pod.netns.returns_to(&before, TO_RETURN));
    Ok(())
}
