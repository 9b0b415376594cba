//! KubeVirt's control plane: built from a checkout, installed by its operator, and run as processes.

use super::certificates::write_kubeconfig;
use super::daemon::Record;
use super::kubectl::Kubectl;
use super::network::HOST;
use super::{Programs, node};
use crate::checkout;
use crate::finish::finish;
use crate::progress::Progress;
use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Minor version that Husk's agent supports.
const VERSION: &str = "v1.9";
const NAMESPACE: &str = "kubevirt";
const PROGRAMS: [&str; 4] = ["virt-operator", "virt-api", "virt-controller", "virtctl"];
/// Registry in the names of KubeVirt's images. Nodes have one of them; nothing is pulled.
const REGISTRY: &str = "registry.example/kubevirt";
/// Port of virt-api.
const API_PORT: u16 = 8443;
/// Time limit of one step of the installation.
const STEP: Duration = Duration::from_secs(180);
/// Time limit for husk-agent to install Husk on a node, which restarts containerd, and to register the node.
const INSTALLATION: Duration = Duration::from_secs(600);

/// Image of the launcher pods.
pub fn launcher_image(version: &str) -> String {
    format!("{REGISTRY}/virt-launcher:{version}")
}

/// Version of the checkout `source`: its tag, or the nearest tag.
pub fn version(source: &Path) -> Result<String> {
    let describe = ["describe", "--tags", "--abbrev=0", "--match", "v*"];
    if let Ok(version) = git(source, &describe) {
        return Ok(version);
    }
    // A source archive has no tags.
    let file = std::fs::read_to_string(source.join("VERSION")).unwrap_or_default();
    let version = file.trim();
    ensure!(
        !version.is_empty(),
        "{} has neither a tag of KubeVirt's nor a file VERSION: check out a release, such as v1.9.0",
        source.display()
    );
    Ok(version.to_owned())
}

fn git(source: &Path, words: &[&str]) -> Result<String> {
    let said = finish(Command::new("git").arg("-C").arg(source).args(words))?;
    Ok(said.trim().to_owned())
}

/// Builds the programs from the checkout `source`, unless they are in the cache; returns their folder.
pub fn build(progress: &Progress, source: &Path) -> Result<PathBuf> {
    ensure!(
        source.join("cmd/virt-controller").is_dir(),
        "{} is not a checkout of KubeVirt",
        source.display()
    );
    let version = version(source)?;
    if !version.starts_with(VERSION) {
        bail!(
            "{} is KubeVirt {version}; husk-agent supports {VERSION}: check out a tag of it",
            source.display()
        );
    }
    let programs = checkout::cache()?
        .join("peers")
        .join(format!("kubevirt-{version}"));
    checkout::build_once(&programs, |aside| {
        let mut go = Command::new("go");
        go.args(["build", "-trimpath", "-buildvcs=false", "-ldflags"])
            .arg(format!(
                "-s -w -X kubevirt.io/client-go/version.gitVersion={version}"
            ))
            .arg("-o")
            .arg(aside)
            .args(PROGRAMS.map(|program| format!("./cmd/{program}")))
            .env("CGO_ENABLED", "0")
            .env("GOFLAGS", "-mod=vendor")
            .current_dir(source);
        progress.run(format!("building KubeVirt {version}"), &mut go)?;
        Ok(())
    })?;
    Ok(programs)
}

/// Installs KubeVirt by its operator, ends the operator, and starts virt-api and virt-controller.
pub fn install(
    progress: &Progress,
    folder: &Path,
    source: &Path,
    programs: &Programs,
    record: &mut Record,
    kubectl: &Kubectl,
) -> Result<()> {
    let version = version(source)?;
    let step = progress.step(format!("installing KubeVirt {version}"));
    let definition = source.join("manifests/generated/kv-resource.yaml");
    let definition = std::fs::read_to_string(&definition)
        .with_context(|| format!("cannot read {}", definition.display()))?;
    kubectl.apply(&definition)?;
    kubectl.until("the definition of KubeVirt", STEP, |kubectl| {
        kubectl
            .apply(&objects(&[namespace(), account(), custom_resource()]))
            .map(Some)
    })?;
    operate(folder, programs, &version, record, kubectl)?;
    let secrets = [
        "kubevirt-virt-api-certs",
        "kubevirt-virt-handler-certs",
        "kubevirt-controller-certs",
    ];
    for secret in secrets {
        save_secret(folder, kubectl, secret)?;
    }
    remove_unused(kubectl)?;
    record_version(kubectl, &version)?;
    for (name, account) in [
        ("virt-api", "kubevirt-apiserver"),
        ("virt-controller", "kubevirt-controller"),
    ] {
        let token = kubectl.run(&["-n", NAMESPACE, "create", "token", account, "--duration=24h"])?;
        write_kubeconfig(&folder.join("certificates"), name, json!({"token": token.trim()}))?;
    }
    serve_api(folder, programs, record, kubectl)?;
    let certificate = folder.join("certificates/kubevirt-controller-certs");
    let mut controller = kubevirt_program(folder, programs, "virt-controller");
    controller
        .args(["--port", "18182", "--launcher-image", &launcher_image(&version)])
        .args([
            "--exporter-image",
            &format!("{REGISTRY}/virt-exportserver:{version}"),
        ])
        .args([
            "--leader-elect-lease-duration",
            "120s",
            "--leader-elect-renew-deadline",
            "90s",
        ])
        .arg("--prom-cert-file")
        .arg(certificate.join("tls.crt"))
        .arg("--prom-key-file")
        .arg(certificate.join("tls.key"));
    record.start("virt-controller", &mut controller)?;
    step.done();
    Ok(())
}

fn objects(items: &[Value]) -> String {
    json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()
}

fn namespace() -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {
        "name": NAMESPACE,
        "labels": {"pod-security.kubernetes.io/enforce": "privileged"},
    }})
}

fn account() -> Value {
    json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {
        "name": "kubevirt-operator", "namespace": NAMESPACE,
    }})
}

fn custom_resource() -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": NAMESPACE},
        "spec": {
            "imagePullPolicy": "IfNotPresent",
            "configuration": {"imagePullPolicy": "IfNotPresent"},
        },
    })
}

/// Environment of the operator.
fn operator_environment(version: &str) -> Vec<(String, String)> {
    vec![
        (
            "VIRT_OPERATOR_IMAGE".to_owned(),
            format!("{REGISTRY}/virt-operator:{version}"),
        ),
        ("KUBEVIRT_VERSION".to_owned(), version.to_owned()),
        ("OPERATOR_NAMESPACE".to_owned(), NAMESPACE.to_owned()),
        ("POD_NAME".to_owned(), "virt-operator".to_owned()),
    ]
}

/// Runs the operator until it has installed everything but the programs, which it expects to run as pods.
fn operate(
    folder: &Path,
    programs: &Programs,
    version: &str,
    record: &mut Record,
    kubectl: &Kubectl,
) -> Result<()> {
    let mut operator = operator(folder, programs);
    operator
        .args(["--port", "18443"])
        .envs(operator_environment(version));
    record.start("virt-operator", &mut operator)?;
    // The operator starts a Job of itself to write what it installs. No node runs it.
    let environment = kubectl.until("the operator's Job", STEP, |kubectl| {
        record.check("virt-operator")?;
        let jobs = kubectl.get(&["jobs", "-n", NAMESPACE])?;
        let container = &jobs["items"][0]["spec"]["template"]["spec"]["containers"][0];
        Ok(container["env"].as_array().cloned())
    })?;
    let mut dump = self::operator(folder, programs);
    dump.arg("--dump-install-strategy");
    for variable in &environment {
        if let (Some(name), Some(value)) = (variable["name"].as_str(), variable["value"].as_str()) {
            dump.env(name, value);
        }
    }
    dump.env("OPERATOR_NAMESPACE", NAMESPACE);
    finish(&mut dump)?;
    kubectl.until("the operator's objects", STEP, |kubectl| {
        record.check("virt-operator")?;
        kubectl
            .get(&["deployment", "virt-api", "-n", NAMESPACE])
            .map(Some)
    })?;
    record.end_one("virt-operator")
}

fn operator(folder: &Path, programs: &Programs) -> Command {
    let mut command = Command::new(programs.kubevirt.join("virt-operator"));
    command
        .arg("--kubeconfig")
        .arg(folder.join("certificates/admin.kubeconfig"));
    command
}

/// A program that runs with the account whose kubeconfig has its name.
fn kubevirt_program(folder: &Path, programs: &Programs, name: &str) -> Command {
    let mut command = Command::new(programs.kubevirt.join(name));
    command
        .arg("--kubeconfig")
        .arg(folder.join(format!("certificates/{name}.kubeconfig")))
        .env("POD_NAMESPACE", NAMESPACE)
        .env("POD_NAME", name);
    command
}

/// Writes the files of a Secret to a folder of its name.
fn save_secret(folder: &Path, kubectl: &Kubectl, name: &str) -> Result<()> {
    let secret = kubectl.get(&["secret", name, "-n", NAMESPACE])?;
    let to = checkout::folder(folder.join("certificates").join(name))?;
    for (file, content) in secret["data"].as_object().into_iter().flatten() {
        let content = content.as_str().unwrap_or_default();
        let content = base64::engine::general_purpose::STANDARD.decode(content)?;
        std::fs::write(to.join(file), content)?;
    }
    Ok(())
}

/// Removes what would run KubeVirt's programs as pods, and webhooks of programs that do not run.
fn remove_unused(kubectl: &Kubectl) -> Result<()> {
    for kind in ["jobs", "deployments", "poddisruptionbudgets"] {
        kubectl.run(&["delete", kind, "--all", "-n", NAMESPACE, "--wait=false"])?;
    }
    for kind in ["validatingwebhookconfigurations", "mutatingwebhookconfigurations"] {
        let list = kubectl.get(&[kind])?;
        for item in list["items"].as_array().into_iter().flatten() {
            let hooks = item["webhooks"].as_array().into_iter().flatten();
            let of_api = hooks.filter(|hook| hook["clientConfig"]["service"]["name"] == "virt-api");
            if of_api.count() == 0 {
                let name = item["metadata"]["name"].as_str().context("no name")?;
                kubectl.run(&["delete", kind, name])?;
            }
        }
    }
    Ok(())
}

/// Records in the custom resource that KubeVirt is installed, which the operator does when its pods run.
fn record_version(kubectl: &Kubectl, version: &str) -> Result<()> {
    let status = json!({"status": {"phase": "Deployed", "observedKubeVirtVersion": version}});
    let patch = ["--subresource=status", "--type=merge", "-p", &status.to_string()];
    kubectl.run(&[&["patch", "kubevirt", "kubevirt", "-n", NAMESPACE], &patch[..]].concat())?;
    Ok(())
}

/// Starts virt-api, and makes this machine the endpoint of its Service.
fn serve_api(folder: &Path, programs: &Programs, record: &mut Record, kubectl: &Kubectl) -> Result<()> {
    let certificates = folder.join("certificates");
    let mut api = kubevirt_program(folder, programs, "virt-api");
    api.args(["--listen", HOST, "--port", &API_PORT.to_string()])
        .args(["--console-server-port", "8186"]);
    for (option, file) in [
        ("--tls-cert-file", "kubevirt-virt-api-certs/tls.crt"),
        ("--tls-key-file", "kubevirt-virt-api-certs/tls.key"),
        ("--handler-cert-file", "kubevirt-virt-handler-certs/tls.crt"),
        ("--handler-key-file", "kubevirt-virt-handler-certs/tls.key"),
    ] {
        api.arg(option).arg(certificates.join(file));
    }
    record.start("virt-api", &mut api)?;
    kubectl.run(&[
        "patch",
        "service",
        "virt-api",
        "-n",
        NAMESPACE,
        "--type=json",
        "-p",
        r#"[{"op": "remove", "path": "/spec/selector"}]"#,
    ])?;
    let service = kubectl.get(&["service", "virt-api", "-n", NAMESPACE])?;
    let port = &service["spec"]["ports"][0]["name"];
    kubectl.apply(
        &json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "virt-api-host",
                "namespace": NAMESPACE,
                "labels": {"kubernetes.io/service-name": "virt-api"},
            },
            "addressType": "IPv4",
            "ports": [{"name": port, "port": API_PORT}],
            "endpoints": [{"addresses": [HOST], "conditions": {"ready": true}}],
        })
        .to_string(),
    )?;
    kubectl.until("virt-api", STEP, |kubectl| {
        record.check("virt-api")?;
        let service = kubectl.get(&["apiservice", "v1.subresources.kubevirt.io"])?;
        let mut conditions = service["status"]["conditions"].as_array().into_iter().flatten();
        let available = conditions.any(|it| it["type"] == "Available" && it["status"] == "True");
        Ok(available.then_some(()))
    })
}

/// Labels the nodes and applies `deploy/`; waits until the nodes are schedulable for VMIs.
pub fn deploy_husk(progress: &Progress, kubectl: &Kubectl, nodes: u32) -> Result<()> {
    let step = progress.step("deploying husk-agent");
    let deploy = checkout::root().join("deploy");
    kubectl.run(&["apply", "-k", &deploy.display().to_string()])?;
    for number in 1..=nodes {
        let name = node::name(number);
        kubectl.until("the Node is registered", STEP, |kubectl| {
            kubectl
                .run(&["label", "--overwrite", "node", &name, "husk.io/node=true"])
                .map(Some)
        })?;
        kubectl.until("the node is schedulable for VMIs", INSTALLATION, |kubectl| {
            let node = kubectl.get(&["node", &name])?;
            let label = &node["metadata"]["labels"]["kubevirt.io/schedulable"];
            Ok((label == "true").then_some(()))
        })?;
    }
    step.done();
    Ok(())
}
