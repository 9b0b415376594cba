//! A thousand volumes plugged and unplugged while the guest works on another. Not part of the tests:
//! `cargo xtask soak`.

use super::hotplug::{add, image, remove};
use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, images, met, poll};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

pub const CASE: Case = Case {
    name: "thousand",
    about: "1,000 LUNs added and removed one by one while fio verifies another: none lost, none left, no memory kept",
    limit: Duration::from_secs(80 * 60),
    run,
};

const COUNT: usize = 1000;

/// Time limit for the guest to detect the last volume.
const TO_SETTLE: Duration = Duration::from_secs(600);

/// KiB that the VMM may keep afterwards, half of what the volumes take: tables that do not shrink, and fragmentation.
const KEPT_KIB: u64 = 512;

/// For the guest's shell: list every disk's serial number, and run fio on the first disk until /stop exists.
const FUNCTIONS: &str = "\
serials() { for unit in /sys/class/scsi_device/*/device; do \
[ -d $unit/block ] && tail -c +5 $unit/vpd_pg80 2>/dev/null | tr -dc ' -~' && echo; done; }; \
work() { until [ -e /stop ]; do fio --thread --name=work --filename=/dev/disk --size=32m --rw=randrw --direct=1 \
--ioengine=libaio --iodepth=8 --bs=16k --verify=crc32c --verify_fatal=1 --verify_state_save=0 >/fio.log 2>&1 || \
{ touch /bad; break; }; echo >>/rounds; done; touch /done; }";

fn run(ctx: &TestContext) -> Result<()> {
    let manifest = Manifest::new("thousand")
        .memory("1Gi")
        .empty_disk_as("work", json!({"disk": {"bus": "scsi"}, "serial": "work"}), "32Mi")
        .small(&images::small("6.12-disks")?, "scsi,shell");
    let vm = Vm::start(ctx, &manifest)?;
    let shell = Shell::small(&vm)?;
    shell.ok("dmesg -n 1")?;
    shell.ok(FUNCTIONS)?;
    let pid = vm.inspect()?["vmmPid"].as_u64().context("no vmmPid")?;
    // The first volume, and the I/O, allocate the memory that all share.
    shell.ok("ln -s $(ls -d /dev/sd? | head -n 1) /dev/disk; work & true")?;
    shell.ok("until [ -s /rounds ]; do sleep 1; done")?;
    let first = image(ctx, "first", 1)?;
    add(ctx, &vm, "first", &first)?;
    until(&shell, 2)?;
    remove(ctx, &vm, "first")?;
    until(&shell, 1)?;
    let before = Held::by(pid)?;

    let started = Instant::now();
    for number in 0..COUNT {
        let path = image(ctx, &name(number), 1)?;
        add(ctx, &vm, &name(number), &path)?;
        progress("added", number, started);
    }
    until(&shell, COUNT + 1)?;
    println!("all seen after {:.0} s", started.elapsed().as_secs_f64());
    let serials = shell.run("serials", TO_SETTLE)?.1;
    let seen: BTreeSet<String> = serials.lines().map(|line| line.trim().to_owned()).collect();
    for number in 0..COUNT {
        ensure!(seen.contains(&name(number)), "{} is lost", name(number));
    }
    let during = Held::by(pid)?;
    println!("VMM before {before:?}, with {COUNT} LUNs {during:?}");
    ensure!(
        during.fds >= before.fds + COUNT,
        "the VMM does not hold the images"
    );

    let started = Instant::now();
    for number in 0..COUNT {
        // Every volume once, and no neighbours in sequence.
        remove(ctx, &vm, &name(number * 7 % COUNT))?;
        progress("removed", number, started);
    }
    until(&shell, 1)?;
    println!("all gone after {:.0} s", started.elapsed().as_secs_f64());
    shell.run("touch /stop; until [ -e /done ]; do sleep 1; done", TO_SETTLE)?;
    shell.ok("[ ! -e /bad ] && [ -s /rounds ] || { cat /fio.log; false; }")?;
    let rounds = shell.ok("echo $(wc -l < /rounds)")?;
    shell.ok("! dmesg | grep -E 'I/O error, dev sda|scsi.*(abort|timing out)'")?;
    let after = Held::by(pid)?;
    println!("VMM after {after:?}; {rounds} rounds of fio meanwhile");
    ensure!(
        after.fds <= before.fds,
        "descriptors are left: {before:?}, {after:?}"
    );
    ensure!(
        after.anonymous_kib <= before.anonymous_kib + KEPT_KIB,
        "memory is left: {before:?}, {after:?}"
    );
    vm.power_off(&shell)
}

fn name(number: usize) -> String {
    format!("volume-{number:04}")
}

fn progress(what: &str, number: usize, started: Instant) {
    let done = number + 1;
    if done.is_multiple_of(100) {
        let each = started.elapsed().as_secs_f64() * 1e3 / done as f64;
        println!("{done} {what}, {each:.0} ms each");
    }
}

/// Waits until the guest has `count` disks.
fn until(shell: &Shell<'_>, count: usize) -> Result<()> {
    poll(TO_SETTLE, Duration::from_millis(500), || {
        let disks = shell.ok("echo $(ls /sys/block | grep -c '^sd')")?;
        met(disks == count.to_string(), || {
            format!("{disks} disks instead of {count}")
        })
    })
}

/// Memory of a VMM without its guest's memory.
#[derive(Debug)]
struct Held {
    anonymous_kib: u64,
    fds: usize,
}

/// Mappings of at least this size are the guest's memory.
const GUEST: u64 = 256 << 20;

impl Held {
    fn by(pid: u64) -> Result<Self> {
        let mut own = true;
        let mut anonymous_kib = 0;
        for line in fs::read_to_string(format!("/proc/{pid}/smaps"))?.lines() {
            if let Some(size) = mapping(line) {
                own = size < GUEST;
            } else if let Some(value) = line.strip_prefix("Anonymous:")
                && own
            {
                let number = value.split_whitespace().next();
                anonymous_kib += number.context("an empty field")?.parse::<u64>()?;
            }
        }
        Ok(Self {
            anonymous_kib,
            fds: fs::read_dir(format!("/proc/{pid}/fd"))?.count(),
        })
    }
}

/// The size of the mapping whose first line in smaps is `line`: `7f00-7f80 rw-p …`.
fn mapping(line: &str) -> Option<u64> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    let number = |hex| u64::from_str_radix(hex, 16).ok();
    number(end)?.checked_sub(number(start)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_distinguished_from_a_field() {
        assert_eq!(
            mapping("7f0000000000-7f0010000000 rw-p 00000000 00:00 0"),
            Some(1 << 28)
        );
        assert_eq!(mapping("Anonymous:         1024 kB"), None);
        assert_eq!(mapping("VmFlags: rd wr"), None);
    }
}
