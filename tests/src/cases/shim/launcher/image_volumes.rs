//! With KubeVirt's gate ImageVolume: the kubelet mounts the images of volumes.

use super::recorded::{Launcher, image_spec, vmi};
use crate::harness::containerd::Containerd;
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::cri::{Cri, api};
use crate::harness::guest::Shell;
use crate::harness::program::Session;
use crate::harness::until;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::time::Duration;

const KERNEL_BOOT: &str = "/var/run/kubevirt-kernel-boot";
/// Lines that the guest prints while containerd stands still: more than a pipe holds.
const LINES: std::ops::RangeInclusive<u32> = 10_001..=26_000;

pub fn image_volumes(ctx: &TestContext, c: &Containerd<'_>, cri: &Cri) -> Result<()> {
    let pod = Launcher::new(ctx, cri, "images")?;
    let console_log = pod.start("guest-console-log", &[], 0)?;
    let root = pod.start("volumeroot", &[], 0)?;
    pod.exits(&root, 0)?;
    let kernel = api::Mount {
        container_path: KERNEL_BOOT.to_owned(),
        readonly: true,
        image: Some(image_spec("kernel")),
        ..api::Mount::default()
    };
    let user_data = ctx.path("userdata");
    std::fs::write(&user_data, "#cloud-config\n# of-a-secret\n")?;
    let keys = ["userdata", "userData"].map(|key| api::Mount {
        container_path: format!("/var/run/kubevirt-private/secret/seed/{key}"),
        host_path: user_data.display().to_string(),
        readonly: true,
        ..api::Mount::default()
    });
    let mounts = [vec![kernel], keys.to_vec()].concat();
    let compute = pod.start("compute", &mounts, 0)?;
    pod.runs(&compute)?;
    pod.runs(&console_log)?;

    let mut other = seeded()?;
    other["metadata"]["uid"] = "another".into();
    pod.sync(&other)?
        .fails_with(2, &["metadata.uid: \"another\" is another VM"])?;
    let mut broken = seeded()?;
    broken["spec"]["volumes"][1]["persistentVolumeClaim"] = json!({"claimName": "fspvc"});
    broken["spec"]["volumes"][1]["name"] = "gone".into();
    broken["spec"]["domain"]["devices"]["disks"][1]["name"] = "gone".into();
    pod.sync(&broken)?
        .fails_with(2, &["spec.volumes[1]", "no data for volume \"gone\""])?;
    pod.runs(&compute)?;

    pod.sync(&seeded()?)?.ok()?;
    let console = Session::on_terminal(ctx.husk(&["console", &pod.vm()]), &ctx.log("images.console.log"))?;
    let shell = Shell::small_on(&console)?;
    let sizes = shell.ok("cat /sys/block/vda/size /sys/block/vdb/size")?;
    ensure!(sizes == "2048\n2048", "{sizes}");
    let first = shell.ok("head -c 1 /dev/vda | hexdump -e '1/1 \"%d\"'")?;
    ensure!(first == "7", "not the containerDisk: {first}");
    shell
        .ok("grep -q of-a-secret /dev/vdc")
        .context("the user data of the Secret")?;

    // The console is printed by its own container alone.
    shell.ok("echo marker-$((40 + 2))")?;
    until(|| Ok(pod.log("guest-console-log.log")?.contains("marker-42")))?;
    let log = pod.log("compute.log")?;
    ensure!(!log.contains("marker-42"), "compute prints the console: {log}");
    expect_contains(&log, &["received the VMI"])?;

    // virt-freezer without an agent has nothing to do; a probe fails.
    let freezer = [
        "/usr/bin/virt-freezer",
        "--freeze",
        "--name",
        "testvmi",
        "--namespace",
        "default",
    ];
    ensure!(cri.exec(&compute, &freezer)?.0 == 0);
    let (status, said) = cri.exec(&compute, &["virt-probe", "--guestAgentPing"])?;
    ensure!(status == 1 && said.contains("guest agent"), "{status}: {said}");
    ensure!(cri.exec(&compute, &["/bin/sh"]).is_err(), "exec of a shell");

    // Killed alone, it restarts and goes on.
    cri.stop(&console_log, Duration::ZERO)?;
    pod.exits(&console_log, 137)?;
    let again = pod.start("guest-console-log", &[], 1)?;
    shell.ok("echo marker-$((50 + 2))")?;
    until(|| Ok(pod.log("guest-console-log.1.log")?.contains("marker-52")))?;
    slow_reader(c, &pod, &shell)?;
    drop(console);

    cri.stop(&compute, Duration::from_secs(60))?;
    pod.exits(&compute, 0)?;
    pod.runs(&again)?;
    cri.stop(&again, Duration::from_secs(10))?;
    pod.exits(&again, 0)?;
    cri.remove_pod(&pod.pod)?;
    c.nothing_left()
}

/// The VMI with a shell, and with user data in a Secret.
fn seeded() -> Result<Value> {
    let mut vmi = vmi("disks,button,shell")?;
    let seed = json!({"name": "seed", "cloudInitNoCloud": {"secretRef": {"name": "seed"}}});
    let disk = json!({"name": "seed", "disk": {"bus": "virtio"}});
    for (list, item) in [("/spec/volumes", seed), ("/spec/domain/devices/disks", disk)] {
        let list = vmi.pointer_mut(list).and_then(Value::as_array_mut);
        list.context("no list")?.push(item);
    }
    Ok(vmi)
}

/// A containerd that does not read the console's log neither stalls the guest nor loses a line.
fn slow_reader(c: &Containerd<'_>, pod: &Launcher<'_>, shell: &Shell<'_>) -> Result<()> {
    let (first, last) = (LINES.start(), LINES.end());
    c.while_stopped(|| shell.ok(&format!("seq {first} {last}")))?;
    let log = || pod.log("guest-console-log.1.log");
    until(|| Ok(log()?.contains(&format!(" {last}"))))?;
    let log = log()?;
    let printed = log.lines().filter_map(|line| line.trim_end().rsplit(' ').next());
    let printed: std::collections::BTreeSet<u32> = printed.filter_map(|word| word.parse().ok()).collect();
    let lost = LINES.filter(|number| !printed.contains(number)).count();
    ensure!(lost == 0, "{lost} lines are not in the log");
    Ok(())
}
