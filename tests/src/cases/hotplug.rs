//! Volumes that are plugged into a running VM and unplugged.

use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, TIMEOUT, images, poll};
use anyhow::{Context, Result, ensure};
use regex::Regex;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const ONE: Case = Case {
    name: "hotplug",
    about: "husk addvolume: the disk is there without a rescan, and after a reboot; husk removevolume: it is free again",
    limit: Duration::from_secs(480),
    run: one,
};

pub const MANY: Case = Case {
    name: "hotplug-many",
    about: "twenty volumes added one by one and removed one by one in another order, each by its serial number",
    limit: Duration::from_secs(480),
    run: many,
};

pub const UNHEARD: Case = Case {
    name: "hotplug-unheard",
    about: "volumes that come and go while the guest stands still, or its driver is unbound: it knows of them afterwards",
    limit: Duration::from_secs(480),
    run: unheard,
};

/// Functions for the guest's shell: find a disk by its serial number, wait for it, wait for its removal.
const FUNCTIONS: &str = "\
disk() { for unit in /sys/class/scsi_device/*/device; do \
[ \"$(tail -c +5 $unit/vpd_pg80 2>/dev/null | tr -dc ' -~')\" = \"$1\" ] || continue; \
ls $unit/block 2>/dev/null; done; }; \
comes() { i=0; until name=$(disk $1) && [ -n \"$name\" ] && [ -b /dev/$name ]; do \
[ $i -lt 200 ] || return 1; i=$((i + 1)); sleep 0.2; done; echo \"$1 is $name;\"; }; \
goes() { i=0; while [ -n \"$(disk $1)\" ]; do [ $i -lt 200 ] || return 1; i=$((i + 1)); sleep 0.2; done; }";

/// Time limit for the release of the host's file after a volume's removal.
const TO_BE_FREE: Duration = Duration::from_secs(20);

fn guest(ctx: &TestContext) -> Result<Vm<'_>> {
    let manifest = Manifest::new("hot").small(&images::small("6.12")?, "scsi,shell");
    let vm = Vm::start(ctx, &manifest)?;
    vm.expect("husk-scsi: end\n")?;
    Ok(vm)
}

/// A shell with these functions.
pub fn shell<'v>(vm: &'v Vm<'v>) -> Result<Shell<'v>> {
    let shell = Shell::small(vm)?;
    settle(&shell)?;
    Ok(shell)
}

/// Defines the functions in a shell.
pub fn settle(shell: &Shell<'_>) -> Result<()> {
    // The kernel's messages would mix with the replies.
    shell.ok("dmesg -n 1")?;
    shell.ok(FUNCTIONS)?;
    Ok(())
}

/// Makes an empty image.
pub fn image(ctx: &TestContext, name: &str, mebibytes: u64) -> Result<PathBuf> {
    let path = ctx.path(&format!("{name}.img"));
    File::create_new(&path)?.set_len(mebibytes << 20)?;
    Ok(path)
}

/// Runs `husk addvolume`.
pub fn add(ctx: &TestContext, vm: &Vm<'_>, name: &str, path: &Path) -> Result<()> {
    let mut command = ctx.husk(&["addvolume", vm.name(), "--volume-name", name, "--path"]);
    command.arg(path);
    ctx.finish(command, TIMEOUT)?.ok()?;
    Ok(())
}

/// Runs `husk removevolume`.
pub fn remove(ctx: &TestContext, vm: &Vm<'_>, name: &str) -> Result<()> {
    let command = ctx.husk(&["removevolume", vm.name(), "--volume-name", name]);
    ctx.finish(command, TIMEOUT)?.ok()?;
    Ok(())
}

/// Waits for the disk whose serial number is `name`; returns its device name in the guest.
pub fn comes(shell: &Shell<'_>, name: &str) -> Result<String> {
    let (status, text) = shell.run(&format!("comes {name}"), TIMEOUT)?;
    let found = Regex::new(&format!("{name} is (sd[a-z]+);"))?;
    let found = found.captures(&text).filter(|_| status == 0);
    let found = found.with_context(|| format!("no disk {name} comes: {text}"))?;
    Ok(found[1].to_owned())
}

/// Waits until no disk has the serial number `name`.
pub fn goes(shell: &Shell<'_>, name: &str) -> Result<()> {
    let gone = shell.ok(&format!("goes {name}")).map(drop);
    gone.with_context(|| format!("the disk {name} does not go"))
}

/// A VM with the image at `path`, which starts only if no other process has the image open.
fn other(path: &Path) -> Result<Manifest> {
    Ok(Manifest::new("other")
        .claim("claim", "data", path)
        .small(&images::small("6.12")?, "disks,shell"))
}

fn one(ctx: &TestContext) -> Result<()> {
    let vm = guest(ctx)?;
    let path = image(ctx, "first", 16)?;
    {
        let shell = shell(&vm)?;
        add(ctx, &vm, "first", &path)?;
        let disk = comes(&shell, "first")?;
        shell.ok(&format!("test $(cat /sys/block/{disk}/size) = 32768"))?;
        shell.ok(&format!(
            "echo written once > /block && dd if=/block of=/dev/{disk} conv=notrunc,fsync status=none"
        ))?;
        ctx.part("taken", || {
            // Adding it again does nothing. A name stands for one image, and an image belongs to one VM.
            add(ctx, &vm, "first", &path)?;
            let another = image(ctx, "another", 16)?;
            let mut again = ctx.husk(&["addvolume", vm.name(), "--volume-name", "first", "--path"]);
            again.arg(&another);
            ctx.finish(again, TIMEOUT)?.fails_with(1, &["first"])?;
            shell.ok("test $(ls -d /sys/block/sd* | wc -l) = 1")?;
            let words = other(&path)?.run_words(ctx)?;
            ctx.run_within(&words, TIMEOUT)?.fails_with(1, &["first.img"])
        });
        shell.send("reboot -f")?;
    }
    vm.expect(r"husk-scsi: 0:0:\d+:\d+ sd\w+ type=0 .* serial=first\n")?;
    vm.expect("husk-scsi: end\n")?;
    let shell = shell(&vm)?;
    let disk = comes(&shell, "first")?;
    ctx.part("after reboot", || {
        shell.expect_contains(&format!("head -c 12 /dev/{disk}"), &["written once"])
    });
    // Data that the guest has flushed is in the image once the volume is gone, even if the guest used it.
    shell.ok(&format!(
        "echo written twice > /block && dd if=/block of=/dev/{disk} conv=notrunc,fsync status=none"
    ))?;
    remove(ctx, &vm, "first")?;
    goes(&shell, "first")?;
    let bytes = std::fs::read(&path)?;
    ensure!(bytes.starts_with(b"written twice"), "what was written is lost");
    ctx.part("free", || {
        let manifest = other(&path)?;
        let other = poll(TO_BE_FREE, Duration::from_millis(500), || {
            Ok(Vm::start(ctx, &manifest).map_err(|error| format!("{error:#}")))
        })?;
        let shell = Shell::small(&other)?;
        shell.expect_contains("head -c 13 /dev/vda", &["written twice"])?;
        ctx.run(&["stop", "--force", "other"])?.ok()?;
        other.run().wait(TIMEOUT)?;
        Ok(())
    });
    // A missing volume cannot be removed, and a missing file cannot be added.
    ctx.part("refused", || {
        let gone = ctx.husk(&["removevolume", vm.name(), "--volume-name", "first"]);
        ctx.finish(gone, TIMEOUT)?.fails_with(1, &["first"])?;
        let absent = ctx.husk(&["addvolume", vm.name(), "--volume-name", "no", "--path", "no.img"]);
        ctx.finish(absent, TIMEOUT)?.fails_with(1, &["no.img"])
    });
    shell.ok("echo the guest goes on")?;
    vm.power_off(&shell)
}

/// Number of volumes that are added.
const COUNT: u64 = 20;

fn many(ctx: &TestContext) -> Result<()> {
    let vm = guest(ctx)?;
    let shell = shell(&vm)?;
    let name = |number: u64| format!("volume-{number}");
    for number in 1..=COUNT {
        // Each has a different size, by which the test recognises it.
        let path = image(ctx, &name(number), number)?;
        add(ctx, &vm, &name(number), &path)?;
        let disk = comes(&shell, &name(number))?;
        let sectors = number << 11;
        shell.ok(&format!(
            "test $(cat /sys/block/{disk}/size) = {sectors} && echo {} > /block && \
             dd if=/block of=/dev/{disk} conv=notrunc,fsync status=none",
            name(number)
        ))?;
    }
    let units = shell.ok("echo $(ls -d /sys/block/sd* | wc -l)")?;
    ensure!(units == COUNT.to_string(), "{units} disks");
    // Seven and twenty are coprime: every volume once, and no neighbours in sequence.
    for step in 1..=COUNT {
        let number = step * 7 % COUNT + 1;
        remove(ctx, &vm, &name(number))?;
        goes(&shell, &name(number))?;
        let left = shell.ok("echo $(ls -d /sys/block/sd* 2>/dev/null | wc -l)")?;
        ensure!(
            left == (COUNT - step).to_string(),
            "{left} disks after {step} of {COUNT} went"
        );
        let bytes = std::fs::read(ctx.path(&format!("{}.img", name(number))))?;
        ensure!(
            bytes.starts_with(format!("{}\n", name(number)).as_bytes()),
            "{} holds something else",
            name(number)
        );
    }
    vm.power_off(&shell)
}

/// More than the eight event buffers that Linux provides.
const MISSED: u64 = 20;

fn unheard(ctx: &TestContext) -> Result<()> {
    let vm = guest(ctx)?;
    let shell = shell(&vm)?;
    let disks = |count: u64| {
        shell.ok(&format!(
            "i=0; until [ $(ls /sys/block | grep -c ^sd) = {count} ]; do [ $i -lt 300 ] || exit 1; \
             i=$((i + 1)); sleep 0.2; done"
        ))
    };
    ctx.part("paused", || {
        ctx.run(&["pause", vm.name()])?.ok()?;
        for number in 1..=MISSED {
            let name = format!("missed-{number}");
            add(ctx, &vm, &name, &image(ctx, &name, 1)?)?;
        }
        ctx.run(&["resume", vm.name()])?.ok()?;
        for number in 1..=MISSED {
            comes(&shell, &format!("missed-{number}"))?;
        }
        disks(MISSED)?;
        Ok(())
    });
    ctx.part("removed while paused", || {
        ctx.run(&["pause", vm.name()])?.ok()?;
        let told = ctx.run(&["removevolume", vm.name(), "--volume-name", "missed-3"])?;
        let told = told.fails(1)?;
        ensure!(told.contains("it is removed at resume"), "{told}");
        ctx.run(&["resume", vm.name()])?.ok()?;
        goes(&shell, "missed-3")?;
        vm.until("a disk less", TIMEOUT, |vm| {
            !vm["plan"]["disks"].to_string().contains("missed-3")
        })?;
        add(ctx, &vm, "missed-3", &ctx.path("missed-3.img"))?;
        comes(&shell, "missed-3")?;
        disks(MISSED)?;
        Ok(())
    });
    ctx.part("without a driver", || {
        let kept = comes(&shell, "missed-7")?;
        shell.ok(&format!(
            "echo kept > /block && dd if=/block of=/dev/{kept} conv=notrunc,fsync status=none"
        ))?;
        let driver = "cd /sys/bus/virtio/drivers/virtio_scsi";
        shell.ok(&format!(
            "{driver} && device=$(ls -d virtio*) && echo $device > unbind"
        ))?;
        disks(0)?;
        add(ctx, &vm, "late", &image(ctx, "late", 1)?)?;
        remove(ctx, &vm, "missed-1")?;
        shell.ok(&format!("{driver} && echo $device > bind"))?;
        comes(&shell, "late")?;
        disks(MISSED)?;
        goes(&shell, "missed-1")?;
        let kept = comes(&shell, "missed-7")?;
        shell.expect_contains(&format!("head -c 4 /dev/{kept}"), &["kept"])
    });
    vm.power_off(&shell)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_functions_are_shell() {
        let status = std::process::Command::new("sh")
            .args(["-n", "-c", FUNCTIONS])
            .status()
            .expect("sh");
        assert!(status.success());
    }

    #[test]
    fn every_volume_is_removed_once() {
        let mut numbers: Vec<u64> = (1..=COUNT).map(|step| step * 7 % COUNT + 1).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (1..=COUNT).collect::<Vec<u64>>());
    }
}
