//! A guest with a CID of the host's AF_VSOCK, by the host's vhost-vsock, with the stock driver in the guest.

use crate::harness::context::{TestContext, program};
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, PAUSE, TIMEOUT, images, initrd, poll, privileges};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::io::{BufRead, BufReader, Read, Write};
use std::time::Duration;
use vsock::{VMADDR_CID_ANY, VsockListener, VsockStream};

pub const CASE: Case = Case {
    name: "vhost-vsock",
    about: "autoattachVSOCK: connections in both directions, 32 MiB, a pause, a driver that is unbound, a reset, a CID that is in use and is free again",
    limit: Duration::from_secs(600),
    run,
};

const NAME: &str = "attached";
const CID: u32 = 1234;
/// Bytes there and back.
const BYTES: usize = 32 << 20;
/// Port 7000 has an echo.
const SCRIPT: &str = "load vmw_vsock_virtio_transport
husk-vsock serve 7000 &
echo husk-vsock: $(cat /sys/bus/virtio/drivers/vmw_vsock_virtio_transport/virtio*/device)
";

fn run(ctx: &TestContext) -> Result<()> {
    let binary = std::fs::read(program("husk-vsock")).context("no husk-vsock")?;
    let files = [
        ("bin/husk-vsock", binary.as_slice()),
        ("script", SCRIPT.as_bytes()),
    ];
    let image = initrd::with_files(ctx, &images::small("6.12-vsock")?, &files)?;
    let manifest = |name: &str| {
        Manifest::new(name)
            .set("/domain/devices/autoattachVSOCK", json!(true))
            .status("VSOCKCID", json!(CID))
            .small(&image, "script,shell")
    };
    let vm = Vm::start(ctx, &manifest(NAME))?;
    vm.expect("husk-vsock: 0x0013")?;
    let shell = Shell::small(&vm)?;
    ctx.part("to the guest", to_guest);
    ctx.part("to the host", || to_host(&shell));
    ctx.part("bytes", bytes);
    ctx.part("no socket of the VM", || no_socket(ctx));
    ctx.part("pause", || pause(ctx));
    ctx.part("unbound and bound", || unbind(&shell));
    ctx.part("confinement", || {
        privileges::confined(vm.pid("vmmPid")?).map(drop)
    });
    ctx.part("reset", || reset(ctx, &vm));
    ctx.part("a CID in use", || {
        let words = manifest("second").run_words(ctx)?;
        ctx.run_within(&words, TIMEOUT)?
            .fails_with(1, &["status.VSOCKCID 1234: another VM of this host has this CID"])?;
        echoes(&connect(7000)?, "undisturbed")
    });
    ctx.part("a CID that is free again", || {
        vm.discard()?;
        let next = Vm::start(ctx, &manifest("next"))?;
        next.expect("husk-vsock: 0x0013")?;
        echoes(&connect_soon(7000)?, "to the next")?;
        next.discard()
    });
    Ok(())
}

fn connect(port: u32) -> Result<VsockStream> {
    let stream = VsockStream::connect_with_cid_port(CID, port)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// The same, once a program of the guest listens.
fn connect_soon(port: u32) -> Result<VsockStream> {
    poll(TIMEOUT, PAUSE, || {
        Ok(connect(port).map_err(|error| format!("nobody listens: {error:#}")))
    })
}

fn echoes(mut stream: &VsockStream, text: &str) -> Result<()> {
    stream.write_all(format!("{text}\n").as_bytes())?;
    let mut echo = String::new();
    BufReader::new(stream).read_line(&mut echo)?;
    ensure!(echo == format!("{text}\n"), "{echo:?} instead of {text:?}");
    Ok(())
}

fn to_guest() -> Result<()> {
    echoes(&connect_soon(7000)?, "said to the guest")?;
    let refused = VsockStream::connect_with_cid_port(CID, 7001);
    ensure!(
        refused
            .as_ref()
            .is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset),
        "{refused:?}"
    );
    Ok(())
}

fn to_host(shell: &Shell<'_>) -> Result<()> {
    let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, 6000)?;
    shell.send("echo said to the host | socat -u - VSOCK-CONNECT:2:6000")?;
    let (mut stream, peer) = listener.accept()?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut said = String::new();
    stream.read_to_string(&mut said)?;
    ensure!(
        peer.cid() == CID && said == "said to the host\n",
        "{peer}: {said:?}"
    );
    shell.ok("true").map(drop)
}

fn bytes() -> Result<()> {
    let mut data = vec![0; BYTES];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut data)?;
    let stream = connect(7000)?;
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| (&stream).write_all(&data));
        let mut echo = vec![0; BYTES];
        (&stream).read_exact(&mut echo)?;
        sender.join().ok().context("the sender panicked")??;
        ensure!(echo == data, "the bytes are not those that were sent");
        Ok(())
    })
}

fn no_socket(ctx: &TestContext) -> Result<()> {
    let socket = ctx.runtime_dir().join("default").join(NAME).join("vsock.sock");
    ensure!(!socket.exists(), "{} exists", socket.display());
    ctx.run(&["vsock", NAME, "7000"])?.fails_with(
        1,
        &["the guest has CID 1234 of this host", "VSOCK-CONNECT:1234:7000"],
    )
}

fn pause(ctx: &TestContext) -> Result<()> {
    let stream = connect(7000)?;
    echoes(&stream, "before")?;
    ctx.run(&["pause", NAME])?.ok()?;
    (&stream).write_all(b"while paused\n")?;
    std::thread::sleep(Duration::from_secs(1));
    ctx.run(&["resume", NAME])?.ok()?;
    let mut echo = String::new();
    BufReader::new(&stream).read_line(&mut echo)?;
    ensure!(echo == "while paused\n", "{echo:?}");
    echoes(&stream, "after")
}

/// A driver that was unbound takes new connections once it is bound again.
fn unbind(shell: &Shell<'_>) -> Result<()> {
    const DRIVER: &str = "/sys/bus/virtio/drivers/vmw_vsock_virtio_transport";
    for _ in 0..3 {
        echoes(&connect(7000)?, "bound")?;
        shell.ok(&format!(
            "cd {DRIVER} && ls -d virtio* > /device && cat /device > unbind"
        ))?;
        shell.ok(&format!("cat /device > {DRIVER}/bind"))?;
        echoes(&connect_soon(7000)?, "bound again")?;
    }
    Ok(())
}

/// The guest that boots again refuses what its predecessor had accepted, and takes new connections.
fn reset(ctx: &TestContext, vm: &Vm<'_>) -> Result<()> {
    let stream = connect(7000)?;
    echoes(&stream, "before")?;
    ctx.run(&["reset", NAME])?.ok()?;
    vm.expect("husk-vsock: 0x0013")?;
    echoes(&connect_soon(7000)?, "after")?;
    (&stream).write_all(b"to a guest that is gone\n")?;
    let mut rest = [0; 64];
    match (&stream).read(&mut rest) {
        Ok(0) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(()),
        other => anyhow::bail!("{other:?} instead of the end"),
    }
}
