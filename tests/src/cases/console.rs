//! The serial console.

use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::program::Session;
use crate::harness::vm::{Vm, console};
use crate::harness::{Case, SMALL, TIMEOUT, images};
use anyhow::{Result, ensure};

pub const SESSIONS: Case = Case {
    name: "console",
    about: "typing at the guest; ^] leaves; a second session takes over; what was said before is shown again",
    limit: SMALL,
    run: sessions,
};

pub const STALLED_CLIENT: Case = Case {
    name: "console-stalled-client",
    about: "a client that does not read neither stops the guest nor loses the log",
    limit: SMALL,
    run: stalled,
};

fn sessions(ctx: &TestContext) -> Result<()> {
    let vm = Vm::start(
        ctx,
        &Manifest::new("talk").small(&images::small("6.12")?, "shell"),
    )?;
    let shell = Shell::small(&vm)?;
    shell.expect_contains("echo $((6 * 7))", &["42"])?;
    // Keys that terminals usually handle themselves reach the guest.
    shell.send(
        "stty raw; printf 'husk-%s\\n' keys; dd bs=1 count=4 2>/dev/null | hexdump -v -e '/1 \"%02x\"'; stty -raw",
    )?;
    vm.expect("husk-keys")?;
    vm.console().send("\x03\x1a\x04\x11")?;
    vm.expect("031a0411")?;

    // More than Linux reads at once, and than a FIFO holds.
    let long = "x".repeat(1500);
    shell.expect_contains(&format!("echo {long} | wc -c"), &["1501"])?;

    let second = console(ctx, "talk")?;
    second.expect("HUSK-USERSPACE", TIMEOUT)?;
    vm.console()
        .wait(TIMEOUT)?
        .fails_with(1, &["another session took over"])?;
    second.send("echo from the $((1 + 1))nd\n")?;
    second.expect("from the 2nd", TIMEOUT)?;
    second.send("\x1d")?;
    ensure!(second.wait(TIMEOUT)?.status == 0, "^] is no clean end");

    let third = console(ctx, "talk")?;
    third.expect("from the 2nd", TIMEOUT)?;
    third.send("poweroff -f\n")?;
    vm.powered_off()?;
    third.wait(TIMEOUT)?.says(&["talk has ended"])
}

fn stalled(ctx: &TestContext) -> Result<()> {
    let image = images::small("6.12")?;
    let manifest = Manifest::new("flood").small(&image, "shell");
    let vm = Vm::start(ctx, &manifest)?;
    let shell = Shell::small(&vm)?;
    let line = "0123456789".repeat(7);
    shell.send(&format!(
        "sleep 5; for i in $(seq 1 2000); do echo \"flood $i {line}\"; done; echo husk-$((40 + 2)); poweroff -f"
    ))?;
    let log = Session::piped(ctx.husk(&["logs", "flood", "--follow"]), &ctx.log("flood.log"))?;
    // It takes over the console, and then reads only its first few kilobytes.
    let _stalled = Session::unheard(ctx.husk(&["console", "flood"]))?;
    vm.console().wait(TIMEOUT)?;
    vm.powered_off()?;
    log.wait(TIMEOUT)?
        .says(&["flood 1 0123", "flood 1000 0123", "flood 2000 0123", "husk-42"])
}
