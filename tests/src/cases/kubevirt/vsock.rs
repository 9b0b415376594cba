//! KubeVirt's subresource vsock, under its feature gate.

use crate::harness::context::TestContext;
use crate::harness::kubevirt::objects::instance;
use crate::harness::kubevirt::{KubeVirt, VMI};
use crate::harness::{Case, met};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::time::Duration;
use tungstenite::client::IntoClientRequest;
use tungstenite::http::HeaderValue;
use tungstenite::{Error, Message};

pub const CASE: Case = Case {
    name: "kubevirt-vsock",
    about: "autoattachVSOCK under the gate VSOCK: a CID of the node, the subresource vsock, a port without a program",
    limit: Duration::from_secs(900),
    run,
};

const VM: &str = "attached";
const CID: &str = ".status.VSOCKCID";
const GATES: &str = ".spec.configuration.developerConfiguration.featureGates";
/// Loads the driver and the modules that it needs, in their order, and echoes on port 5000.
const LISTEN: &str = "while read m; do insmod /lib/$m; done < /lib/vmw_vsock_virtio_transport; \
                      socat VSOCK-LISTEN:5000,fork EXEC:/bin/cat &";
/// Words of `kubectl proxy`'s first line, before its port.
const SERVING: &str = "Starting to serve on 127.0.0.1:";

fn run(ctx: &TestContext) -> Result<()> {
    let c = &KubeVirt::find(ctx)?;
    let kubevirt = c.in_namespace("kubevirt");
    let before = gates(&kubevirt)?;
    set_gates(&kubevirt, &[&before[..], &["VSOCK".to_owned()]].concat())?;
    ctx.part("a CID and its port", || attached(c));
    set_gates(&kubevirt, &before)
}

fn gates(c: &KubeVirt<'_>) -> Result<Vec<String>> {
    match c.field("kubevirt", "kubevirt", GATES)?.as_str() {
        "" => Ok(Vec::new()),
        text => serde_json::from_str(text).with_context(|| format!("feature gates {text}")),
    }
}

fn set_gates(c: &KubeVirt<'_>, gates: &[String]) -> Result<()> {
    let patch = json!({"spec": {"configuration": {"developerConfiguration": {"featureGates": gates}}}});
    c.patch("kubevirt", "kubevirt", &["--type=merge"], &patch)
}

fn vmi() -> Value {
    let mut vmi = instance(VM, "script,shell");
    vmi["spec"]["domain"]["devices"]["autoattachVSOCK"] = json!(true);
    vmi
}

fn attached(c: &KubeVirt<'_>) -> Result<()> {
    c.until_true("the node has no vhost-vsock", || {
        let count = c.field(
            "nodes",
            "-lhusk.io/node",
            ".items[0].status.allocatable.devices\\.kubevirt\\.io/vhost-vsock",
        )?;
        met(!matches!(count.as_str(), "" | "0"), || count)
    })?;
    // virt-api takes a while to see the gate.
    c.until_true("the VMI is refused", || {
        Ok(c.apply(&[vmi()]).map_err(|error| format!("{error:#}")))
    })?;
    c.until(VMI, VM, ".status.phase", "Running")?;
    let cid: u32 = c.field(VMI, VM, CID)?.parse().context("no CID")?;
    ensure!(cid >= 3, "CID {cid}");
    c.in_guest(VM, |shell| shell.send(LISTEN))?;
    let proxy = c.kubectl_session(&["proxy", "--port=0"])?;
    let line = proxy.expect(&format!("{SERVING}([0-9]+)"), Duration::from_secs(30))?;
    let port = line.get(1).context("no port")?.parse()?;
    c.until_true("nobody echoes", || {
        Ok(echo(port, 5000).map_err(|error| format!("{error:#}")))
    })?;
    let refused = format!("{:#}", echo(port, 5001).err().context("port 5001 has a program")?);
    ensure!(refused.contains("500"), "{refused}");
    drop(proxy);
    c.delete(VMI, VM)?;
    c.until_none(VMI)?;
    Ok(())
}

/// Sends a line to a port of the guest through the API server, and gets it back.
fn echo(proxy: u16, port: u32) -> Result<()> {
    let path =
        format!("apis/subresources.kubevirt.io/v1/namespaces/default/virtualmachineinstances/{VM}/vsock");
    let mut request = format!("ws://127.0.0.1:{proxy}/{path}?port={port}&tls=false").into_client_request()?;
    let protocol = HeaderValue::from_static("plain.kubevirt.io");
    request.headers_mut().insert("Sec-WebSocket-Protocol", protocol);
    let (mut socket, _) = match tungstenite::connect(request) {
        Err(Error::Http(answer)) => {
            let body = answer.body().as_deref().map(String::from_utf8_lossy);
            bail!("{}: {}", answer.status(), body.unwrap_or_default());
        }
        other => other?,
    };
    socket.send(Message::binary(b"through the API server\n".to_vec()))?;
    loop {
        match socket.read()? {
            Message::Binary(data) => {
                ensure!(&data[..] == b"through the API server\n", "{data:?}");
                return Ok(());
            }
            Message::Ping(_) | Message::Pong(_) => {}
            other => bail!("{other:?} instead of the echo"),
        }
    }
}
