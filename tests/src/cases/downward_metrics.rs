//! KubeVirt's downward metrics in a guest. Debian has no client of vhostmd, so a shell asks and reads as one does.

use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, images, until};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "downward-metrics",
    about: "metrics of host and VM on a port and on a disk; a guest that asks for nothing, floods the port, leaves half a request; none without the field",
    limit: Duration::from_secs(300),
    run,
};

/// Loads the driver and links the port to /port.
const DRIVER: &str =
    "for module in $(cat /lib/virtio_pci /lib/virtio_console); do insmod /lib/$module 2>/dev/null; done
for port in /sys/class/virtio-ports/*; do
    [ \"$(cat $port/name)\" != org.github.vhostmd.1 ] || ln -s /dev/${port##*/} /port
done";

/// Sends $1 and prints the answer up to its empty line.
const ASK: &str = "ask() {
    exec 3<>/port
    printf \"$1\" >&3
    while read -r line <&3 && [ -n \"$line\" ]; do echo \"$line\"; done
    exec 3>&-
}";
const METRICS: &str = "ask 'GET /metrics/XML\\r\\n\\r\\n'";

fn run(ctx: &TestContext) -> Result<()> {
    ctx.part("port", || port(ctx));
    ctx.part("disk", || disk(ctx));
    ctx.part("none", || none(ctx));
    Ok(())
}

/// Value of the metric in a document that was printed line by line.
fn value<'t>(document: &'t str, context: &str, name: &str) -> Result<&'t str> {
    let mut lines = document.lines().map(str::trim);
    let name = format!("<name>{name}</name>");
    while let Some(line) = lines.next() {
        if line.starts_with("<metric ")
            && line.contains(&format!("context=\"{context}\""))
            && lines.next() == Some(&name)
        {
            let value = lines.next().unwrap_or_default();
            return value
                .strip_prefix("<value>")
                .and_then(|value| value.strip_suffix("</value>"))
                .with_context(|| format!("{name}: {value}"));
        }
    }
    anyhow::bail!("no {name} of the {context} in {document}")
}

/// Checks what every document has.
fn check(document: &str) -> Result<()> {
    let number = |context, name| Ok::<f64, anyhow::Error>(value(document, context, name)?.parse()?);
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
    ensure!(value(document, "host", "HostName")? == host.trim(), "{document}");
    ensure!(
        value(document, "host", "VirtProductInfo")?.starts_with("husk "),
        "{document}"
    );
    ensure!(number("vm", "ResourceProcessorLimit")? == 2.0, "{document}");
    ensure!(number("vm", "ResourceMemoryLimit")? == 262_144.0, "{document}");
    ensure!(number("vm", "TotalCPUTime")? > 0.1, "{document}");
    ensure!(number("host", "NumberOfPhysicalCPUs")? >= 1.0, "{document}");
    for name in ["TotalCPUTime", "FreePhysicalMemory", "UsedVirtualMemory"] {
        ensure!(number("host", name)? > 0.0, "{name}: {document}");
    }
    ensure!(number("host", "PagedOutMemory")? >= 0.0, "{document}");
    Ok(())
}

fn port(ctx: &TestContext) -> Result<()> {
    let manifest = Manifest::new("metrics")
        .cpu(1, 2, 1)
        .set("/domain/devices/downwardMetrics", json!({}))
        .small(&images::small("6.12-devices")?, "shell");
    let vm = Vm::start(ctx, &manifest)?;
    let shell = Shell::small(&vm)?;
    shell.ok(DRIVER)?;
    shell.ok(ASK)?;
    let first = shell.ok(METRICS)?;
    check(&first)?;
    let later = shell.ok(METRICS)?;
    let time = |document| Ok::<f64, anyhow::Error>(value(document, "vm", "TotalCPUTime")?.parse()?);
    ensure!(time(&later)? > time(&first)?, "{later}");

    shell.expect_contains("ask 'HELLO\\n\\n'", &["INVALID REQUEST"])?;
    check(&shell.ok(METRICS)?)?;
    // Half a request of a process that goes. If the monitor learns of its end after the next request, it refuses that.
    shell.ok("printf 'GET /met' > /port")?;
    until(|| Ok(check(&shell.ok(METRICS)?).is_ok())).context("after half a request")?;
    // More than the port takes, from a program that reads nothing.
    shell.ok("head -c 4000000 /dev/zero > /port & sleep 5; kill %1; wait")?;
    let monitor = vm.pid("monitorPid")?;
    let status = std::fs::read_to_string(format!("/proc/{monitor}/status"))?;
    let resident = status
        .lines()
        .find(|line| line.starts_with("VmRSS"))
        .unwrap_or_default();
    let kib: u64 = resident
        .chars()
        .filter(char::is_ascii_digit)
        .collect::<String>()
        .parse()?;
    ensure!(kib < 64 << 10, "{resident}");
    vm.discard()
}

/// The disk, read past the guest's cache. Prints its header in hexadecimal digits, then the document.
const READ: &str = "blockdev --flushbufs /dev/vda; dd if=/dev/vda of=/disk bs=4096 status=none
    head -c 16 /disk | hexdump -v -e '/1 \"%02x\"'; echo
    tail -c +17 /disk | head -c $((0x$(head -c 16 /disk | tail -c 4 | hexdump -v -e '/1 \"%02x\"')))";

fn disk(ctx: &TestContext) -> Result<()> {
    let manifest = Manifest::new("disk")
        .cpu(1, 2, 1)
        .disk("metrics", json!({"downwardMetrics": {}}))
        .small(&images::small("6.12-devices")?, "disks,shell");
    let vm = Vm::start(ctx, &manifest)?;
    vm.expect("husk-disk-vda: size=512 ro=1")?;
    let shell = Shell::small(&vm)?;
    let time = |document: &str| Ok::<u64, anyhow::Error>(value(document, "host", "Time")?.parse()?);
    let mut seen = Vec::new();
    until(|| {
        let text = shell.ok(READ)?;
        let (header, document) = text.trim_start().split_once('\n').context("no header")?;
        // "mvbd", and the document is whole.
        ensure!(header.starts_with("6d766264") && header.len() == 32, "{text}");
        if &header[8..16] != "00000000" || !document.contains("ResourceProcessorLimit") {
            return Ok(false);
        }
        check(document)?;
        let time = time(document)?;
        if seen.last() != Some(&time) {
            seen.push(time);
        }
        Ok(seen.len() == 3)
    })?;
    let between = seen[2] - seen[1];
    ensure!((4..=20).contains(&between), "{seen:?}");
    shell.ok("! dd if=/dev/zero of=/dev/vda bs=512 count=1 conv=fsync")?;
    vm.discard()
}

fn none(ctx: &TestContext) -> Result<()> {
    let manifest = Manifest::new("none").small(&images::small("6.12-devices")?, "shell");
    let vm = Vm::start(ctx, &manifest)?;
    let shell = Shell::small(&vm)?;
    shell.ok(DRIVER)?;
    shell.ok("[ ! -e /port ]")?;
    vm.discard()
}
