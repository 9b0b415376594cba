//! etcd, the API server, the controller manager and the scheduler.

use super::Programs;
use super::daemon::Record;
use super::kubectl::Kubectl;
use super::network::{HOST, PODS, SERVICES};
use crate::progress::Progress;
use anyhow::Result;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const ETCD: &str = "http://127.0.0.1:22379";
/// Time limit for the API server to be ready.
const READY: Duration = Duration::from_secs(90);

/// Starts the programs and waits until the API server is ready.
pub fn start(progress: &Progress, folder: &Path, programs: &Programs, record: &mut Record) -> Result<()> {
    let step = progress.step("starting the Kubernetes control plane");
    let certificates = folder.join("certificates");
    let peer = |name: &str| Command::new(programs.peers.join("kubernetes").join(name));
    record.start("etcd", &mut etcd(peer("server"), folder))?;
    record.start("kube-apiserver", &mut api_server(peer("kube-apiserver"), folder)?)?;
    let kubectl = Kubectl::new(folder);
    kubectl.until("the API server is ready", READY, |kubectl| {
        record.check("etcd")?;
        record.check("kube-apiserver")?;
        kubectl.run(&["get", "--raw", "/readyz"]).map(Some)
    })?;
    for name in ["kube-controller-manager", "kube-scheduler"] {
        let mut command = Command::new(programs.control_plane.join(name));
        command
            .arg("--kubeconfig")
            .arg(certificates.join("admin.kubeconfig"))
            // One of each runs. On a busy machine it would lose its lease now and then.
            .args(["--leader-elect=false", "--bind-address=127.0.0.1"]);
        if name == "kube-controller-manager" {
            command
                .args(["--controllers=*", &format!("--cluster-cidr={PODS}")])
                .arg(file("--root-ca-file", &certificates, "ca.crt"))
                .arg(file("--cluster-signing-cert-file", &certificates, "ca.crt"))
                .arg(file("--cluster-signing-key-file", &certificates, "ca.key"))
                .arg(file(
                    "--service-account-private-key-file",
                    &certificates,
                    "accounts.key",
                ));
        }
        record.start(name, &mut command)?;
    }
    step.done();
    Ok(())
}

/// The API server's log of requests, without their objects.
pub fn audit_log(folder: &Path) -> PathBuf {
    folder.join("logs/audit.log")
}

fn file(option: &str, folder: &Path, name: &str) -> String {
    format!("{option}={}", folder.join(name).display())
}

fn etcd(mut command: Command, folder: &Path) -> Command {
    command
        .arg("--data-dir")
        .arg(folder.join("etcd"))
        .args(["--unsafe-no-fsync", "--log-level", "warn"])
        .args(["--listen-client-urls", ETCD, "--advertise-client-urls", ETCD])
        .args(["--listen-peer-urls", "http://127.0.0.1:22380"]);
    command
}

fn api_server(mut command: Command, folder: &Path) -> Result<Command> {
    let certificates = folder.join("certificates");
    let policy = folder.join("audit.json");
    let rules = json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata", "omitManagedFields": true}],
    });
    std::fs::write(&policy, rules.to_string())?;
    let options = [
        ("--tls-cert-file", "api-server.crt"),
        ("--tls-private-key-file", "api-server.key"),
        ("--client-ca-file", "ca.crt"),
        ("--kubelet-certificate-authority", "ca.crt"),
        ("--kubelet-client-certificate", "admin.crt"),
        ("--kubelet-client-key", "admin.key"),
        ("--service-account-key-file", "accounts.pub"),
        ("--service-account-signing-key-file", "accounts.key"),
        ("--requestheader-client-ca-file", "front-proxy-ca.crt"),
        ("--proxy-client-cert-file", "front-proxy-client.crt"),
        ("--proxy-client-key-file", "front-proxy-client.key"),
    ];
    command
        .args(options.map(|(option, name)| file(option, &certificates, name)))
        .args(["--etcd-servers", ETCD, "--bind-address", HOST])
        .args(["--authorization-mode", "Node,RBAC", "--allow-privileged"])
        .args(["--service-account-issuer", "https://kubernetes.default.svc"])
        .args(["--service-cluster-ip-range", SERVICES])
        // No kube-proxy runs here, so it connects to the endpoints of aggregated APIs.
        .arg("--enable-aggregator-routing")
        .args(["--requestheader-allowed-names", "front-proxy-client"])
        .args(["--requestheader-username-headers", "X-Remote-User"])
        .args(["--requestheader-group-headers", "X-Remote-Group"])
        .args(["--requestheader-extra-headers-prefix", "X-Remote-Extra-"])
        // The nodes' names cannot be resolved.
        .args(["--kubelet-preferred-address-types", "InternalIP"])
        .arg("--audit-policy-file")
        .arg(policy)
        .arg("--audit-log-path")
        .arg(audit_log(folder));
    Ok(command)
}
