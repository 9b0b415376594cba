//! The network of VMs: pods, Services, `virtctl expose` and `port-forward`, the kubelet's statistics.

use crate::harness::context::TestContext;
use crate::harness::kubevirt::objects::{client_pod, virtual_machine};
use crate::harness::kubevirt::{KubeVirt, VMI};
use crate::harness::{Case, met};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "kubevirt-network",
    about: "a VM and pods reach each other, by address and by Service; virtctl port-forward; the kubelet's statistics",
    limit: Duration::from_secs(900),
    run,
};

const VM: &str = "server";
const CLIENT: &str = "client";
/// Maximum time of one HTTP request.
const REQUEST: Duration = Duration::from_secs(30);
/// Port of this machine that is forwarded.
const LOCAL_PORT: u16 = 18080;

fn run(ctx: &TestContext) -> Result<()> {
    let c = &KubeVirt::find(ctx)?;
    c.apply(&[virtual_machine(VM, "script,button,shell"), client_pod(CLIENT)])?;
    c.until("pod", CLIENT, ".status.phase", "Running")?;
    c.until("vm", VM, ".status.printableStatus", "Running")?;
    c.guest_does(VM, "test -s /www/boot-id")?;
    ctx.part("pod to VM", || pod_to_vm(c));
    ctx.part("VM to pod", || vm_to_pod(c));
    ctx.part("expose", || expose(c));
    ctx.part("port-forward", || port_forward(c));
    ctx.part("statistics", || statistics(c));
    c.delete_all(&[("service", VM), ("vm", VM), ("pod", CLIENT)])?;
    c.until_none("vm")?;
    c.until_none("pods")
}

/// Gets `path` of a server from the client pod.
fn get(c: &KubeVirt<'_>, server: &str, path: &str) -> Result<String> {
    let address = format!("http://{server}/{path}");
    let words = ["exec", CLIENT, "--", "/bin/busybox", "wget", "-T", "20", "-qO-"];
    let body = c.kubectl(&[&words[..], &[&address]].concat())?.ok()?;
    Ok(body.trim().to_owned())
}

fn boot_id(c: &KubeVirt<'_>) -> Result<String> {
    c.in_guest(VM, |shell| shell.ok("cat /www/boot-id"))
}

fn pod_to_vm(c: &KubeVirt<'_>) -> Result<()> {
    let address = c.field(VMI, VM, ".status.interfaces[0].ipAddress")?;
    let ping = [
        "exec",
        CLIENT,
        "--",
        "/bin/busybox",
        "ping",
        "-c",
        "3",
        "-W",
        "10",
        &address,
    ];
    c.kubectl(&ping)?.ok().context("ping")?;
    let (seen, own) = (get(c, &address, "boot-id")?, boot_id(c)?);
    ensure!(seen == own, "{seen}, not {own}");
    Ok(())
}

fn vm_to_pod(c: &KubeVirt<'_>) -> Result<()> {
    let address = c.field("pod", CLIENT, ".status.podIP")?;
    let name = c.in_guest(VM, |shell| {
        shell.ok(&format!("wget -T 20 -qO- http://{address}/name"))
    })?;
    ensure!(name == CLIENT, "{name:?}");
    Ok(())
}

/// A Service of the VMI's labels, as `virtctl` makes it.
fn expose(c: &KubeVirt<'_>) -> Result<()> {
    c.virtctl(&[
        "expose",
        "vm",
        VM,
        "--name",
        VM,
        "--port",
        "8080",
        "--target-port",
        "80",
    ])?
    .says(&["successfully created"])?;
    let address = c.field("service", VM, ".spec.clusterIP")?;
    c.until_true("the Service has no endpoint", || {
        let seen = c.field(
            "endpointslices",
            "-lkubernetes.io/service-name=server",
            ".items[*].endpoints",
        )?;
        met(seen.contains("\"ready\":true"), || seen)
    })?;
    let (seen, own) = (get(c, &format!("{address}:8080"), "boot-id")?, boot_id(c)?);
    ensure!(seen == own, "{seen}, not {own}");
    Ok(())
}

/// virt-api itself connects to the VM.
fn port_forward(c: &KubeVirt<'_>) -> Result<()> {
    let target = format!("vm/{VM}");
    let ports = format!("{LOCAL_PORT}:80");
    let session = c.virtctl_session(&["port-forward", &target, &ports])?;
    session.expect("forwarding tcp", REQUEST)?;
    let own = boot_id(c)?;
    for _ in 0..3 {
        let mut stream = TcpStream::connect(("127.0.0.1", LOCAL_PORT))?;
        stream.set_read_timeout(Some(REQUEST))?;
        stream.write_all(b"GET /boot-id HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        ensure!(answer.contains(&own), "{answer:?} without {own}");
    }
    session.kill()
}

/// The kubelet's statistics of the launcher pod, which autoscalers and `kubectl top` read.
fn statistics(c: &KubeVirt<'_>) -> Result<()> {
    let path = format!("/api/v1/nodes/{}/proxy/stats/summary", c.node()?);
    c.until_true("the kubelet has no statistics of the pod", || {
        let summary: Value = serde_json::from_str(&c.kubectl(&["get", "--raw", &path])?.ok()?)?;
        let pods = summary["pods"].as_array().context("no pods")?;
        let pod = pods.iter().find(|pod| {
            let name = pod["podRef"]["name"].as_str().unwrap_or_default();
            name.starts_with("virt-launcher-server")
        });
        let Some(pod) = pod else {
            return Ok(Err(summary.to_string()));
        };
        let mut containers = pod["containers"].as_array().into_iter().flatten();
        let Some(compute) = containers.find(|container| container["name"] == "compute") else {
            return Ok(Err(pod.to_string()));
        };
        let used = [
            &compute["cpu"]["usageCoreNanoSeconds"],
            &compute["memory"]["workingSetBytes"],
            &pod["cpu"]["usageCoreNanoSeconds"],
            &pod["memory"]["workingSetBytes"],
        ];
        let known = used
            .iter()
            .all(|value| value.as_u64().is_some_and(|value| value > 0));
        met(known, || pod.to_string())
    })
}
