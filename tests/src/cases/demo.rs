//! The demonstration's manifest, in KubeVirt's format, on stock Debian 13: everything that a user sees first. It also
//! has an access credential.

use super::network::{self, ssh};
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::guest::{Shell, TO_LOGIN};
use crate::harness::program::Session;
use crate::harness::vm::Vm;
use crate::harness::{Case, DEBIAN, TIMEOUT, images};
use anyhow::{Context, Result, ensure};

pub const CASE: Case = Case {
    name: "demo",
    about: "demo-vm.yaml on Debian 13: cloud-init's password, key and first-boot command, devices, ssh over the network, poweroff",
    limit: DEBIAN,
    run,
};

const MANIFEST: &str = include_str!("../../manifests/demo-vm.yaml");

/// A key of a Secret, which cloud-init gives to the image's user.
const CREDENTIALS: &str = "  accessCredentials:
    - sshPublicKey:
        source: {secret: {secretName: keys}}
        propagationMethod: {noCloud: {}}
";

fn run(ctx: &TestContext) -> Result<()> {
    let manifest = format!("{MANIFEST}{CREDENTIALS}");
    std::fs::write(ctx.path("demo-vm.yaml"), manifest)?;
    let keys = ctx.path("keys");
    std::fs::create_dir(&keys)?;
    std::fs::write(keys.join("e2e"), ssh::key(ctx)?)?;
    let volume = |name: &str, path: std::path::PathBuf| {
        let mut volume = std::ffi::OsString::from(name);
        volume.push(path);
        volume
    };
    let words = [
        "run".into(),
        "demo-vm.yaml".into(),
        "--volume".into(),
        volume("rootdisk=", images::disk("debian-13-cloud")?),
        "--volume".into(),
        volume("keys-access-cred=", keys),
    ];
    let run = Session::piped(ctx.husk(&words), &ctx.log("demo.run.log"))?;
    run.expect(r"(?m)^demo: running", TIMEOUT)?;
    let vm = Vm::attach(ctx, "demo".to_owned(), run)?;
    vm.console().expect(r"Linux version 6\.12\.", TO_LOGIN)?;
    let shell = Shell::log_in(&vm, "debian", "husk")?;
    ctx.part("first boot", || first_boot(&vm, &shell));
    ctx.part("memory", || {
        shell.expect_contains("dmidecode -t memory", &["Maximum Capacity: 1 GB", "Size: 1 GB"])?;
        let kilobytes: u64 = shell
            .ok("sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo")?
            .parse()?;
        ensure!((900 << 10..1 << 20).contains(&kilobytes), "{kilobytes} kB");
        Ok(())
    });
    ctx.part("identity", || {
        shell.expect_contains(
            "dmidecode -s system-uuid",
            &["6f2a6c3e-98d1-4c0e-9c53-31f0a2b1c7d4"],
        )?;
        shell.expect_contains("dmidecode -s system-serial-number", &["husk-demo"])
    });
    ctx.part("devices", || devices(&shell));
    if rustix::process::geteuid().is_root() {
        ctx.part("network", || network(ctx, &shell));
        ctx.part("ssh", || ssh::logs_in(&vm));
        ctx.part("ssh by vsock", || ssh::logs_in_by_vsock(&vm));
        ctx.part("port-forward", || ssh::greets(&vm));
    }
    shell.send("systemctl poweroff")?;
    vm.powered_off()
}

fn first_boot(vm: &Vm<'_>, shell: &Shell<'_>) -> Result<()> {
    let (status, text) = shell.run("cloud-init status --wait --long", TO_LOGIN)?;
    ensure!(status == 0 || status == 2, "cloud-init: {text}");
    expect_contains(&text, &["status: done", "DataSourceNoCloud"])?;
    expect_contains(&vm.console().output().all(), &["husk-demo: first boot done"])?;
    shell.expect_contains("hostname", &["demo"])?;
    let failed = shell.ok("systemctl --failed --no-legend --plain --no-pager | cut -d' ' -f1")?;
    ensure!(failed.is_empty(), "failed units: {failed}");
    Ok(())
}

/// The guest is behind its pod's address, and reaches this machine.
fn network(ctx: &TestContext, shell: &Shell<'_>) -> Result<()> {
    shell.expect_contains("ip -4 -o address show scope global", &["inet 10.0.2.2/24"])?;
    shell.expect_contains("ip route show", &["default via 10.0.2.1"])?;
    let address = network::standalone::own_address(ctx)?;
    shell.ok(&format!("ping -n -c 2 -W 5 {address}"))?;
    Ok(())
}

fn devices(shell: &Shell<'_>) -> Result<()> {
    let disks = shell.ok("lsblk -bdno NAME,SIZE,RO /dev/vda /dev/vdb /dev/vdc | tr -s ' '")?;
    let mut lines = disks.lines();
    ensure!(lines.next() == Some("vda 3221225472 0"), "{disks}");
    ensure!(lines.next() == Some("vdb 1073741824 0"), "{disks}");
    let seed = lines.next().context("no third disk")?;
    ensure!(seed.ends_with(" 1"), "the NoCloud disk can be written: {disks}");
    shell.expect_contains("cat /sys/class/misc/hw_random/rng_available", &["virtio_rng"])?;
    shell.expect_contains("lsmod", &["virtio_balloon"])?;
    // Where it is depends on the kernel: the driver moved from the ACPI bus to the platform bus.
    shell.ok("ls -d /sys/bus/*/drivers/vmgenid/HUSK0001:00")?;
    // The clock comes from the host.
    shell
        .expect_contains(
            "cat /sys/devices/system/clocksource/clocksource0/current_clocksource",
            &["kvm-clock"],
        )
        .or_else(|_| {
            shell.expect_contains(
                "cat /sys/devices/system/clocksource/clocksource0/current_clocksource",
                &["tsc"],
            )
        })?;
    let apart: i64 = shell
        .ok("echo $(($(cat /sys/class/rtc/rtc0/since_epoch) - $(date +%s)))")?
        .parse()?;
    ensure!(
        apart.abs() <= 5,
        "the RTC and the time of day are {apart} s apart"
    );
    Ok(())
}
