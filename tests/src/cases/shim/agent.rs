//! `husk-agent` beside a real API server and kubelet. The test plays virt-controller.

use super::kubelet::{LABEL, RUNTIME_CLASS};
use super::pod;
use crate::harness::Case;
use crate::harness::containerd::{BRIDGE, Version};
use crate::harness::context::{TestContext, expect_contains, program};
use crate::harness::kubernetes::{Cluster, NODE};
use crate::harness::manifest::Manifest;
use crate::harness::processes::kill;
use crate::harness::program::Session;
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "shim-agent",
    about: "husk-agent under an API server and a kubelet: admission policy, devices, labels, a VMI from start to deletion",
    limit: Duration::from_secs(900),
    run,
};

const ADMISSION: &str = include_str!("../../../../deploy/admission.yaml");
/// A pod that virt-controller 1.9.0 rendered: 256 MiB of guest memory, one vCPU.
const LAUNCHER_POD: &str = include_str!("../../../manifests/launcher-pod.json");
/// Name of the VMI and of its pod.
const VMI: &str = "testvmi";
const KIND: &str = "virtualmachineinstance";

fn run(ctx: &TestContext) -> Result<()> {
    let (containerd, _) = pod::node(ctx, Version::Newest)?;
    let cluster = Cluster::start(&containerd, LABEL)?;
    let c = &cluster;
    c.apply("class", RUNTIME_CLASS)?;
    ctx.part("admission", || admission(c));
    ctx.part("agent", || {
        let agent = Agent::start(ctx, c, "agent.log")?;
        node(c)?;
        let pod = scheduled(c)?;
        runs(ctx, c, &pod)?;
        agent.kill()?;
        let agent = Agent::start(ctx, c, "agent-2.log")?;
        deleted(ctx, c, &pod)?;
        agent.end()
    });
    cluster.end_empty(&containerd)?;
    Command::new("ip").args(["link", "delete", BRIDGE]).status()?;
    Ok(())
}

/// A launcher pod that was rendered for QEMU becomes one for Husk if its VMI asks for that.
fn admission(c: &Cluster<'_>) -> Result<()> {
    c.apply("admission", ADMISSION)?;
    let mut pod: Value = serde_json::from_str(LAUNCHER_POD)?;
    let metadata = pod["metadata"].as_object_mut().context("no metadata")?;
    metadata.remove("ownerReferences");
    let spec = pod["spec"].as_object_mut().context("no spec")?;
    // The recorded cluster had `defaultRuntimeClass`.
    spec.remove("runtimeClassName");
    spec.remove("overhead");
    let admitted = |change: &dyn Fn(&mut Value)| -> Result<Value> {
        let mut pod = pod.clone();
        change(&mut pod);
        let answer = c.create_dry("launcher", pod)?;
        Ok(serde_json::from_str(&answer)?)
    };
    let class = |pod: &Value| pod["spec"]["runtimeClassName"].as_str().map(str::to_owned);
    let request = |pod: &Value| pod["spec"]["containers"][0]["resources"]["requests"]["memory"].clone();
    // The API server takes a moment to know a policy.
    c.until("the policy", || Ok(class(&admitted(&|_| {})?).is_some()))?;

    let husk = admitted(&|_| {})?;
    ensure!(class(&husk).as_deref() == Some("husk"), "{husk}");
    ensure!(husk["spec"]["nodeSelector"]["husk.io/node"] == "true", "{husk}");
    ensure!(husk["spec"]["overhead"]["memory"] == "12Mi", "{husk}");
    let overhead = (256 << 20) / 512 + (1 << 20);
    let (requested, overhead) = (format!("{}", (256 << 20) + overhead), format!("{overhead}"));
    ensure!(request(&husk) == requested.as_str(), "{husk}");
    let annotation = &husk["metadata"]["annotations"]["kubevirt.io/memory-overhead-bytes"];
    ensure!(*annotation == overhead.as_str(), "{husk}");
    let console_log = &husk["spec"]["initContainers"][0]["resources"]["requests"]["memory"];
    ensure!(console_log == "1M", "{husk}");

    // What virt-controller did not derive stays.
    let limited = admitted(&|pod| {
        pod["spec"]["containers"][0]["resources"]["limits"]["memory"] = "600Mi".into();
    })?;
    let kept = admitted(&|pod| {
        pod["metadata"]["annotations"]["husk.io/keep-memory-request"] = "true".into();
    })?;
    let plain = admitted(&|pod| {
        let annotations = pod["metadata"]["annotations"].as_object_mut();
        annotations.map(|annotations| annotations.remove("kubevirt.io/memory-overhead-bytes"));
    })?;
    for pod in [limited, kept, plain] {
        ensure!(
            class(&pod).as_deref() == Some("husk") && request(&pod) == "524Mi",
            "{pod}"
        );
    }
    // A VMI that does not ask for Husk only keeps off Husk's nodes, by each of the terms.
    let not_husk = json!({"key": "husk.io/node", "operator": "DoesNotExist"});
    let zone = json!({"key": "zone", "operator": "In", "values": ["a"]});
    let name = json!({"key": "metadata.name", "operator": "In", "values": ["n"]});
    for (affinity, expected) in [
        (json!(null), json!([{"matchExpressions": [not_husk]}])),
        (
            json!({"podAffinity": {}}),
            json!([{"matchExpressions": [not_husk]}]),
        ),
        (
            json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchExpressions": [zone]}, {"matchFields": [name]}, {"matchExpressions": [not_husk]}, {},
            ]}}}),
            json!([
                {"matchExpressions": [zone, not_husk]},
                {"matchExpressions": [not_husk], "matchFields": [name]},
                {"matchExpressions": [not_husk]},
                {},
            ]),
        ),
    ] {
        let qemu = admitted(&|pod| {
            pod["metadata"]["labels"]["husk.io/runtime"] = "false".into();
            pod["spec"]["affinity"] = affinity.clone();
        })?;
        ensure!(class(&qemu).is_none() && request(&qemu) == "524Mi", "{qemu}");
        let required =
            &qemu["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
        ensure!(required["nodeSelectorTerms"] == expected, "{qemu}");
    }
    // A pod that has the class otherwise may run there.
    let by_setting = admitted(&|pod| {
        pod["metadata"]["labels"]["husk.io/runtime"] = "false".into();
        pod["spec"]["runtimeClassName"] = "husk".into();
    })?;
    ensure!(
        !by_setting["spec"]["affinity"].to_string().contains("husk.io"),
        "{by_setting}"
    );
    Ok(())
}

/// A running agent.
struct Agent<'a> {
    session: Session,
    cluster: &'a Cluster<'a>,
}

impl<'a> Agent<'a> {
    fn start(ctx: &TestContext, cluster: &'a Cluster<'a>, log: &str) -> Result<Self> {
        let mut command = Command::new(program("husk-agent"));
        // The node's containerd has the shim in another place than the agent's own installation.
        let versions = ctx.path("versions");
        std::fs::create_dir_all(versions.join("0.0.0"))?;
        std::fs::write(versions.join("0.0.0/containerd-shim-husk-v2"), "")?;
        command
            .arg("--runtime-dir")
            .arg(ctx.runtime_dir())
            .arg("--versions-dir")
            .arg(versions)
            .env("NODE_NAME", NODE)
            .env("KUBECONFIG", ctx.path("kubernetes/kubeconfig"));
        let session = Session::piped(command, &ctx.log(log))?;
        Ok(Self { session, cluster })
    }

    fn kill(self) -> Result<()> {
        kill(self.session.pid(), Signal::KILL)?;
        self.session.wait(Duration::from_secs(20))?;
        Ok(())
    }

    fn end(self) -> Result<()> {
        kill(self.session.pid(), Signal::TERM)?;
        let ended = self.session.wait(Duration::from_secs(20))?;
        ensure!(ended.status == 0, "the agent ended with {}", ended.status);
        let c = self.cluster;
        ensure!(schedulable(c)? == "false", "schedulable without an agent");
        c.until("no devices", || Ok(devices(c, "kvm")? == "0"))
    }
}

fn label(c: &Cluster<'_>, key: &str) -> Result<String> {
    c.field("node", NODE, &format!("{{.metadata.labels.{key}}}"))
}

fn schedulable(c: &Cluster<'_>) -> Result<String> {
    label(c, r"kubevirt\.io/schedulable")
}

fn devices(c: &Cluster<'_>, name: &str) -> Result<String> {
    let path = format!(r"{{.status.allocatable.devices\.kubevirt\.io/{name}}}");
    c.field("node", NODE, &path)
}

/// The node's agent: devices for the kubelet, heartbeat and labels for KubeVirt's control plane.
fn node(c: &Cluster<'_>) -> Result<()> {
    c.until("the devices", || {
        let all = ["kvm", "tun", "vhost-net"].map(|name| devices(c, name));
        Ok(all.into_iter().collect::<Result<Vec<_>>>()? == ["1k", "1k", "1k"])
    })?;
    // Without KubeVirt there are no VMIs to schedule.
    c.until("an event", || {
        Ok(c.events()?.contains("KubeVirt is not installed"))
    })?;
    ensure!(schedulable(c)? == "false", "schedulable without KubeVirt");
    c.apply("kubevirt-crd", definition("KubeVirt", "kubevirts"))?;
    c.until("the definition", || {
        let object = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": "default"},
            "status": {"phase": "Deployed", "observedKubeVirtVersion": "v1.9.0"},
        });
        Ok(c.apply("kubevirt", object).is_ok())
    })?;
    c.until("a schedulable node", || Ok(schedulable(c)? == "true"))?;
    ensure!(label(c, r"machine-type\.node\.kubevirt\.io/q35")? == "true");
    ensure!(label(c, r"cpu-vendor\.node\.kubevirt\.io/AMD")? == "true");
    let heartbeat = c.field("node", NODE, r"{.metadata.annotations.kubevirt\.io/heartbeat}")?;
    ensure!(heartbeat.ends_with('Z') && heartbeat.len() == 20, "{heartbeat}");

    let container = json!({
        "name": "probe",
        "image": "localhost/husk/busybox:1",
        "imagePullPolicy": "Never",
        "command": ["/bin/busybox", "test", "-c", "/dev/kvm"],
        "resources": {"limits": {"devices.kubevirt.io/kvm": "1"}},
    });
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe"},
        "spec": {
            "nodeName": NODE,
            "restartPolicy": "Never",
            "automountServiceAccountToken": false,
            "containers": [container],
        },
    });
    c.apply("probe", pod)?;
    c.until("the device in a pod", || {
        let phase = c.field("pod", "probe", "{.status.phase}")?;
        ensure!(phase != "Failed", "the pod has no /dev/kvm");
        Ok(phase == "Succeeded")
    })?;
    c.kubectl(&["delete", "pod", "probe"])?.ok()?;
    Ok(())
}

/// A VMI with a launcher pod that waits for it, as virt-controller leaves them to the agent. Returns the pod's UID.
fn scheduled(c: &Cluster<'_>) -> Result<String> {
    c.apply(
        "vmi-crd",
        definition("VirtualMachineInstance", "virtualmachineinstances"),
    )?;
    let manifest = Manifest::new(VMI)
        .memory("128Mi")
        .kernel_boot("net,button")
        .pod_interface(json!({"bridge": {}}));
    let mut vmi: Value = serde_json::from_str(&manifest.json())?;
    vmi["metadata"]["finalizers"] = json!(["kubevirt.io/foregroundDeleteVirtualMachine"]);
    vmi["status"] = json!({"phase": "Scheduling"});
    c.until("the definition of VMIs", || {
        Ok(c.apply("vmi", vmi.clone()).is_ok())
    })?;
    let uid = c.field(KIND, VMI, "{.metadata.uid}")?;
    c.apply("launcher", launcher_pod(&uid))?;
    c.until("the launcher", || {
        let path = "{.status.containerStatuses[0].state.running.startedAt}";
        Ok(!c.field("pod", VMI, path)?.is_empty())
    })?;
    let pod = c.field("pod", VMI, "{.metadata.uid}")?;
    let activated = json!({
        "metadata": {"labels": {"kubevirt.io/nodeName": NODE}},
        "status": {"phase": "Scheduled", "nodeName": NODE, "activePods": {pod.clone(): NODE}},
    });
    c.patch(KIND, VMI, &[], &activated)?;
    Ok(pod)
}

/// The agent starts the VM and reports it.
fn runs(ctx: &TestContext, c: &Cluster<'_>, pod: &str) -> Result<()> {
    let status = |path: &str| c.field(KIND, VMI, &format!("{{.status.{path}}}"));
    c.until("a running VMI", || Ok(status("phase")? == "Running"))?;
    let address = c.field("pod", VMI, "{.status.podIP}")?;
    ensure!(status("interfaces[0].ipAddress")? == address, "not {address}");
    ensure!(status("machine.type")? == "q35", "no machine type");
    let migratable = status("conditions[?(@.type==\"LiveMigratable\")].status")?;
    ensure!(migratable == "False", "LiveMigratable: {migratable}");
    c.until("an event", || {
        Ok(c.events()?.contains("VirtualMachineInstance started."))
    })?;
    c.until("the guest", || {
        let printed = std::fs::read_to_string(directory(ctx, pod).join("console.log"));
        Ok(printed.unwrap_or_default().contains("husk-button: ready"))
    })
}

/// A VMI that is deleted powers its guest off and is Succeeded. The agent has been restarted before.
fn deleted(ctx: &TestContext, c: &Cluster<'_>, pod: &str) -> Result<()> {
    let monitor = std::fs::read_to_string(directory(ctx, pod).join("monitor.pid"))?;
    ensure!(
        c.field(KIND, VMI, "{.status.phase}")? == "Running"
            && Path::new("/proc").join(monitor.trim()).exists(),
        "the VM did not survive its agent"
    );
    c.kubectl(&["delete", KIND, VMI, "--wait=false"])?.ok()?;
    c.until("the end", || {
        Ok(c.field(KIND, VMI, "{.status.phase}")? == "Succeeded")
    })?;
    expect_contains(
        &c.events()?,
        &[
            "Signaled Graceful Shutdown",
            "The VirtualMachineInstance was shut down.",
        ],
    )?;
    c.kubectl(&["delete", "pod", VMI, "--wait=true"])?.ok()?;
    c.release(KIND, VMI)?;
    c.until("no record of the pod", || {
        // Fails while there is a record in it.
        Ok(std::fs::remove_dir(ctx.runtime_dir().join(".ended")).is_ok())
    })
}

/// Husk's directory of a pod.
fn directory(ctx: &TestContext, pod: &str) -> PathBuf {
    ctx.runtime_dir().join("pods").join(pod)
}

/// A launcher pod of the VMI `uid`, with the kernel as an image volume.
fn launcher_pod(uid: &str) -> Value {
    let launcher = [
        "/usr/bin/virt-launcher-monitor",
        "--qemu-timeout",
        "240s",
        "--name",
        VMI,
        "--uid",
        uid,
        "--namespace",
        "default",
        "--grace-period-seconds",
        "45",
    ];
    let devices = json!({"devices.kubevirt.io/kvm": "1", "devices.kubevirt.io/tun": "1"});
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": VMI},
        "spec": {
            "runtimeClassName": "husk",
            "nodeName": NODE,
            "automountServiceAccountToken": false,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 60,
            "containers": [{
                "name": "compute", "image": "localhost/husk/vm:1", "imagePullPolicy": "Never", "command": launcher,
                "resources": {"limits": devices},
                "volumeMounts": [{"name": "kernel", "mountPath": "/var/run/kubevirt-kernel-boot"}],
            }],
            "volumes": [
                {"name": "kernel", "image": {"reference": "localhost/husk/kernel:1", "pullPolicy": "Never"}},
            ],
        },
    })
}

/// A definition of one of KubeVirt's kinds that accepts any fields.
fn definition(kind: &str, plural: &str) -> Value {
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.kubevirt.io")},
        "spec": {
            "group": "kubevirt.io",
            "names": {"kind": kind, "plural": plural, "singular": kind.to_lowercase()},
            "scope": "Namespaced",
            "versions": [{
                "name": "v1",
                "served": true,
                "storage": true,
                "schema": {"openAPIV3Schema": schema},
            }],
        },
    })
}
