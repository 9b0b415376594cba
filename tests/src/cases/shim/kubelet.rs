//! Pods of a real cluster, which users create with `kubectl` and a kubelet runs.

use super::ctr::LoopDevice;
use super::pod::{MEMORY, node, stats_are_those_of};
use crate::cases::network::guest as network;
use crate::harness::Case;
use crate::harness::containerd::leftovers::called;
use crate::harness::containerd::{BRIDGE, Version};
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::guest::Shell;
use crate::harness::kubernetes::{Cluster, NODE};
use crate::harness::manifest::Manifest;
use crate::harness::processes::kill;
use crate::harness::program::Session;
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "shim-kubelet",
    about: "kubectl, an API server and a kubelet: RuntimeClass, a block claim, a config map, logs, attach, stats, restart, delete",
    limit: Duration::from_secs(600),
    run,
};

pub const RUNTIME_CLASS: &str = include_str!("../../../../deploy/runtimeclass.yaml");
/// Node selector of the RuntimeClass.
pub const LABEL: &str = "husk.io/node=true";
const COMPUTE: &str = "{.status.containerStatuses[?(@.name==\"compute\")]";
/// Finalizer that keeps the API object of a deleted pod until the test has checked its end.
const FINALIZER: &str = "husk.io/e2e";
const CONTENT: &str = "of-the-config-map";

fn run(ctx: &TestContext) -> Result<()> {
    let (containerd, _) = node(ctx, Version::Newest)?;
    let claim = LoopDevice::new(ctx, "claim.img", 64)?;
    let cluster = Cluster::start(&containerd, LABEL)?;
    let c = &cluster;
    cluster.apply("class", RUNTIME_CLASS)?;
    cluster.apply("volumes", volumes(&claim.0))?;
    cluster.bind("data", "data")?;
    cluster.apply("guest", pod("guest", "disks,net,button,shell"))?;
    running(c, "guest")?;
    let attach = ["attach", "-it", "guest", "-c", "compute"];
    let attached = Session::on_terminal(c.kubectl_command(&attach), &ctx.log("attach.log"))?;
    attached.send("\n")?;
    let shell = Shell::small_on(&attached)?;
    ctx.part("class", || {
        let overhead = c.field("pod", "guest", "{.spec.overhead.memory}")?;
        ensure!(overhead == "12Mi", "the overhead is {overhead}");
        Ok(())
    });
    ctx.part("address", || {
        let address = c.field("pod", "guest", "{.status.podIP}")?;
        network::configured(&shell)?.is("ip", &address)
    });
    ctx.part("claim", || {
        shell.ok("echo written-by-the-guest | dd of=/dev/vda conv=fsync")?;
        let found = std::fs::read(&claim.0)?;
        expect_contains(&String::from_utf8_lossy(&found[..64]), &["written-by-the-guest"])
    });
    ctx.part("config-map", || {
        shell.expect_contains(&format!("grep -a -o {CONTENT} /dev/vdb | head -1"), &[CONTENT])
    });
    ctx.part("logs", || {
        c.kubectl(&["logs", "guest", "-c", "compute"])?
            .says(&["Linux version 6.12", "HUSK-USERSPACE"])
    });
    ctx.part("stats", || stats(c));
    drop(attached);
    ctx.part("restart", || {
        let vmms = called("husk-vmm")?;
        ensure!(vmms.len() == 1, "not one VM: {vmms:?}");
        kill(vmms[0].pid, Signal::KILL)?;
        let count = format!("{COMPUTE}.restartCount}}");
        c.until("the VM again", || Ok(c.field("pod", "guest", &count)? == "1"))?;
        let ended = c.field(
            "pod",
            "guest",
            &format!("{COMPUTE}.lastState.terminated.exitCode}}"),
        )?;
        ensure!(ended == "137", "a killed VMM is exit status {ended}");
        ready_for_the_button(c, "guest")
    });
    ctx.part("delete", || {
        c.kubectl(&["delete", "pod", "guest", "--wait=false"])?.ok()?;
        let path = format!("{COMPUTE}.state.terminated.exitCode}}");
        c.until("the end", || Ok(!c.field("pod", "guest", &path)?.is_empty()))?;
        let status = c.field("pod", "guest", &path)?;
        c.release("pod", "guest")?;
        ensure!(status == "0", "the guest did not power off: {status}");
        c.until("the pod gone", || {
            Ok(c.kubectl(&["get", "pod", "guest"])?.status != 0)
        })
    });
    ctx.part("read-only claim", || {
        let mut pod = pod("read-only", "button");
        pod["spec"]["volumes"][0]["persistentVolumeClaim"]["readOnly"] = json!(true);
        refused(c, &pod, "compute", "volume \"data\" is read-only in the pod")
    });
    ctx.part("refused", || {
        let mut pod = pod("sidecar", "button");
        let helper = json!({"name": "helper", "image": "localhost/husk/busybox:1", "imagePullPolicy": "Never", "command": ["sleep", "60"]});
        pod["spec"]["containers"] = json!([helper]);
        refused(c, &pod, "helper", "cannot run: a pod of the runtime class husk is a VM")
    });
    cluster.end_empty(&containerd)?;
    Command::new("ip").args(["link", "delete", BRIDGE]).status()?;
    Ok(())
}

/// Applies a pod whose `container` cannot be made, and waits for the reason, which contains `why`.
fn refused(c: &Cluster<'_>, pod: &Value, container: &str, why: &str) -> Result<()> {
    let name = pod["metadata"]["name"].as_str().context("no name")?;
    let state = format!("{{.status.containerStatuses[?(@.name==\"{container}\")].state");
    let path = format!("{state}.waiting.message}}{state}.terminated.message}}");
    c.apply(name, pod.clone())?;
    c.until("the reason", || Ok(c.field("pod", name, &path)?.contains(why)))
        .with_context(|| format!("{:?}", c.field("pod", name, &path)))?;
    c.release("pod", name)?;
    c.kubectl(&["delete", "pod", name])?.ok()?;
    Ok(())
}

/// A VM with the claim `data` and the config map `conf`.
fn pod(name: &str, words: &str) -> Value {
    let manifest = Manifest::new(name)
        .memory("128Mi")
        .kernel_boot(words)
        .pod_interface(json!({"bridge": {}}))
        .disk("data", json!({"persistentVolumeClaim": {"claimName": "data"}}))
        .disk("conf", json!({"configMap": {"name": "conf"}}));
    let image = |image: &str| format!("localhost/husk/{image}:1");
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": {"husk.io/vmi": manifest.json()}, "finalizers": [FINALIZER]},
        "spec": {
            "runtimeClassName": "husk",
            // There is no scheduler.
            "nodeName": NODE,
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 60,
            "containers": [
                {"name": "volumekernel-boot-volume", "image": image("kernel"), "imagePullPolicy": "Never"},
                {
                    "name": "compute", "image": image("vm"), "imagePullPolicy": "Never", "stdin": true, "tty": true,
                    "resources": {"limits": {"memory": MEMORY.to_string()}},
                    "volumeDevices": [{"name": "data", "devicePath": "/dev/data"}],
                    "volumeMounts": [{"name": "conf", "mountPath": "/var/run/kubevirt-private/config-map/conf"}],
                },
            ],
            "volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
                {"name": "conf", "configMap": {"name": "conf"}},
            ],
        },
    })
}

/// A claim of the whole of `device`, and a config map.
fn volumes(device: &Path) -> Value {
    let size = json!({"storage": "64Mi"});
    let of_the_node = json!({"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]});
    json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "conf"}, "data": {"key": CONTENT}},
        {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "data"},
            "spec": {
                "capacity": size, "accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "storageClassName": "local",
                "local": {"path": device},
                "claimRef": {"name": "data", "namespace": "default"},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [of_the_node]}]}},
            },
        },
        {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "storageClassName": "local",
                "volumeName": "data", "resources": {"requests": size},
            },
        },
    ]})
}

fn running(c: &Cluster<'_>, pod: &str) -> Result<()> {
    let ready = format!("{COMPUTE}.ready}}");
    c.until("the pod", || Ok(c.field("pod", pod, &ready)? == "true"))
}

/// Waits until the guest handles its power button.
fn ready_for_the_button(c: &Cluster<'_>, pod: &str) -> Result<()> {
    c.until("the guest", || {
        let logs = c.kubectl(&["logs", pod, "-c", "compute"])?.text;
        Ok(logs.contains("husk-button: ready"))
    })
}

/// The kubelet's statistics of the VM, for `kubectl top`, agree with its cgroup.
fn stats(c: &Cluster<'_>) -> Result<()> {
    let id = c.field("pod", "guest", &format!("{COMPUTE}.containerID}}"))?;
    let id = id.rsplit('/').next().context("no container")?.to_owned();
    let vmms = called("husk-vmm")?;
    let vmm = vmms.first().context("no VMM")?.pid;
    let own = std::fs::read_to_string(format!("/proc/{vmm}/cgroup"))?;
    expect_contains(&own, &["/kubepods/", &id])?;
    let cgroup = Path::new("/sys/fs/cgroup").join(own.trim().trim_start_matches("0::/"));
    // The metrics server reads this for `kubectl top`.
    let path = format!("/api/v1/nodes/{NODE}/proxy/metrics/resource");
    stats_are_those_of(&cgroup, || {
        let metrics = c.kubectl(&["get", "--raw", &path])?.ok()?;
        let metric = |name: &str| -> Result<f64> {
            let wanted = format!("{name}{{container=\"compute\"");
            let line = metrics.lines().find(|line| line.starts_with(&wanted));
            let value = line.and_then(|line| line.split("} ").nth(1)?.split(' ').next());
            Ok(value
                .with_context(|| format!("no {name} of the VM in {metrics}"))?
                .parse()?)
        };
        let nanoseconds = metric("container_cpu_usage_seconds_total")? * 1e9;
        let bytes = metric("container_memory_working_set_bytes")?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "5 % are allowed"
        )]
        Ok((nanoseconds as u64, bytes as u64))
    })
}
