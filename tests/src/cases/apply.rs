//! VMs that are applied and kept running by systemd.

use crate::harness::applied::{husk, removed, status, trust, until_status};
use crate::harness::context::{CommandResult, TestContext, expect_contains};
use crate::harness::guest::Shell;
use crate::harness::program::Session;
use crate::harness::registry::{self, DISK, MARK, serve_web, sh};
use crate::harness::vm::console;
use crate::harness::{Case, until};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::process::Command;
use std::time::Duration;

pub const LIFE: Case = Case {
    name: "apply",
    about: "husk apply: whole manifests with a registry and a web server; a VM changes live, restarts, and goes with its data",
    limit: Duration::from_secs(600),
    run: |ctx| with_servers(ctx, &[("refusals", refusals), ("life", life)]),
};

pub const ENDS: Case = Case {
    name: "apply-ends",
    about: "run strategies of applied VMs, and what is missing, broken or refused",
    limit: Duration::from_secs(900),
    run: |ctx| {
        with_servers(
            ctx,
            &[
                ("restarts", restarts),
                ("run strategies", run_strategies),
                ("failures", failures),
            ],
        )
    },
};

type Part = (&'static str, fn(&TestContext) -> Result<()>);

/// Where the files of a DataVolume are served.
const WEB: &str = "127.0.0.1:8088";
/// Beginning of the disk on the web server.
const WEB_MARK: &str = "husk-disk-of-the-web";

/// Runs parts of a case beside a registry and a web server, and looks for what is left.
fn with_servers(ctx: &TestContext, parts: &[Part]) -> Result<()> {
    ctx.needs_root()?;
    let registry = registry::start(ctx)?;
    registry::fill(ctx)?;
    trust(ctx)?;
    let web = serve(ctx)?;
    for (name, part) in parts {
        ctx.part(name, || part(ctx));
    }
    ctx.part("removal", || removal(ctx));
    drop((registry, web));
    Ok(())
}

/// A web server with a disk, as raw data packed by gzip.
fn serve(ctx: &TestContext) -> Result<Session> {
    sh(
        ctx,
        &format!(
            "mkdir web; echo {WEB_MARK} > web/disk.img; truncate -s 24M web/disk.img; gzip web/disk.img"
        ),
    )?;
    serve_web(ctx, WEB)
}

/// Applies objects, which are written to the file `name`.
fn apply(ctx: &TestContext, name: &str, objects: &[Value]) -> Result<CommandResult> {
    let text: Vec<String> = objects.iter().map(|object| format!("---\n{object}\n")).collect();
    std::fs::write(ctx.path(name), text.concat())?;
    husk(ctx, &["apply", "-f", name])
}

/// The template of a VM that boots the small image of the registry, which starts a shell.
fn template() -> Value {
    json!({
        "spec": {
            "terminationGracePeriodSeconds": 20,
            "domain": {
                "memory": {"guest": "192Mi"},
                "devices": {"autoattachPodInterface": false, "disks": []},
                "firmware": registry::firmware("disks,button,shell"),
            },
            "volumes": [],
        },
    })
}

fn vm(name: &str, strategy: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": name},
        "spec": {"runStrategy": strategy, "template": template()},
    })
}

/// Adds a disk on bus virtio, with the volume source `source`.
fn add_disk(vm: &mut Value, name: &str, mut source: Value) {
    let spec = &mut vm["spec"]["template"]["spec"];
    let push = |list: &mut Value, item| {
        if let Some(list) = list.as_array_mut() {
            list.push(item);
        }
    };
    push(
        &mut spec["domain"]["devices"]["disks"],
        json!({"name": name, "disk": {"bus": "virtio"}}),
    );
    source["name"] = json!(name);
    push(&mut spec["volumes"], source);
}

/// The VM of the case `life`, with a volume of each kind.
fn whole_vm() -> Value {
    let mut vm = vm("whole", "Always");
    for (name, source) in [
        ("image", json!({"containerDisk": {"image": DISK}})),
        ("data", json!({"persistentVolumeClaim": {"claimName": "data"}})),
        ("web", json!({"dataVolume": {"name": "whole-web"}})),
        ("settings", json!({"configMap": {"name": "settings"}})),
        ("key", json!({"secret": {"secretName": "key"}})),
    ] {
        add_disk(&mut vm, name, source);
    }
    vm["spec"]["instancetype"] = json!({"name": "two"});
    vm["spec"]["template"]["spec"]["domain"]["memory"].take();
    vm["spec"]["dataVolumeTemplates"] = json!([{
        "metadata": {"name": "whole-web"},
        "spec": {
            "source": {"http": {"url": format!("http://{WEB}/disk.img.gz")}},
            "storage": {"resources": {"requests": {"storage": "32Mi"}}},
        },
    }]);
    vm
}

/// What the VM needs.
fn objects() -> Vec<Value> {
    vec![
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key"}, "stringData": {"password": "secret-of-a-vm"}}),
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"motd": "settings-of-a-vm"}}),
        json!({
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data"},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "16Mi"}}},
        }),
        json!({
            "apiVersion": "instancetype.kubevirt.io/v1beta1",
            "kind": "VirtualMachineClusterInstancetype",
            "metadata": {"name": "two"},
            "spec": {"cpu": {"guest": 2}, "memory": {"guest": "224Mi"}},
        }),
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": {}}),
    ]
}

/// A property of the unit of a VM.
fn unit(name: &str, property: &str) -> Result<String> {
    let output = Command::new("systemctl")
        .args([
            "show",
            "--value",
            "--property",
            property,
            &format!("husk@default:{name}.service"),
        ])
        .output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn refusals(ctx: &TestContext) -> Result<()> {
    let mut wrong = vm("wrong", "Sometimes");
    apply(ctx, "wrong.yaml", &[objects()[0].clone(), wrong.clone()])?.fails_with(2, &["spec.runStrategy"])?;
    wrong["spec"]["runStrategy"] = json!("Always");
    wrong["spec"]["template"]["spec"]["domain"]["cpu"] = json!({"cores": 9999});
    apply(ctx, "wrong.yaml", &[wrong])?.fails(2)?;
    // Nothing was stored, not even the Secret of the same file.
    husk(ctx, &["get", "secret"])?.says(&["No resources found"])?;
    husk(ctx, &["get", "vm", "wrong"])?.fails(1)?;
    husk(ctx, &["get", "pods"])?.fails_with(2, &["there are no objects of the kind \"pods\""])?;
    husk(ctx, &["delete", "vm", "wrong"])?.fails(1)?;
    husk(ctx, &["delete", "vm", "wrong", "--ignore-not-found"])?.ok()?;
    Ok(())
}

fn life(ctx: &TestContext) -> Result<()> {
    std::fs::create_dir(ctx.path("manifests"))?;
    apply(ctx, "manifests/objects.yaml", &objects())?.ok()?;
    std::fs::write(ctx.path("manifests/vm.json"), whole_vm().to_string())?;
    husk(ctx, &["apply", "-f", "manifests"])?.says(&[
        "warning: manifests/objects.yaml: web: Service web is ignored",
        "secret/key unchanged",
        "persistentvolumeclaim/data unchanged",
        "virtualmachine.kubevirt.io/whole created",
        "datavolume.cdi.kubevirt.io/whole-web created",
        "whole: running",
    ])?;
    husk(ctx, &["apply", "-f", "manifests"])?.says(&["virtualmachine.kubevirt.io/whole unchanged"])?;
    husk(ctx, &["diff", "-f", "manifests"])?.ok()?;
    ensure!(
        unit("whole", "ActiveState")? == "active" && unit("whole", "UnitFileState")? == "enabled",
        "the unit"
    );
    husk(ctx, &["get", "vm"])?.says(&["NAME   AGE", "whole", "Running  True"])?;
    husk(ctx, &["get", "dv"])?.says(&["whole-web", "Succeeded", "100.0%"])?;
    husk(ctx, &["get", "pvc"])?.says(&["data", "whole-web", "Bound", "32Mi"])?;
    {
        let console = console(ctx, "whole")?;
        console.send("\n")?;
        let shell = Shell::small_on(&console)?;
        shell.expect_contains("head -n 1 /dev/vda", &[MARK])?;
        shell.expect_contains("cat /sys/block/vdb/size", &["32768"])?;
        shell.expect_contains(
            "head -n 1 /dev/vdc; cat /sys/block/vdc/size",
            &[WEB_MARK, "65536"],
        )?;
        shell.expect_contains(
            "strings /dev/vdd /dev/vde || cat /dev/vdd /dev/vde",
            &["settings-of-a-vm", "secret-of-a-vm"],
        )?;
        shell.expect_contains("grep -c ^processor /proc/cpuinfo", &["2"])?;
        shell.ok("echo kept | dd of=/dev/vdb conv=fsync status=none")?;
    }
    changes(ctx)?;
    stop_and_start(ctx)?;
    husk(ctx, &["delete", "dv", "whole-web"])?.fails_with(1, &["a running VM uses the volume whole-web"])?;
    let deleted = husk(ctx, &["delete", "vm", "whole"])?.ok()?;
    expect_contains(&deleted, &["virtualmachine.kubevirt.io/whole deleted"])?;
    let left = husk(ctx, &["get", "pvc", "-o", "name"])?.ok()?;
    ensure!(left == "data\nplugged\n", "{left}");
    ensure!(
        unit("whole", "LoadState")? != "masked" && unit("whole", "ActiveState")? == "inactive",
        "the unit"
    );
    ctx.nothing_left(Duration::from_secs(10))
}

/// A volume is plugged while the VM runs; more memory needs a restart.
fn changes(ctx: &TestContext) -> Result<()> {
    let pid = unit("whole", "MainPID")?;
    let mut changed = whole_vm();
    let spec = &mut changed["spec"]["template"]["spec"];
    if let Some(volumes) = spec["volumes"].as_array_mut() {
        volumes.push(json!({"name": "plugged", "persistentVolumeClaim": {"claimName": "plugged", "hotpluggable": true}}));
    }
    if let Some(disks) = spec["domain"]["devices"]["disks"].as_array_mut() {
        disks.push(json!({"name": "plugged", "disk": {"bus": "scsi"}}));
    }
    husk(ctx, &["volume", "create", "plugged", "--size", "8Mi"])?.ok()?;
    std::fs::write(ctx.path("manifests/vm.json"), changed.to_string())?;
    husk(ctx, &["diff", "-f", "manifests"])?.fails_with(1, &["+            name: plugged"])?;
    husk(ctx, &["apply", "-f", "manifests"])?.says(&[
        "virtualmachine.kubevirt.io/whole configured",
        "whole: added volume plugged",
    ])?;
    changed["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = json!(10);
    changed["spec"]["template"]["spec"]["hostname"] = json!("renamed");
    std::fs::write(ctx.path("manifests/vm.json"), changed.to_string())?;
    husk(ctx, &["apply", "-f", "manifests"])?
        .says(&["the change takes effect at the next start: `husk restart whole`"])?;
    ensure!(unit("whole", "MainPID")? == pid, "the VM was restarted");
    let restarted = husk(ctx, &["restart", "whole"])?.ok()?;
    expect_contains(&restarted, &["whole: running"])?;
    ensure!(unit("whole", "MainPID")? != pid, "the VM was not restarted");
    let plan = ctx.json(&["inspect", "whole", "-o", "json"])?;
    ensure!(plan["plan"]["hostname"] == "renamed", "{plan}");
    Ok(())
}

fn stop_and_start(ctx: &TestContext) -> Result<()> {
    husk(ctx, &["stop", "whole"])?.says(&["whole: stopped"])?;
    ensure!(
        status(ctx, "whole")?["runStrategy"] == "Halted",
        "the run strategy"
    );
    until_status(ctx, "whole", "Stopped")?;
    ensure!(
        unit("whole", "UnitFileState")? == "disabled",
        "it would start at boot"
    );
    husk(ctx, &["start", "whole"])?.says(&["whole: running"])?;
    let console = console(ctx, "whole")?;
    let shell = Shell::small_on(&console)?;
    shell.expect_contains("head -n 1 /dev/vdb", &["kept"])?;
    Ok(())
}

/// A guest that powers off starts again, and a monitor that is killed too.
fn restarts(ctx: &TestContext) -> Result<()> {
    apply(ctx, "vm.yaml", &[vm("again", "Always")])?.ok()?;
    let again = |how: &dyn Fn() -> Result<()>| {
        let vmm = ctx.json(&["inspect", "again", "-o", "json"])?["vmmPid"].clone();
        how()?;
        until(|| {
            let shown = ctx.run(&["inspect", "again", "-o", "json"])?;
            Ok(shown.status == 0 && !shown.text.contains(&format!("\"vmmPid\": {vmm}")))
        })?;
        until_status(ctx, "again", "Running")
    };
    {
        let console = console(ctx, "again")?;
        let shell = Shell::small_on(&console)?;
        again(&|| shell.send("poweroff -f")).context("after a power-off")?;
    }
    let pid = unit("again", "MainPID")?;
    again(&|| sh(ctx, &format!("kill -9 {pid}")).map(drop)).context("after a kill")?;
    husk(ctx, &["delete", "-f", "vm.yaml"])?.ok()?;
    ctx.nothing_left(Duration::from_secs(10))
}

fn run_strategies(ctx: &TestContext) -> Result<()> {
    for (strategy, after_off, after_kill) in [
        ("RerunOnFailure", "Stopped", "Running"),
        ("Once", "Stopped", "Stopped"),
    ] {
        let name = strategy.to_ascii_lowercase();
        apply(ctx, "vm.yaml", &[vm(&name, strategy)])?.says(&[&format!("{name}: running")])?;
        {
            let vmm = ctx.json(&["inspect", &name, "-o", "json"])?["vmmPid"].clone();
            sh(ctx, &format!("kill -9 {vmm}"))?;
            until(|| {
                Ok(!ctx
                    .run(&["inspect", &name, "-o", "json"])?
                    .text
                    .contains(&format!("\"vmmPid\": {vmm},")))
            })?;
            until_status(ctx, &name, after_kill)?;
        }
        if after_kill == "Running" {
            let console = console(ctx, &name)?;
            Shell::small_on(&console)?.send("poweroff -f")?;
            until_status(ctx, &name, after_off)?;
            ensure!(
                unit(&name, "UnitFileState")? == "disabled",
                "it would start at boot"
            );
        }
        if strategy == "Once" {
            // systemd starts a process again that was killed. The VM is not to run a second time.
            husk(ctx, &["start", &name])?.ok()?;
            let pid = unit(&name, "MainPID")?;
            sh(ctx, &format!("kill -9 {pid}"))?;
            until(|| Ok(unit(&name, "NRestarts")? == "1" && unit(&name, "ActiveState")? == "failed"))
                .context("its process was not started and refused")?;
            until_status(ctx, &name, "Stopped")?;
        }
        // Applied again, it stays as its guest has left it.
        apply(ctx, "vm.yaml", &[vm(&name, strategy)])?.ok()?;
        ensure!(
            status(ctx, &name)?["printableStatus"] == "Stopped",
            "{name} was started again"
        );
        husk(ctx, &["delete", "-f", "vm.yaml"])?.ok()?;
    }
    apply(ctx, "vm.yaml", &[vm("manual", "Manual")])?.says(&["manual created"])?;
    until_status(ctx, "manual", "Stopped")?;
    husk(ctx, &["start", "manual"])?.ok()?;
    husk(ctx, &["stop", "--force", "manual"])?.says(&["manual: stopped"])?;
    let removed = husk(ctx, &["start", "manual"]).and_then(|_| husk(ctx, &["rm", "manual"]))?;
    removed.fails_with(2, &["is a VM of `husk apply`: `husk stop manual`"])?;
    let changed = vm("manual", "Halted");
    apply(ctx, "vm.yaml", &[changed])?.says(&["manual: stopped"])?;
    husk(ctx, &["delete", "vm", "manual"])?.ok()?;
    ctx.nothing_left(Duration::from_secs(10))
}

fn failures(ctx: &TestContext) -> Result<()> {
    let mut lost = vm("lost", "Always");
    add_disk(
        &mut lost,
        "data",
        json!({"persistentVolumeClaim": {"claimName": "none"}}),
    );
    apply(ctx, "vm.yaml", &[lost])?.fails_with(
        1,
        &["error: lost: ErrorPvcNotFound: PVC none not found: apply it"],
    )?;
    until_status(ctx, "lost", "ErrorPvcNotFound")?;
    // The claim is made meanwhile, and a change of the object starts the VM at once.
    husk(ctx, &["volume", "create", "none", "--size", "1Mi"])?.ok()?;
    husk(ctx, &["restart", "lost"])?.ok()?;
    husk(ctx, &["delete", "vm", "lost"])?.ok()?;
    husk(ctx, &["delete", "pvc", "none"])?.ok()?;

    let mut unknown = vm("unknown", "Always");
    add_disk(
        &mut unknown,
        "image",
        json!({"containerDisk": {"image": "localhost:5443/disks/none:1"}}),
    );
    apply(ctx, "vm.yaml", &[unknown])?.fails_with(
        1,
        &[
            "error: unknown: ErrImagePull: image localhost:5443/disks/none:1: ",
            "no such image",
        ],
    )?;
    husk(ctx, &["delete", "vm", "unknown"])?.ok()?;

    // A file that a person has broken costs that VM alone.
    apply(ctx, "good.yaml", &[vm("good", "Always")])?.ok()?;
    apply(ctx, "vm.yaml", &[vm("broken", "Halted")])?.ok()?;
    sh(
        ctx,
        "sed -i s/Halted/Sometimes/ data/objects/default/virtualmachine/broken.yaml",
    )?;
    husk(ctx, &["get", "vm"])?.says(&["broken.yaml: ", "spec.runStrategy", "good", "Running"])?;
    husk(ctx, &["start", "broken"])?.fails_with(1, &["broken.yaml: ", "Sometimes"])?;
    husk(ctx, &["delete", "vm", "good", "broken"])?.ok()?;

    let data = |url: String| {
        json!({
            "apiVersion": "cdi.kubevirt.io/v1beta1",
            "kind": "DataVolume",
            "metadata": {"name": "alone"},
            "spec": {
                "source": {"http": {"url": url}},
                "storage": {"resources": {"requests": {"storage": "32Mi"}}},
            },
        })
    };
    apply(ctx, "dv.yaml", &[data(format!("http://{WEB}/none.img"))])?
        .fails_with(1, &["error: alone: ", "404"])?;
    husk(ctx, &["get", "dv"])?.says(&["alone", "Failed"])?;
    apply(ctx, "dv.yaml", &[data(format!("http://{WEB}/disk.img.gz"))])?
        .says(&["configured", "alone: the volume is filled"])?;
    husk(ctx, &["delete", "-f", "dv.yaml"])?.ok()?;

    // The same by the template of a VM.
    let templated = |url: String| {
        let mut vm = vm("templated", "Halted");
        let mut template = data(url);
        template["metadata"]["name"] = json!("templated-data");
        vm["spec"]["dataVolumeTemplates"] =
            json!([{"metadata": template["metadata"], "spec": template["spec"]}]);
        add_disk(&mut vm, "data", json!({"dataVolume": {"name": "templated-data"}}));
        vm
    };
    apply(ctx, "vm.yaml", &[templated(format!("http://{WEB}/none.img"))])?
        .fails_with(1, &["error: templated-data: ", "404"])?;
    apply(ctx, "vm.yaml", &[templated(format!("http://{WEB}/disk.img.gz"))])?
        .says(&["templated-data: the volume is filled"])?;
    husk(ctx, &["delete", "vm", "templated"])?.ok()?;
    ctx.nothing_left(Duration::from_secs(10))
}

/// Nothing of Husk is left but what was not deleted.
fn removal(ctx: &TestContext) -> Result<()> {
    if ctx.path("manifests").exists() {
        husk(ctx, &["delete", "-f", "manifests", "--ignore-not-found"])?.ok()?;
        husk(ctx, &["volume", "rm", "plugged"])?.ok()?;
    }
    removed(ctx)
}
