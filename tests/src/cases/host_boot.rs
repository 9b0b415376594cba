//! Phases of a machine's life with VMs of `husk apply`: `cargo xtask reboot` runs them, and reboots the lab or cuts its
//! power in between.

use crate::harness::Case;
use crate::harness::context::{CommandResult, TestContext, expect_contains, program};
use crate::harness::guest::Shell;
use crate::harness::program::Session;
use crate::harness::registry::{self, BOOT, DISK, sh};
use crate::harness::stores::{self, BROKEN, KEPT, STEPS, Stores};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

pub const SETUP: Case = phase(
    "host-setup",
    "VMs that husk apply keeps, one of them with a broken file, are set up as an administrator would",
    setup,
);
pub const REBOOTED: Case = phase(
    "host-rebooted",
    "after a reboot each guest has powered off before, and runs again; the broken VM alone waits, by its field",
    rebooted,
);
pub const CHANGES: Case = phase(
    "host-changes",
    "objects, volumes and images change until the power is cut",
    changes,
);
pub const POWER_CUT: Case = phase(
    "host-power-cut",
    "after a power cut each VM runs again, and no object, volume or image is damaged, lost or left over",
    power_cut,
);
pub const REMOVAL: Case = phase(
    "host-removal",
    "nothing is left once the VMs are deleted",
    removal,
);

const fn phase(name: &'static str, about: &'static str, run: fn(&TestContext) -> Result<()>) -> Case {
    let limit = Duration::from_secs(1200);
    Case {
        name,
        about,
        limit,
        run,
    }
}

/// Folder of the programs, on the machine's own disk.
const FOLDER: &str = "/opt/husk";
/// Husk's data directory for root.
const DATA: &str = "/var/lib/husk";
/// Number of steps that are done, on stable storage.
const PROGRESS: &str = "/opt/husk/progress";
/// Maximum time until all VMs run.
const ALL_RUN: Duration = Duration::from_secs(900);

/// A program that an administrator starts.
fn command(ctx: &TestContext, program: &str) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("HUSK_") {
            command.env_remove(name);
        }
    }
    command
        .current_dir(ctx.path("."))
        .env("HOME", format!("{FOLDER}/home"))
        .env("REGISTRY_AUTH_FILE", format!("{FOLDER}/home/auth.json"));
    command
}

fn husk(ctx: &TestContext, words: &[&str]) -> Result<CommandResult> {
    let mut command = command(ctx, &format!("{FOLDER}/husk"));
    command.args(words);
    ctx.finish(command, ALL_RUN)
}

/// Starts a registry, and makes the administrator trust it.
fn registry(ctx: &TestContext) -> Result<Session> {
    let session = registry::start(ctx)?;
    registry::fill(ctx)?;
    let trusted = format!("{FOLDER}/home/.config/containers/certs.d/{}", registry::ADDRESS);
    sh(
        ctx,
        &format!("mkdir -p {trusted}; cp tls.crt {trusted}/ca.crt; cp auth.json {FOLDER}/home"),
    )?;
    Ok(session)
}

/// A VM with an image, and a volume of its own.
fn vm(name: &str) -> Value {
    let data = format!("{name}-data");
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": name},
        "spec": {
            "runStrategy": "Always",
            "dataVolumeTemplates": [{
                "metadata": {"name": data},
                "spec": {"source": {"blank": {}}, "storage": {"resources": {"requests": {"storage": "4Mi"}}}},
            }],
            "template": {"spec": {
                "terminationGracePeriodSeconds": 300,
                "domain": {
                    "memory": {"guest": "160Mi"},
                    "devices": {
                        "autoattachPodInterface": false,
                        "disks": [{"name": "root", "disk": {"bus": "virtio"}}, {"name": "data", "disk": {"bus": "virtio"}}],
                    },
                },
                "volumes": [
                    {"name": "root", "containerDisk": {"image": BOOT}},
                    {"name": "data", "dataVolume": {"name": data}},
                ],
            }},
        },
    })
}

fn setup(ctx: &TestContext) -> Result<()> {
    ctx.needs_root()?;
    let vms: u32 = std::env::var("HUSK_VMS")?.parse()?;
    // So that the next boot can read what the last one logged; and from then on the root filesystem has a journal,
    // which the lab's has not.
    sh(
        ctx,
        &format!(
            "mkdir -p {FOLDER}/home /etc/systemd/journald.conf.d
             printf '[Journal]\\nStorage=persistent\\n' > /etc/systemd/journald.conf.d/persistent.conf
             systemctl restart systemd-journald; journalctl --flush
             root=$(findmnt -no SOURCE /); tune2fs -l $root | grep -q has_journal || tune2fs -j $root"
        ),
    )?;
    for name in ["husk", "husk-monitor", "husk-vmm", "husk-import"] {
        std::fs::copy(program(name), Path::new(FOLDER).join(name))?;
    }
    let registry = registry(ctx)?;
    registry::push_boot_disk(ctx)?;
    let names = (1..=vms)
        .map(|number| format!("{KEPT}{number}"))
        .chain([BROKEN.to_owned()]);
    let objects: String = names.map(|name| format!("---\n{}\n", vm(&name))).collect();
    std::fs::write(ctx.path("vms.yaml"), objects)?;
    husk(ctx, &["apply", "-f", "vms.yaml"])?.ok()?;
    drop(registry);
    all_run(ctx, vms + 1)?;
    let file = format!("{DATA}/objects/default/virtualmachine/{BROKEN}.yaml");
    sh(ctx, &format!("sed -i s/Always/Sometimes/ {file}"))?;
    let console = console(ctx)?;
    console.send("\n")?;
    Shell::small_on(&console)?
        .ok("echo kept | dd of=/dev/vdb conv=fsync status=none")
        .map(drop)
}

/// The console of the first VM.
fn console(ctx: &TestContext) -> Result<Session> {
    let mut command = command(ctx, &format!("{FOLDER}/husk"));
    command.args(["console", &format!("{KEPT}1")]);
    Session::on_terminal(command, &ctx.log("console.log"))
}

/// Waits until `wanted` VMs run, and returns the `printableStatus` of each VM.
fn all_run(ctx: &TestContext, wanted: u32) -> Result<BTreeMap<String, String>> {
    let started = Instant::now();
    loop {
        let shown = husk(ctx, &["get", "vm", "-o", "json"])?.text;
        // Notes on broken files come before it.
        let json = shown.find("\n{").map_or(shown.as_str(), |begin| &shown[begin..]);
        let list: Value = serde_json::from_str(json).with_context(|| shown.clone())?;
        let vms = list["items"].as_array().context("no items")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let states: BTreeMap<String, String> = vms
            .iter()
            .map(|vm| {
                (
                    text(&vm["metadata"]["name"]),
                    text(&vm["status"]["printableStatus"]),
                )
            })
            .collect();
        let running = states.values().filter(|state| *state == "Running").count();
        if running == usize::try_from(wanted)? {
            println!("{wanted} VMs run after {:.0} s", started.elapsed().as_secs_f64());
            return Ok(states);
        }
        ensure!(
            started.elapsed() < ALL_RUN,
            "{running} of {wanted} run: {states:?}"
        );
        std::thread::sleep(Duration::from_secs(2));
    }
}

/// All VMs run, and only the broken one waits. No process but those of the VMs is there.
fn run_again(ctx: &TestContext, vms: u32) -> Result<()> {
    all_run(ctx, vms)?;
    let failed = sh(
        ctx,
        "systemctl list-units --all --plain --no-legend --state=failed 'husk*'",
    )?;
    ensure!(failed.trim().is_empty(), "failed: {failed}");
    let why = sh(
        ctx,
        &format!("systemctl show --value --property=ActiveState,StatusText 'husk@default:{BROKEN}.service'"),
    )?;
    expect_contains(
        &why,
        &["active", "CrashLoopBackOff: ", "spec.runStrategy", "Sometimes"],
    )?;
    let running = sh(ctx, &format!("pgrep -f '^{FOLDER}/|^husk-vmm' -a || true"))?;
    let count = running.lines().count();
    // A monitor and a VMM each; the process of the broken one.
    ensure!(
        count == 2 * usize::try_from(vms)? + 1,
        "{count} processes for {vms} VMs:\n{running}"
    );
    let console = console(ctx)?;
    console.send("\n")?;
    Shell::small_on(&console)?.expect_contains("head -n 1 /dev/vdb", &["kept"])
}

fn rebooted(ctx: &TestContext) -> Result<()> {
    let vms: u32 = std::env::var("HUSK_VMS")?.parse()?;
    let ends = sh(
        ctx,
        &format!("journalctl -b -1 -o cat -u 'husk@default:{KEPT}*.service' | grep 'the VM ended'"),
    )?;
    let (powered_off, others): (Vec<_>, Vec<_>) = ends.lines().partition(|line| line.contains("Poweroff"));
    ensure!(
        others.is_empty() && powered_off.len() == usize::try_from(vms + 1)?,
        "{} of {} guests powered off; others: {others:?}",
        powered_off.len(),
        vms + 1
    );
    println!("{} guests powered off at the reboot", powered_off.len());
    run_again(ctx, vms)
}

fn stores<'s>(husk: &'s dyn Fn(&[&str]) -> Result<CommandResult>) -> Stores<'s> {
    Stores {
        husk,
        data: DATA.into(),
    }
}

/// Does the steps again and again, beside pulls of an image.
fn changes(ctx: &TestContext) -> Result<()> {
    ensure!(
        std::fs::read_dir("/proc/fs/jbd2")?.count() > 0,
        "the root filesystem has no journal"
    );
    let _registry = registry(ctx)?;
    let _web = stores::prepare(ctx)?;
    let mut command = command(ctx, "sh");
    command.arg("-c").arg(format!(
        "while {FOLDER}/husk images pull {DISK} && {FOLDER}/husk images rm {DISK}; do :; done"
    ));
    let pulls = Session::piped(command, &ctx.log("pulls.log"))?;
    loop {
        record(0)?;
        ensure!(pulls.ended()?.is_none(), "the pulls ended");
        for (number, step) in STEPS.iter().enumerate() {
            husk(ctx, step.words)?
                .ok()
                .with_context(|| format!("{:?}", step.words))?;
            record(number + 1)?;
            println!("done: {:?}", step.words);
        }
    }
}

/// Writes the number of steps that are done.
fn record(done: usize) -> Result<()> {
    let new = format!("{PROGRESS}.new");
    let mut file = File::create(&new)?;
    file.write_all(done.to_string().as_bytes())?;
    file.sync_all()?;
    std::fs::rename(new, PROGRESS)?;
    File::open(FOLDER)?.sync_all()?;
    Ok(())
}

fn power_cut(ctx: &TestContext) -> Result<()> {
    let vms: u32 = std::env::var("HUSK_VMS")?.parse()?;
    let done = std::fs::read_to_string(PROGRESS)?.parse()?;
    println!("{done} of {} steps were done", STEPS.len());
    let husk = |words: &[&str]| husk(ctx, words);
    let stores = stores(&husk);
    stores.check(done)?;
    stores.clear()?;
    husk(&["images", "prune"])?.ok()?;
    let staging = Path::new(DATA).join("images/staging");
    let staged = std::fs::read_dir(&staging).map_or(0, Iterator::count);
    ensure!(staged == 0, "{staged} files in {}", staging.display());
    husk(&["images", "list"])?.says(&[BOOT])?;
    run_again(ctx, vms)
}

fn removal(ctx: &TestContext) -> Result<()> {
    let shown = husk(ctx, &["get", "vm", "-o", "name"])?.ok()?;
    let names = shown.lines().filter(|name| name.starts_with(KEPT));
    for name in names.chain([BROKEN]) {
        husk(ctx, &["delete", "vm", name, "--ignore-not-found"])?.ok()?;
    }
    // What a broken file says of its volumes is not known.
    let data = format!("{BROKEN}-data");
    husk(ctx, &["delete", "dv", &data, "--ignore-not-found"])?.ok()?;
    husk(ctx, &["images", "rm", BOOT])?.ok()?;
    let left = sh(
        ctx,
        &format!(
            "find {DATA} -type f -o -name '*:*'; systemctl list-units --all --plain --no-legend 'husk@*' 'husk-import@*'"
        ),
    )?;
    let left: Vec<_> = left.lines().filter(|line| !line.ends_with("/.lock")).collect();
    ensure!(left.is_empty(), "{left:?}");
    sh(ctx, &format!("rm -r {FOLDER} {DATA}")).map(drop)
}
