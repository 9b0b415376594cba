//! SCSI devices of the host to which a guest's commands are passed through.

mod host;

use crate::cases::scsi::{changes, name, reservations, reset, unit};
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, TIMEOUT, images};
use anyhow::{Result, ensure};
use host::{Loopback, PRODUCT, ScsiDebug, VENDOR};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

pub const PASSED_ON: Case = Case {
    name: "lun",
    about: "a lun on scsi_debug: its own answers, fio, errors of the medium, what is forbidden, a device that goes away",
    limit: Duration::from_secs(600),
    run: passed_on,
};

pub const RESERVED: Case = Case {
    name: "lun-reservation",
    about: "a lun with reservation: true on the kernel's own target: the guest's reservation is the host's device's",
    limit: Duration::from_secs(480),
    run: reserved,
};

/// Exit statuses of sg3_utils(8).
const MEDIUM_HARD: i32 = 3;
const INVALID_OP: i32 = 9;
const DATA_PROTECT: i32 = 7;

/// Entries of `disks[]` and `volumes[]` for a LUN.
fn lun(manifest: Manifest, name: &str, lun: Value, device: &Path) -> Manifest {
    let claim = json!({"persistentVolumeClaim": {"claimName": name}});
    manifest
        .device(name, json!({"lun": lun}), claim)
        .volume(name, device)
}

fn passed_on(ctx: &TestContext) -> Result<()> {
    let device = ScsiDebug::new(ctx)?;
    let small = images::small("6.12-disks")?;
    ctx.part("what is no lun", || {
        let refused = |path: &Path, words: &str| {
            let manifest =
                lun(Manifest::new("no"), "data", json!({"bus": "scsi"}), path).small(&small, "poweroff");
            let said = ctx.run(&manifest.run_words(ctx)?)?.fails(1)?;
            expect_contains(&said, &[words])
        };
        let partition = format!("{}1", device.disks[0].display());
        refused(
            Path::new(&partition),
            "is a partition, and a `lun` is a whole SCSI device",
        )?;
        let image = ctx.path("image");
        std::fs::File::create_new(&image)?.set_len(1 << 20)?;
        let image = image.display().to_string();
        let looped = ctx.host(&["losetup", "--find", "--show", &image])?;
        let looped = looped.trim();
        let told = refused(
            Path::new(looped),
            "is not a SCSI device; use `disk` instead of `lun`",
        );
        ctx.host(&["losetup", "--detach", looped])?;
        told
    });
    let manifest = Manifest::new("lun").memory("512Mi");
    let manifest = lun(manifest, "data", json!({"bus": "scsi"}), &device.disks[0]);
    let read_only = json!({"bus": "scsi", "readonly": true});
    let manifest = lun(manifest, "fixed", read_only, &device.disks[1]).small(&small, "scsi,shell");
    let vm = Vm::start(ctx, &manifest)?;
    vm.expect("husk-scsi: end\n")?;
    let shell = Shell::small(&vm)?;
    // The kernel's messages would mix with the replies.
    shell.ok("dmesg -n 1")?;
    let text = vm.console().output().all();
    let (disk, fixed) = (name(&text, "0:0:0:0")?, name(&text, "0:0:0:1")?);
    let (disk, fixed) = (&format!("/dev/{disk}"), &format!("/dev/{fixed}"));
    ctx.part("units", || {
        let is =
            |ro| format!(r"sd[ab] type=0 vendor={VENDOR} model={PRODUCT} size=131072 ro={ro} serial=\S+");
        unit(&text, "0:0:0:0", &is(0))?;
        unit(&text, "0:0:0:1", &is(1))
    });
    ctx.part("answers", || answers(ctx, &shell, &device.disks[0], disk));
    ctx.part("changes", || changes(&shell, disk));
    ctx.part("fio", || {
        let fio = format!(
            "cd / && fio --name=mixed --thread --filename={disk} --size=24m --rw=randrw --direct=1 --ioengine=libaio \
             --iodepth=16 --bssplit=512/10:4k/50:64k/30:1m/10 --fsync=64 --verify=crc32c --verify_fatal=1 \
             --verify_state_save=0 --randseed=7"
        );
        shell.ok_within(&fio, Duration::from_secs(180))?;
        // The host sees what the guest wrote.
        let sum = |path: &str| format!("dd if={path} bs=1M count=24 iflag=direct status=none | md5sum");
        let host = ctx.host(&["sh", "-c", &sum(&device.disks[1].display().to_string())])?;
        shell.expect_contains(&sum(disk), &[host.trim()])
    });
    ctx.part("refusals", || refusals(&shell, disk, fixed));
    ctx.part("medium error", || {
        // Of the ten blocks from 0x1234.
        device.fail(2)?;
        let read = |first: &str| {
            format!("sg_raw --request=4096 --outfile=/read {disk} 28 00 00 00 {first} 00 00 08 00")
        };
        let (status, said) = shell.run(&read("12 30"), TIMEOUT)?;
        ensure!(status == MEDIUM_HARD, "status {status}: {said}");
        expect_contains(&said, &["Medium Error", "Unrecovered read error", "0x1234"])?;
        shell.ok(&read("13 00"))?;
        let (status, _) = shell.run(
            &format!("dd if={disk} bs=4096 skip=582 count=1 iflag=direct of=/read"),
            TIMEOUT,
        )?;
        ensure!(status != 0, "a bad block was read");
        device.fail(0)?;
        shell.ok(&read("12 30"))?;
        Ok(())
    });
    ctx.part("reset", || reset(&shell, disk));
    ctx.part("gone", || {
        device.pull(&device.disks[0])?;
        let command = format!("sg_raw --request=8 {disk} 25 00 00 00 00 00 00 00 00 00");
        let (status, said) = shell.run(&command, TIMEOUT)?;
        ensure!(status != 0, "a device that is gone answers: {said}");
        let (status, _) = shell.run(
            &format!("dd if={disk} bs=4096 count=1 iflag=direct of=/read"),
            TIMEOUT,
        )?;
        ensure!(status != 0, "a device that is gone was read");
        // The other disk is unchanged.
        shell.ok(&format!("sg_turs {fixed}"))?;
        ensure!(vm.inspect()?["phase"] == "Running", "the VM does not run");
        Ok(())
    });
    vm.power_off(&shell)?;
    device.unload(ctx)
}

/// The guest reads the same data about the device as the host, except the maximum transfer length.
fn answers(ctx: &TestContext, shell: &Shell<'_>, there: &Path, here: &str) -> Result<()> {
    let there = there.display().to_string();
    let commands = [
        "sg_inq --hex",
        "sg_vpd --page=sn --hex",
        "sg_vpd --page=di --hex",
        "sg_vpd --page=bdc --hex",
        "sg_vpd --page=lbpv --hex",
        "sg_vpd --page=sv --hex",
        "sg_readcap --long",
        "sg_modes --all --hex",
        "sg_get_lba_status --lba=0",
    ];
    for command in commands {
        let mut words: Vec<_> = command.split(' ').collect();
        words.push(&there);
        let host = ctx.host(&words)?;
        let guest = shell.ok(&format!("{command} {here}"))?;
        let lines = |text: &str| text.trim().replace("\r\n", "\n");
        ensure!(
            lines(&guest) == lines(&host),
            "{command}: the guest is told\n{guest}\nand the host\n{host}"
        );
    }
    // Husk assigns the LUNs, whatever LUN the device has on the host.
    shell.expect_contains(&format!("sg_luns {here}"), &["2 lun"])?;
    // At most 512 KiB are passed through at once.
    let limit = shell.ok(&format!("sg_vpd --page=bl {here}"))?;
    let length = limit.lines().find_map(|line| {
        let number = line.trim().strip_prefix("Maximum transfer length: 0x")?;
        u64::from_str_radix(number.split(' ').next()?, 16).ok()
    });
    ensure!(
        length.is_some_and(|blocks| (8..=1024).contains(&blocks)),
        "{limit}"
    );
    let opcodes = shell.ok(&format!("sg_opcodes {here}"))?;
    expect_contains(&opcodes, &["Inquiry", "Unmap", "Compare and write"])?;
    ensure!(
        !opcodes.contains("Format unit") && !opcodes.contains("Write buffer"),
        "what is forbidden is offered:\n{opcodes}"
    );
    Ok(())
}

fn refusals(shell: &Shell<'_>, disk: &str, fixed: &str) -> Result<()> {
    for (command, cdb) in [
        ("FORMAT UNIT", "04 00 00 00 00 00"),
        ("SEND DIAGNOSTIC", "1d 04 00 00 00 00"),
        ("WRITE BUFFER", "3b 05 00 00 00 00 00 00 00 00"),
        ("LOG SELECT", "4c 00 00 00 00 00 00 00 00 00"),
        ("EXTENDED COPY", "83 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"),
        ("PERSISTENT RESERVE IN", "5e 00 00 00 00 00 00 00 00 00"),
        ("SET TARGET PORT GROUPS", "a4 0a 00 00 00 00 00 00 00 00 00 00"),
    ] {
        let (status, said) = shell.run(&format!("sg_raw {disk} {cdb}"), TIMEOUT)?;
        ensure!(status == INVALID_OP, "{command}: status {status}: {said}");
        expect_contains(&said, &["Illegal Request", "Invalid command operation code"])?;
    }
    let write = format!("sg_raw --readonly --send=512 --infile=/ones {fixed} 2a 00 00 00 00 00 00 00 01 00");
    shell.ok("head -c 512 /dev/zero | tr '\\0' '\\377' > /ones")?;
    let (status, said) = shell.run(&write, TIMEOUT)?;
    ensure!(status == DATA_PROTECT, "status {status}: {said}");
    expect_contains(&said, &["Data Protect"])
}

fn reserved(ctx: &TestContext) -> Result<()> {
    let device = Loopback::new(ctx)?;
    let reservation = json!({"bus": "scsi", "reservation": true});
    let manifest = lun(
        Manifest::new("reserved").memory("512Mi"),
        "data",
        reservation,
        &device.disk,
    );
    let manifest = manifest.small(&images::small("6.12-disks")?, "scsi,shell");
    let vm = Vm::start(ctx, &manifest)?;
    vm.expect("husk-scsi: end\n")?;
    let shell = Shell::small(&vm)?;
    shell.ok("dmesg -n 1")?;
    let text = vm.console().output().all();
    let disk = &format!("/dev/{}", name(&text, "0:0:0:0")?);
    let there = device.disk.display().to_string();
    let keys = || ctx.host(&["sg_persist", "--in", "--read-keys", &there]);
    ctx.part("reservations", || reservations(&shell, disk));
    ctx.part("the host's view", || {
        shell.ok(&format!("sg_persist --out --register --param-sark=5eed {disk}"))?;
        expect_contains(&keys()?, &["0x5eed"])?;
        shell.ok(&format!(
            "sg_persist --out --reserve --param-rk=5eed --prout-type=1 {disk}"
        ))?;
        let host = ctx.host(&["sg_persist", "--in", "--read-reservation", &there])?;
        expect_contains(&host, &["0x5eed", "Write Exclusive"])?;
        shell.ok(&format!("sg_persist --out --clear --param-rk=5eed {disk}"))?;
        ensure!(!keys()?.contains("0x5eed"), "the key is still registered");
        Ok(())
    });
    ctx.part("compare and write", || {
        shell.ok("head -c 512 /dev/zero > /zeroes; head -c 512 /dev/zero | tr '\\0' x > /xes; cat /zeroes /xes > /both")?;
        shell.ok(&format!("dd if=/zeroes of={disk} bs=512 seek=8 oflag=direct conv=notrunc status=none"))?;
        let command = format!("sg_compare_and_write --in=/both --lba=8 --num=1 {disk}");
        shell.ok(&command)?;
        let (status, said) = shell.run(&command, TIMEOUT)?;
        // sg3_utils(8): 14 is a miscompare.
        ensure!(status == 14, "compared as equal: status {status}: {said}");
        Ok(())
    });
    vm.power_off(&shell)
}
