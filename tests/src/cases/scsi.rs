//! Disks and CD-ROMs on the virtio-scsi controller.

use crate::harness::context::TestContext;
use crate::harness::guest::{Shell, TO_LOGIN};
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, DEBIAN, TIMEOUT, images};
use anyhow::{Context, Result, ensure};
use regex::Regex;
use serde_json::{Value, json};
use std::time::Duration;

pub const SMALL: Case = Case {
    name: "scsi",
    about: "a scsi disk, a sata disk and a CD-ROM: names, addresses, serial numbers, and sg3-utils on what they answer",
    limit: Duration::from_secs(480),
    run: small,
};

pub const ON_DEBIAN: Case = Case {
    name: "scsi-debian",
    about: "Debian 13 booted from a sata disk, also by kexec: names by id and by path, cloud-init's data from a CD-ROM",
    limit: DEBIAN,
    run: debian,
};

fn bus(kind: &str, bus: &str, serial: &str) -> Value {
    json!({kind: {"bus": bus}, "serial": serial})
}

fn small(ctx: &TestContext) -> Result<()> {
    let manifest = Manifest::new("scsi")
        .memory("512Mi")
        .empty_disk_as("new", bus("disk", "scsi", "new-serial"), "64Mi")
        .empty_disk_as("old", bus("disk", "sata", "old-serial"), "32Mi")
        .device(
            "seed",
            bus("cdrom", "sata", "cd-serial"),
            json!({"cloudInitNoCloud": {"userData": "#cloud-config\n"}}),
        )
        .small(&images::small("6.12-disks")?, "scsi,shell");
    let vm = Vm::start(ctx, &manifest)?;
    vm.expect("husk-scsi: end\n")?;
    let shell = Shell::small(&vm)?;
    // The kernel's messages would mix with the replies.
    shell.ok("dmesg -n 1")?;
    let text = vm.console().output().all();
    ctx.part("units", || {
        unit(
            &text,
            "0:0:0:0",
            r"sd[ab] type=0 vendor=QEMU model=QEMU HARDDISK size=131072 ro=0 serial=new-serial",
        )?;
        unit(
            &text,
            "0:0:0:1",
            r"sd[ab] type=0 vendor=QEMU model=QEMU HARDDISK size=65536 ro=0 serial=old-serial",
        )?;
        unit(
            &text,
            "0:0:0:2",
            r"sr0 type=5 vendor=QEMU model=QEMU CD-ROM size=\d+ ro=[01] serial=\S*",
        )?;
        let units = text.matches("husk-scsi: 0:").count();
        ensure!(units == 3, "{units} units");
        shell.expect_contains("ls /dev", &["sda", "sdb", "sr0"])
    });
    // The kernel may call either of them sda.
    let disk = format!("/dev/{}", name(&text, "0:0:0:0")?);
    ctx.part("cd-rom", || cdrom(&shell));
    ctx.part("answers", || answers(&shell, &disk));
    ctx.part("changes", || changes(&shell, &disk));
    ctx.part("reservations", || reservations(&shell, &disk));
    ctx.part("refusals", || {
        let (status, said) = shell.run(&format!("sg_rep_zones {disk}"), TIMEOUT)?;
        ensure!(status != 0, "a disk without zones reports some:\n{said}");
        shell.ok(&format!("sg_turs {disk}"))?;
        Ok(())
    });
    ctx.part("reset", || reset(&shell, &disk));
    ctx.part("fio", || {
        for disk in ["sda", "sdb"] {
            let fio = format!(
                "cd / && fio --name=mixed --thread --filename=/dev/{disk} --size=24m --rw=randrw --direct=1 \
                 --ioengine=libaio --iodepth=16 --bssplit=512/10:4k/50:64k/30:256k/10 --fsync=64 \
                 --verify=crc32c --verify_fatal=1 --verify_state_save=0 --randseed=7"
            );
            shell.ok_within(&fio, Duration::from_secs(180))?;
        }
        Ok(())
    });
    shell.ok("! dmesg | grep -E 'I/O error|scsi.*(abort|timing out|offline)'")?;
    vm.power_off(&shell)
}

/// Checks that the guest's output for the unit at `address` matches `wanted`, a regular expression.
pub(super) fn unit(text: &str, address: &str, wanted: &str) -> Result<()> {
    let line = line(text, address)?;
    let wanted = Regex::new(&format!("^{wanted}$"))?;
    ensure!(wanted.is_match(line), "{address} is {line:?}, not {wanted}");
    Ok(())
}

pub(super) fn name<'t>(text: &'t str, address: &str) -> Result<&'t str> {
    let line = line(text, address)?;
    line.split(' ').next().context("no name")
}

fn line<'t>(text: &'t str, address: &str) -> Result<&'t str> {
    let begins = format!("husk-scsi: {address} ");
    let mut lines = text.lines();
    let line = lines.find_map(|line| line.strip_prefix(&begins));
    line.with_context(|| format!("no unit {address} in:\n{text}"))
}

fn cdrom(shell: &Shell<'_>) -> Result<()> {
    // The primary volume descriptor of ISO 9660, with the label that cloud-init looks for.
    shell.expect_contains(
        "dd if=/dev/sr0 bs=2048 skip=16 count=1 status=none | head -c 72 | tr -d '\\0'",
        &["CD001", "cidata"],
    )?;
    let write = "dd if=/dev/zero of=/dev/sr0 bs=2048 count=1 conv=notrunc,fsync status=none";
    let (status, _) = shell.run(write, TIMEOUT)?;
    ensure!(status != 0, "a CD-ROM was written");
    shell.expect_contains("sg_inq /dev/sr0", &["QEMU", "CD-ROM"])?;
    // The kernel has this page for disks only.
    shell.expect_contains("sg_vpd --page=sn /dev/sr0", &["cd-serial"])
}

/// Commands of sg3-utils that only read.
fn answers(shell: &Shell<'_>, disk: &str) -> Result<()> {
    let commands: &[(&str, &[&str])] = &[
        ("sg_inq", &["Vendor identification: QEMU", "QEMU HARDDISK"]),
        ("sg_vpd", &["Unit serial number", "Device identification"]),
        ("sg_vpd --page=sn", &["new-serial"]),
        ("sg_vpd --page=di", &["new-serial"]),
        ("sg_vpd --page=bl", &["Block limits", "unmap"]),
        ("sg_vpd --page=bdc", &["Block device characteristics"]),
        ("sg_vpd --page=lbpv", &["Logical block provisioning"]),
        ("sg_readcap", &["131071", "512"]),
        ("sg_readcap --long", &["131071", "512"]),
        ("sg_luns", &["3 lun"]),
        ("sg_modes --all", &["Caching"]),
        ("sg_opcodes", &["Inquiry", "Unmap"]),
        ("sg_turs --number=3", &[]),
        ("sg_requests", &[]),
        ("sg_get_lba_status --lba=0", &[]),
    ];
    for (command, words) in commands {
        shell.expect_contains(&format!("{command} {disk}"), words)?;
    }
    Ok(())
}

/// Commands that change some blocks and leave the others unchanged.
pub(super) fn changes(shell: &Shell<'_>, disk: &str) -> Result<()> {
    // Blocks 1000 to 1009 are all ones, 1004 and 1005 of them then unmapped: zeroes.
    shell.ok(
        "head -c 512 /dev/zero | tr '\\0' '\\377' > /ones; head -c 512 /dev/zero | tr '\\0' x > /xes; \
         cat /ones /xes > /both",
    )?;
    shell.ok(&format!(
        "dd if=/dev/zero of={disk} bs=512 seek=900 count=200 oflag=direct conv=notrunc status=none"
    ))?;
    shell.ok(&format!(
        "sg_write_same --16 --in=/ones --lba=1000 --num=10 {disk}"
    ))?;
    holds(shell, disk, (999, 1), "\\0")?;
    holds(shell, disk, (1000, 10), "\\377")?;
    holds(shell, disk, (1010, 1), "\\0")?;
    shell.ok(&format!("sg_unmap --force --lba=1004 --num=2 {disk}"))?;
    holds(shell, disk, (1000, 4), "\\377")?;
    holds(shell, disk, (1004, 2), "\\0")?;
    holds(shell, disk, (1006, 4), "\\377")?;
    // The block is compared with the first half of the data-out buffer, and replaced by the second.
    let command = format!("sg_compare_and_write --in=/both --lba=1001 --num=1 {disk}");
    shell.ok(&command)?;
    holds(shell, disk, (1000, 1), "\\377")?;
    holds(shell, disk, (1001, 1), "x")?;
    holds(shell, disk, (1002, 1), "\\377")?;
    let (status, said) = shell.run(&command, TIMEOUT)?;
    // sg3_utils(8): 14 is a miscompare.
    ensure!(status == 14, "compared as equal: status {status}: {said}");
    holds(shell, disk, (1001, 1), "x")?;
    shell.ok(&format!("sg_write_same --16 --unmap --lba=1000 --num=10 {disk}"))?;
    holds(shell, disk, (1000, 10), "\\0")
}

/// Checks that `count` blocks of `disk` from `first` contain only the byte `byte`, as `tr` writes it.
fn holds(shell: &Shell<'_>, disk: &str, (first, count): (u32, u32), byte: &str) -> Result<()> {
    let bytes = count * 512;
    shell.ok(&format!(
        "dd if={disk} bs=512 skip={first} count={count} iflag=direct of=/read status=none && \
         test $(wc -c < /read) = {bytes} && test $(tr -d '{byte}' < /read | wc -c) = 0"
    ))?;
    Ok(())
}

pub(super) fn reset(shell: &Shell<'_>, disk: &str) -> Result<()> {
    shell.ok(&format!("sg_reset --device --no-esc {disk}"))?;
    // The next command may be answered with a unit attention.
    shell.run(&format!("sg_turs {disk}"), TIMEOUT)?;
    shell.ok(&format!("sg_turs --number=10 {disk}"))?;
    Ok(())
}

pub(super) fn reservations(shell: &Shell<'_>, disk: &str) -> Result<()> {
    let out = |what: &str| shell.ok(&format!("sg_persist --out {what} {disk}"));
    let reads =
        |what: &str, words: &[&str]| shell.expect_contains(&format!("sg_persist --in {what} {disk}"), words);
    out("--register --param-sark=abc123")?;
    reads("--read-keys", &["0xabc123"])?;
    out("--reserve --param-rk=abc123 --prout-type=3")?;
    reads("--read-reservation", &["0xabc123", "Exclusive Access"])?;
    // The reservation is this guest's own: it can still write.
    shell.ok(&format!(
        "dd if=/dev/zero of={disk} bs=4096 count=1 oflag=direct conv=notrunc status=none"
    ))?;
    out("--release --param-rk=abc123 --prout-type=3")?;
    out("--clear --param-rk=abc123")?;
    let keys = shell.ok(&format!("sg_persist --in --read-keys {disk}"))?;
    ensure!(!keys.contains("0xabc123"), "the key is still registered: {keys}");
    Ok(())
}

fn debian(ctx: &TestContext) -> Result<()> {
    let manifest = Manifest::new("onscsi")
        .cpu(1, 2, 1)
        .memory("1Gi")
        .set("/terminationGracePeriodSeconds", json!(120))
        .container_disk_as(
            "root",
            bus("disk", "sata", "root-serial"),
            &images::disk("debian-13-cloud")?,
        )
        .empty_disk_as("data", bus("disk", "scsi", "data-serial"), "64Mi")
        .device(
            "seed",
            json!({"cdrom": {"bus": "sata"}}),
            json!({"cloudInitNoCloud": {
                "userData": "#cloud-config\npassword: secret\nchpasswd: {expire: false}\n",
            }}),
        );
    let vm = Vm::start(ctx, &manifest)?;
    vm.console().expect(r"Linux version 6\.12\.", TO_LOGIN)?;
    let shell = Shell::log_in(&vm, "debian", "secret")?;
    shell.ok("dmesg -n 1")?;
    ctx.part("names", || {
        shell.expect_contains(
            "ls /dev/disk/by-id",
            &[
                "scsi-0QEMU_QEMU_HARDDISK_root-serial",
                "scsi-0QEMU_QEMU_HARDDISK_root-serial-part1",
                "scsi-0QEMU_QEMU_HARDDISK_data-serial",
            ],
        )?;
        shell.expect_contains(
            "ls /dev/disk/by-path",
            &["-scsi-0:0:0:0", "-scsi-0:0:0:1", "-scsi-0:0:0:2"],
        )?;
        shell.expect_contains("ls /dev/disk/by-label", &["cidata"])?;
        shell.expect_contains(
            "lsblk -dnro HCTL,TYPE,VENDOR,MODEL,SERIAL,SIZE | sort",
            &["0:0:0:0 disk", "0:0:0:1 disk", "0:0:0:2 rom", "data-serial"],
        )
    });
    ctx.part("root", || {
        let root = shell.ok("findmnt -no SOURCE /")?;
        ensure!(root.starts_with("/dev/sd"), "the root is {root}");
        Ok(())
    });
    ctx.part("data", || {
        let id = "/dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_data-serial";
        shell.ok(&format!(
            "mkfs.ext4 -q {id} && mount -o discard {id} /mnt && cp /bin/bash /mnt && sync && umount /mnt && \
             mount {id} /mnt && cmp /bin/bash /mnt/bash && fstrim /mnt && umount /mnt"
        ))?;
        Ok(())
    });
    // A kernel that takes over devices that another kernel has set up.
    shell.ok(
        "kexec --load /boot/vmlinuz-$(uname -r) --initrd=/boot/initrd.img-$(uname -r) --reuse-cmdline && sync",
    )?;
    shell.send("kexec --exec")?;
    let shell = Shell::log_in(&vm, "debian", "secret")?;
    shell.ok("dmesg -n 1")?;
    ctx.part("kexec", || {
        shell.expect_contains(
            "ls /dev/disk/by-id; ls /dev/disk/by-path",
            &[
                "scsi-0QEMU_QEMU_HARDDISK_root-serial-part1",
                "scsi-0QEMU_QEMU_HARDDISK_data-serial",
                "-scsi-0:0:0:1",
            ],
        )?;
        let id = "/dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_data-serial";
        shell.ok(&format!(
            "mount {id} /mnt && cmp /bin/bash /mnt/bash && umount /mnt"
        ))?;
        shell.ok("! dmesg | grep -E 'I/O error|scsi.*(abort|timing out|offline)'")?;
        Ok(())
    });
    ctx.run_within(&["stop", "onscsi"], Duration::from_secs(150))?
        .ok()?;
    vm.powered_off()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_found_by_its_address() {
        let text = "noise\nhusk-scsi: 0:0:0:1 sda type=0 serial=b\nhusk-scsi: 0:0:0:10 sdb type=0 serial=c\n";
        assert_eq!(name(text, "0:0:0:1").expect("a name"), "sda");
        assert_eq!(name(text, "0:0:0:10").expect("a name"), "sdb");
        assert!(unit(text, "0:0:0:1", "sd[ab] type=0 serial=b").is_ok());
        assert!(unit(text, "0:0:0:1", "sd[ab] type=0 serial=").is_err());
        assert!(unit(text, "0:0:0:2", ".*").is_err());
    }
}
