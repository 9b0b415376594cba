//! The vsock device, with the stock driver and socat in the guest.

use crate::harness::context::{TestContext, program};
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::program::Session;
use crate::harness::registry::sh;
use crate::harness::vm::Vm;
use crate::harness::{Case, PAUSE, TIMEOUT, images, initrd, poll, until};
use anyhow::{Context, Result, ensure};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "vsock",
    about: "connections in both directions with socat, 200 at once, 32 MiB with a checksum, peers that go, a pause, a driver that is unbound, a reset",
    limit: Duration::from_secs(600),
    run: |ctx| run(ctx, 32, 200),
};

pub const LARGE: Case = Case {
    name: "vsock-1GiB",
    about: "the same, with 1 GiB and 1,000 connections",
    limit: Duration::from_secs(1800),
    run: |ctx| run(ctx, 1024, 1000),
};

const NAME: &str = "vsock";
/// Time limit of the many connections and of the bytes.
const LOAD: Duration = Duration::from_secs(900);

/// Port 5000 has socat with a new cat for each connection, port 7000 our own echo.
const SCRIPT: &str = "load vmw_vsock_virtio_transport
socat VSOCK-LISTEN:5000,fork EXEC:/bin/cat &
husk-vsock serve 7000 &
echo husk-vsock: $(cat /sys/bus/virtio/drivers/vmw_vsock_virtio_transport/virtio*/device)
";

fn run(ctx: &TestContext, mebibytes: u32, connections: usize) -> Result<()> {
    // The case itself holds the ends of all connections.
    let most = Some(4096);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: most,
            maximum: most,
        },
    )?;
    let binary = std::fs::read(program("husk-vsock")).context("no husk-vsock")?;
    let files = [
        ("bin/husk-vsock", binary.as_slice()),
        ("script", SCRIPT.as_bytes()),
    ];
    let image = initrd::with_files(ctx, &images::small("6.12-vsock")?, &files)?;
    let vm = Vm::start(ctx, &Manifest::new(NAME).small(&image, "script,shell"))?;
    vm.expect("husk-vsock: 0x0013")?;
    let shell = Shell::small(&vm)?;
    ctx.part("to the guest", || to_guest(ctx));
    ctx.part("to the host", || to_host(ctx, &shell));
    ctx.part("idle", || idle(&vm));
    ctx.part("bytes", || bytes(ctx, mebibytes));
    ctx.part("many at once to the guest", || many_to_guest(ctx, connections));
    ctx.part("many at once to the host", || {
        many_to_host(ctx, &shell, connections)
    });
    ctx.part("peers that go", || peers_go(ctx, &shell));
    ctx.part("slow readers", || {
        slow_host(ctx)?;
        slow_guest(ctx, &shell)
    });
    ctx.part("pause", || pause(ctx));
    ctx.part("unbound and bound", || unbind(ctx, &shell));
    ctx.part("reset", || reset(ctx, &vm));
    ctx.part("end", || end(ctx, &vm));
    Ok(())
}

fn socket(ctx: &TestContext, name: &str) -> PathBuf {
    ctx.runtime_dir().join("default").join(NAME).join(name)
}

/// A connection to a port of the guest, by the protocol itself.
fn connect(ctx: &TestContext, port: u32) -> Result<UnixStream> {
    let stream = UnixStream::connect(socket(ctx, "vsock.sock"))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    (&stream).write_all(format!("CONNECT {port}\n").as_bytes())?;
    let answer = line(&stream)?;
    ensure!(answer.starts_with("OK "), "{answer:?}");
    Ok(stream)
}

/// The same, once a program of the guest listens.
fn connect_soon(ctx: &TestContext, port: u32) -> Result<UnixStream> {
    poll(TIMEOUT, PAUSE, || {
        Ok(connect(ctx, port).map_err(|error| format!("nobody listens: {error:#}")))
    })
}

/// The next line. Takes no byte after it.
fn line(mut stream: &UnixStream) -> Result<String> {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        stream
            .read_exact(&mut byte)
            .with_context(|| format!("after {line:?}"))?;
        line.push(byte[0]);
    }
    Ok(String::from_utf8(line)?)
}

fn echoes(stream: &UnixStream, text: &str) -> Result<()> {
    let mut to_guest = stream;
    to_guest.write_all(format!("{text}\n").as_bytes())?;
    let echo = line(stream)?;
    ensure!(echo == format!("{text}\n"), "{echo:?} instead of {text:?}");
    Ok(())
}

/// The other end closes the connection.
fn ends(mut stream: &UnixStream) -> Result<()> {
    let mut rest = [0; 64];
    match stream.read(&mut rest) {
        Ok(0) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => Ok(()),
        other => anyhow::bail!("{other:?} instead of the end"),
    }
}

fn husk(ctx: &TestContext, script: &str) -> Result<String> {
    sh(ctx, &script.replace("husk ", &husk_words(ctx)))
}

/// `husk` with the directories of this case, for a shell.
fn husk_words(ctx: &TestContext) -> String {
    format!(
        "HUSK_RUNTIME_DIR={} {} ",
        ctx.runtime_dir().display(),
        program("husk").display()
    )
}

fn to_guest(ctx: &TestContext) -> Result<()> {
    // The end of the input ends cat, which ends the connection.
    let text = husk(ctx, "echo said to the guest | husk vsock vsock 5000")?;
    ensure!(text == "said to the guest\n", "{text:?}");
    ctx.run(&["vsock", NAME, "5001"])?.fails_with(
        1,
        &["error: vsock: the guest refuses vsock port 5001: no program"],
    )?;
    ctx.run(&["vsock", "nobody", "5000"])?
        .fails_with(1, &["error: no VM nobody is running"])?;
    let socat = format!(
        "printf 'CONNECT 5000\\nby socat' | socat -t 10 - UNIX-CONNECT:{}",
        socket(ctx, "vsock.sock").display()
    );
    let text = sh(ctx, &socat)?;
    ensure!(
        text.starts_with("OK ") && text.ends_with("\nby socat"),
        "{text:?}"
    );
    Ok(())
}

fn to_host(ctx: &TestContext, shell: &Shell<'_>) -> Result<()> {
    let (status, text) = shell.run("echo x | socat - VSOCK-CONNECT:2:6000", TIMEOUT)?;
    ensure!(
        status == 1 && text.contains("Connection reset by peer"),
        "{status}: {text}"
    );
    let path = socket(ctx, "vsock.sock_6000");
    let command = format!("socat -u UNIX-LISTEN:{} STDOUT", path.display());
    let mut listener = std::process::Command::new("sh");
    listener.args(["-c", &command]);
    let listener = Session::piped(listener, &ctx.log("listener.log"))?;
    until(|| Ok(path.exists()))?;
    shell.ok("echo said to the host | socat -u - VSOCK-CONNECT:2:6000")?;
    let said = listener.wait(TIMEOUT)?.ok()?;
    ensure!(said == "said to the host\n", "{said:?}");
    // A CID that is not the host's.
    let (status, text) = shell.run("echo x | socat - VSOCK-CONNECT:5:6000", TIMEOUT)?;
    ensure!(status == 1, "{text}");
    Ok(())
}

/// A connection over which nothing goes costs no wake-ups.
fn idle(vm: &Vm<'_>) -> Result<()> {
    let stream = connect(vm.ctx(), 7000)?;
    echoes(&stream, "before")?;
    let tasks = format!("/proc/{}/task", vm.pid("vmmPid")?);
    let switches = || -> Result<String> {
        for task in std::fs::read_dir(&tasks)?.flatten() {
            if std::fs::read_to_string(task.path().join("comm"))?.trim() == "vsock" {
                let status = std::fs::read_to_string(task.path().join("status"))?;
                let count = status
                    .lines()
                    .find(|line| line.starts_with("voluntary_ctxt_switches"));
                return Ok(count.context("no count")?.to_owned());
            }
        }
        anyhow::bail!("no thread vsock in {tasks}")
    };
    let before = switches()?;
    std::thread::sleep(Duration::from_secs(3));
    let after = switches()?;
    ensure!(before == after, "{before}, then {after}");
    echoes(&stream, "after")
}

/// Through the guest and back, so that the bytes cross the device in both directions at once.
fn bytes(ctx: &TestContext, mebibytes: u32) -> Result<()> {
    sh(ctx, &format!("head -c {mebibytes}M /dev/urandom > data"))?;
    let started = std::time::Instant::now();
    husk(ctx, "husk vsock vsock 7000 < data > echo")?;
    let seconds = started.elapsed().as_secs_f64();
    println!("{mebibytes} MiB there and back in {seconds:.1} s");
    sh(
        ctx,
        "[ \"$(sha256sum < data)\" = \"$(sha256sum < echo)\" ] && rm data echo",
    )
    .map(drop)
}

fn many_to_guest(ctx: &TestContext, count: usize) -> Result<()> {
    let started = std::time::Instant::now();
    let connections = (0..count)
        .map(|_| connect(ctx, 7000))
        .collect::<Result<Vec<_>>>()?;
    println!("{count} connections in {:.1} s", started.elapsed().as_secs_f64());
    for (number, stream) in connections.iter().enumerate() {
        echoes(stream, &format!("line {number}"))?;
    }
    drop(connections);
    // All of them are free again.
    let again = (0..count)
        .map(|_| connect(ctx, 7000))
        .collect::<Result<Vec<_>>>()?;
    echoes(&again[count - 1], "again")?;
    drop(again);
    // The guest has taken note of all their ends: its own connections wait for 2 s only.
    echoes(&connect(ctx, 7000)?, "settled")
}

fn many_to_host(ctx: &TestContext, shell: &Shell<'_>, count: usize) -> Result<()> {
    let path = socket(ctx, "vsock.sock_6001");
    let listener = UnixListener::bind(&path)?;
    let server = std::thread::spawn(move || -> Result<()> {
        let streams = (0..count)
            .map(|_| Ok(listener.accept()?.0))
            .collect::<Result<Vec<_>>>()?;
        for stream in streams {
            stream.set_read_timeout(Some(TIMEOUT))?;
            let mut text = String::new();
            BufReader::new(&stream).read_line(&mut text)?;
            (&stream).write_all(text.as_bytes())?;
        }
        Ok(())
    });
    let command = format!("husk-vsock connect 6001 {count}");
    let (status, text) = shell.run(&command, LOAD)?;
    ensure!(
        status == 0 && text.contains(&format!("{count} connections")),
        "{status}: {text}"
    );
    server.join().ok().context("the listener panicked")??;
    std::fs::remove_file(path)?;
    Ok(())
}

fn peers_go(ctx: &TestContext, shell: &Shell<'_>) -> Result<()> {
    // A program of the guest is killed.
    shell.send("socat VSOCK-LISTEN:5002 EXEC:'/bin/sleep 1000' & echo $! > /pid")?;
    let stream = connect_soon(ctx, 5002)?;
    shell.ok("kill -9 $(cat /pid)")?;
    ends(&stream)?;
    // A program of the host is killed.
    let mut words = ctx.husk(&["vsock", NAME, "5000"]);
    let mut client = words.stdin(std::process::Stdio::piped()).spawn()?;
    shell.ok("until pidof cat; do sleep 0.1; done")?;
    client.kill()?;
    client.wait()?;
    shell.ok("while pidof cat; do sleep 0.1; done").map(drop)
}

/// A connection whose host does not read holds up no other.
fn slow_host(ctx: &TestContext) -> Result<()> {
    let slow = connect(ctx, 7000)?;
    slow.set_nonblocking(true)?;
    let mut sent = 0;
    // Until the echo has filled every buffer on its way.
    for _ in 0..200 {
        while let Ok(count) = (&slow).write(&[b'x'; 4096]) {
            sent += count;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    for number in 0..20 {
        echoes(&connect(ctx, 7000)?, &format!("quick {number}"))?;
    }
    slow.set_nonblocking(false)?;
    slow.shutdown(std::net::Shutdown::Write)?;
    let mut bytes = Vec::new();
    (&slow).read_to_end(&mut bytes)?;
    ensure!(bytes.len() == sent, "{} of {sent} bytes", bytes.len());
    Ok(())
}

/// A program of the guest gets all bytes, also after the device has given up the closed connection.
fn slow_guest(ctx: &TestContext, shell: &Shell<'_>) -> Result<()> {
    const BYTES: usize = 200_000;
    shell.send("rm -f /count; socat -u VSOCK-LISTEN:5003 SYSTEM:'sleep 15; wc -c > /count' &")?;
    let stream = connect_soon(ctx, 5003)?;
    let writer = std::thread::spawn(move || (&stream).write_all(&[b'x'; BYTES]));
    writer.join().ok().context("the writer panicked")??;
    shell
        .ok(&format!(
            "until [ \"$(cat /count 2>/dev/null)\" = {BYTES} ]; do sleep 0.5; done"
        ))
        .map(drop)
}

fn pause(ctx: &TestContext) -> Result<()> {
    let stream = connect(ctx, 7000)?;
    ctx.run(&["pause", NAME])?.ok()?;
    (&stream).write_all(b"while paused\n")?;
    let begun = UnixStream::connect(socket(ctx, "vsock.sock"))?;
    begun.set_read_timeout(Some(TIMEOUT))?;
    (&begun).write_all(b"CONNECT 7000\nearly\n")?;
    std::thread::sleep(Duration::from_secs(1));
    ctx.run(&["resume", NAME])?.ok()?;
    ensure!(line(&stream)? == "while paused\n");
    ensure!(line(&begun)?.starts_with("OK ") && line(&begun)? == "early\n");
    Ok(())
}

fn unbind(ctx: &TestContext, shell: &Shell<'_>) -> Result<()> {
    const DRIVER: &str = "/sys/bus/virtio/drivers/vmw_vsock_virtio_transport";
    for _ in 0..3 {
        let stream = connect(ctx, 7000)?;
        shell.ok(&format!(
            "cd {DRIVER} && ls -d virtio* > /device && cat /device > unbind"
        ))?;
        ends(&stream)?;
        ctx.run(&["vsock", NAME, "7000"])?
            .fails_with(1, &["its vsock driver is not loaded"])?;
        shell.ok(&format!("cat /device > {DRIVER}/bind"))?;
        echoes(&connect(ctx, 7000)?, "bound")?;
    }
    Ok(())
}

fn reset(ctx: &TestContext, vm: &Vm<'_>) -> Result<()> {
    let stream = connect(ctx, 7000)?;
    echoes(&stream, "before")?;
    ctx.run(&["reset", NAME])?.ok()?;
    ends(&stream)?;
    vm.expect("husk-vsock: 0x0013")?;
    let after = connect_soon(ctx, 7000)?;
    echoes(&after, "after")
}

fn end(ctx: &TestContext, vm: &Vm<'_>) -> Result<()> {
    let listener = UnixListener::bind(socket(ctx, "vsock.sock_6002"))?;
    let mut command = ctx.husk(&["vsock", NAME, "7000"]);
    let mut client = command
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()?;
    let mut input = client.stdin.take().context("no input")?;
    input.write_all(b"echo\n")?;
    let mut output = client.stdout.take().context("no output")?;
    let mut echo = [0; 5];
    output.read_exact(&mut echo)?;
    vm.discard()?;
    let ended = client.wait_with_output()?;
    let text = String::from_utf8_lossy(&ended.stderr).into_owned();
    ensure!(
        ended.status.code() == Some(1) && text.contains("error: vsock has ended"),
        "{ended:?}"
    );
    drop((input, listener));
    Ok(())
}
