//! Whom a node serves: metrics; refusals to another node's agent and to clients without virt-api's certificate; VMIs
//! that do not ask for Husk.

use crate::harness::context::TestContext;
use crate::harness::kubevirt::objects::{condition, instance};
use crate::harness::kubevirt::{KubeVirt, VMI};
use crate::harness::{Case, met};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

pub const CASE: Case = Case {
    name: "kubevirt-access",
    about: "metrics and probes; tlsConfiguration; another node's agent cannot change a VMI; clients need virt-api's certificate; other VMIs stay off the node",
    limit: Duration::from_secs(600),
    run,
};

const VM: &str = "guarded";
const OTHER_NODE: &str = "other-node";

fn run(ctx: &TestContext) -> Result<()> {
    let c = &KubeVirt::find(ctx)?;
    let other = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": OTHER_NODE}});
    c.apply(&[instance(VM, "script,button,shell"), other])?;
    c.until(VMI, VM, ".status.phase", "Running")?;
    c.guest_does(VM, "test -s /www/boot-id")?;
    ctx.part("probes and metrics", || metrics(c));
    ctx.part("TLS versions", || tls_versions(c));
    ctx.part("another node's agent", || other_agent(ctx, c));
    ctx.part("clients without a certificate", || no_certificate(c));
    c.delete("node", OTHER_NODE)?;
    ctx.part("other VMIs", || other_vmi(c));
    c.delete(VMI, VM)?;
    c.until_no_guests()
}

/// The launcher pod of a VMI that does not ask for Husk is not placed on the only node.
fn other_vmi(c: &KubeVirt<'_>) -> Result<()> {
    let mut vmi = instance("other", "button");
    vmi["metadata"]["labels"]["husk.io/runtime"] = json!("false");
    c.apply(&[vmi])?;
    let pods = ["get", "pods", "-l", "app=other", "-o", "json"];
    c.until_true("a launcher pod that does not fit the node", || {
        let pods: Value = serde_json::from_str(&c.kubectl(&pods)?.ok()?)?;
        let pod = &pods["items"][0];
        ensure!(pod["spec"]["nodeName"].is_null(), "{pod}");
        let status = pod["status"].to_string();
        let unfit = status.contains("didn't match Pod's node affinity");
        met(unfit, || status)
    })?;
    c.delete(VMI, "other")
}

/// A PUT of the VMI with another status, by the agents' account with the token of a node.
fn put_as(ctx: &TestContext, c: &KubeVirt<'_>, node: &str) -> Result<String> {
    let mut vmi: Value = serde_json::from_str(&c.kubectl(&["get", VMI, VM, "-o", "json"])?.ok()?)?;
    vmi["status"]["fsFreezeStatus"] = json!(format!("by-{node}"));
    let file = ctx.path("vmi.json");
    std::fs::write(&file, vmi.to_string())?;
    let handlers = c.in_namespace("kubevirt");
    let words = ["create", "token", "kubevirt-handler", "--bound-object-kind=Node"];
    let bound = format!("--bound-object-name={node}");
    let token = handlers.kubectl(&[&words[..], &[&bound]].concat())?.ok()?;
    let path = format!("/apis/kubevirt.io/v1/namespaces/default/virtualmachineinstances/{VM}");
    let file = file.display().to_string();
    let answer = c.kubectl_as(token.trim(), &["replace", "--raw", &path, "-f", &file])?;
    Ok(answer.text)
}

fn other_agent(ctx: &TestContext, c: &KubeVirt<'_>) -> Result<()> {
    let refused = put_as(ctx, c, OTHER_NODE)?;
    ensure!(
        refused.contains("only allowed to modify VMIs it owns"),
        "{refused}"
    );
    let seen = c.field(VMI, VM, ".status.fsFreezeStatus")?;
    ensure!(seen.is_empty(), "fsFreezeStatus {seen:?}");
    // The node's own agent may.
    let node = c.node()?;
    put_as(ctx, c, &node)?;
    let seen = c.field(VMI, VM, ".status.fsFreezeStatus")?;
    ensure!(seen == format!("by-{node}"), "fsFreezeStatus {seen:?}");
    Ok(())
}

/// Without a certificate, and with that of a cluster administrator, which another CA has signed.
fn no_certificate(c: &KubeVirt<'_>) -> Result<()> {
    let address = agent(c)?;
    let certificates = c.path("certificates");
    let of = |name: &str| {
        [
            "-cert".to_owned(),
            certificates.join(format!("{name}.crt")).display().to_string(),
            "-key".to_owned(),
            certificates.join(format!("{name}.key")).display().to_string(),
        ]
    };
    let virt_api = certificates
        .join("kubevirt-virt-handler-certs/tls")
        .display()
        .to_string();
    let own = [
        "-cert".to_owned(),
        format!("{virt_api}.crt"),
        "-key".to_owned(),
        format!("{virt_api}.key"),
    ];
    for (who, certificate, allowed) in [
        ("nobody", &[][..], false),
        ("the administrator", &of("admin")[..], false),
        ("virt-api", &own[..], true),
    ] {
        let line = format!("PUT /v1/namespaces/default/virtualmachineinstances/{VM}/pause");
        let answer = request(&format!("{address}:8186"), certificate, &line)?;
        let answered = answer.contains("HTTP/1.1");
        ensure!(answered == allowed, "{who}: {answer}");
        let paused = c.field(VMI, VM, &condition("Paused", "status"))?;
        ensure!(allowed || paused.is_empty(), "{who} has paused it");
    }
    c.until_condition(VMI, VM, "Paused", "True")
}

/// Returns the agent's answer to a request.
fn request(address: &str, certificate: &[String], line: &str) -> Result<String> {
    let mut client = Command::new("openssl")
        .args(["s_client", "-quiet", "-connect", address])
        .args(certificate)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("openssl")?;
    let request = format!("{line} HTTP/1.1\r\nHost: agent\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    // It may have ended already.
    let _ = client
        .stdin
        .as_mut()
        .context("no input")?
        .write_all(request.as_bytes());
    let output = client.wait_with_output()?;
    let text = [output.stdout, output.stderr].concat();
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Address of the agent, without a port.
fn agent(c: &KubeVirt<'_>) -> Result<String> {
    let agents = c.in_namespace("kubevirt");
    agents.field("pods", "-lkubevirt.io=virt-handler", ".items[0].status.podIP")
}

/// The agent serves the versions of the KubeVirt object, from its next connection on.
fn tls_versions(c: &KubeVirt<'_>) -> Result<()> {
    let address = format!("{}:8443", agent(c)?);
    let serves = |version: &str| -> Result<bool> {
        let answer = request(&address, &[version.to_owned()], "GET /healthz")?;
        Ok(answer.contains("HTTP/1.1 200"))
    };
    let kubevirt = c.in_namespace("kubevirt");
    for (minimum, has_12) in [(json!("VersionTLS13"), false), (Value::Null, true)] {
        ensure!(serves("-tls1_2")? != has_12, "before minTLSVersion {minimum}");
        let change = json!({"spec": {"configuration": {"tlsConfiguration": {"minTLSVersion": minimum}}}});
        kubevirt.patch("kubevirt", "kubevirt", &["--type=merge"], &change)?;
        c.until_true("the agent serves other versions", || {
            met(serves("-tls1_2")? == has_12, || {
                format!("minTLSVersion {minimum}")
            })
        })?;
        ensure!(serves("-tls1_3")?, "TLS 1.3 with minTLSVersion {minimum}");
    }
    Ok(())
}

fn metrics(c: &KubeVirt<'_>) -> Result<()> {
    let address = format!("{}:8443", agent(c)?);
    for path in ["/healthz", "/readyz"] {
        let answer = request(&address, &[], &format!("GET {path}"))?;
        ensure!(answer.contains("HTTP/1.1 200"), "{path}: {answer}");
    }
    let answer = request(&address, &[], "GET /metrics")?;
    let value = |name: &str| {
        let line = answer.lines().find(|line| {
            line.starts_with(&format!("kubevirt_vmi_{name}{{")) && line.contains(&format!("name=\"{VM}\""))
        });
        let line = line.with_context(|| format!("no {name}: {answer}"))?;
        let value = line.rsplit(' ').next().unwrap_or_default();
        value.parse::<f64>().with_context(|| line.to_owned())
    };
    let memory = value("memory_domain_bytes")?;
    ensure!(memory == f64::from(128 << 20), "memory {memory}");
    for name in [
        "cpu_usage_seconds_total",
        "vcpu_seconds_total",
        "memory_resident_bytes",
        "network_receive_bytes_total",
        "network_transmit_packets_total",
    ] {
        let value = value(name)?;
        ensure!(value > 0.0, "{name} is {value}");
    }
    Ok(())
}
