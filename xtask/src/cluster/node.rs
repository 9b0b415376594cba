//! A node of the cluster: a lab with containerd, kubelet and kube-proxy.

use super::network::{HOST, NodeNetwork, PODS};
use super::{Programs, images};
use crate::progress::Progress;
use crate::{checkout, lab};
use anyhow::{Result, bail};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time limit to set a node up.
const SETUP: Duration = Duration::from_secs(600);
const SCRIPT: &str = include_str!("guest/node.sh");

/// Name of node `number`.
pub fn name(number: u32) -> String {
    format!("node{number}")
}

/// Boots the lab of node `number` of `nodes`, connects it to the bridge and starts the node's programs.
pub fn start(
    progress: &Progress,
    folder: &Path,
    programs: &Programs,
    (number, nodes): (u32, u32),
    archives: &[PathBuf],
) -> Result<()> {
    let (name, network) = (name(number), NodeNetwork::of(number));
    lab::up_with_nic(progress, number, &network.tap, &network.mac)?;
    let files = checkout::folder(folder.join(&name))?;
    let certificates = folder.join("certificates");
    for (file, content) in [
        ("kubelet.json", kubelet(&certificates, &name)),
        ("kube-proxy.json", kube_proxy(&certificates, &name)),
        ("10-husk.conflist", cni(&network)),
    ] {
        std::fs::write(files.join(file), content.to_string())?;
    }
    std::fs::write(files.join("containerd.toml"), containerd())?;
    let step = progress.step(format!("starting {name}"));
    let mut words: Vec<String> = ["sh", "-c", SCRIPT, "node.sh"].map(str::to_owned).to_vec();
    words.extend([name.clone(), network.mac, network.address, HOST.to_owned()]);
    for folder in [&files, &certificates, &programs.peers, &programs.control_plane] {
        words.push(folder.display().to_string());
    }
    words.extend(archives.iter().map(|archive| archive.display().to_string()));
    let mut command = lab::Command::new(words).in_lab(true).timeout(SETUP);
    command.lab = number;
    command.env.push(("ROUTES".to_owned(), routes(number, nodes)));
    let mut output = Vec::new();
    let status = command.lines(progress, |line| {
        step.news(line);
        output.push(line.to_owned());
    })?;
    if status != 0 {
        bail!("{name}: exit status {status}\n{}", output.join("\n"));
    }
    step.done();
    Ok(())
}

/// The other nodes' pods and the nodes' addresses, as words `PODS=ADDRESS`.
fn routes(number: u32, nodes: u32) -> String {
    let others = (1..=nodes).filter(|other| *other != number).map(NodeNetwork::of);
    let routes: Vec<String> = others
        .map(|node| format!("{}={}", node.pods, node.address))
        .collect();
    routes.join(" ")
}

/// Ends node `number` with its lab.
pub fn end(number: u32) -> Result<()> {
    lab::end(number)
}

fn kubelet(certificates: &Path, name: &str) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": certificates.join("ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        // The disk of a test node may be full.
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "failSwapOn": false,
        "imageGCHighThresholdPercent": 100,
        "tlsCertFile": certificates.join(format!("{name}.crt")),
        "tlsPrivateKeyFile": certificates.join(format!("{name}.key")),
    })
}

fn kube_proxy(certificates: &Path, name: &str) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": name,
        "clusterCIDR": PODS,
        "clientConnection": {"kubeconfig": certificates.join("kube-proxy.kubeconfig")},
        "conntrack": {"maxPerCore": 0},
    })
}

fn cni(network: &NodeNetwork) -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "husk",
        "plugins": [{
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": true,
            "hairpinMode": true,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": network.pods, "gateway": network.gateway}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }],
    })
}

fn containerd() -> String {
    format!(
        "version = 2\n\
         disabled_plugins = [\"io.containerd.internal.v1.opt\", \"io.containerd.nri.v1.nri\"]\n\
         [debug]\n  level = \"warn\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = \"{}\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\".cni]\n  bin_dir = \"/usr/lib/cni\"\n  \
         conf_dir = \"/etc/cni/net.d\"\n",
        images::PAUSE
    )
}
