//! Logs in to a guest with an SSH server, by a key in its manifest.

use crate::harness::TIMEOUT;
use crate::harness::context::TestContext;
use crate::harness::program::Session;
use crate::harness::vm::Vm;
use anyhow::{Result, ensure};
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

/// Makes a key for this case; returns the public key.
pub fn key(ctx: &TestContext) -> Result<String> {
    let mut command = Command::new("ssh-keygen");
    command.args(["-q", "-t", "ed25519", "-N", "", "-C", "e2e", "-f"]);
    command.arg(ctx.path("key"));
    ctx.finish(command, TIMEOUT)?.ok()?;
    Ok(std::fs::read_to_string(ctx.path("key.pub"))?.trim().to_owned())
}

/// `husk ssh` runs a command as the guest's user, and passes its status on.
pub fn logs_in(vm: &Vm<'_>) -> Result<()> {
    let ctx = vm.ctx();
    let key = ctx.path("key");
    let ssh = |remote: &str| {
        let mut command = ctx.husk(&["ssh", vm.name(), "-l", "debian", "--", "-i"]);
        command.arg(&key).args(["-o", "BatchMode=yes", remote]);
        ctx.finish(command, TIMEOUT)
    };
    ssh("echo $(id -un) at $(hostname)")?.says(&["debian at demo"])?;
    let answer = ssh("exit 7")?;
    ensure!(answer.status == 7, "status {}: {}", answer.status, answer.text);
    Ok(())
}

/// `ssh` over `husk vsock`: systemd has sshd listen on port 22 of the guest's vsock device.
pub fn logs_in_by_vsock(vm: &Vm<'_>) -> Result<()> {
    let ctx = vm.ctx();
    let husk = ctx.husk(&["vsock", vm.name(), "22"]);
    let words: Vec<String> = std::iter::once(husk.get_program())
        .chain(husk.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let mut command = Command::new("ssh");
    command.args(["-o", &format!("ProxyCommand={}", words.join(" "))]);
    command.args([
        "-o",
        "StrictHostKeyChecking=no",
        "-o",
        "UserKnownHostsFile=/dev/null",
    ]);
    command.args(["-o", "BatchMode=yes", "-i"]).arg(ctx.path("key"));
    command.args(["debian@demo", "echo $(id -un) by vsock"]);
    command.envs(husk.get_envs().filter_map(|(name, value)| Some((name, value?))));
    ctx.finish(command, TIMEOUT)?.says(&["debian by vsock"])?;
    Ok(())
}

/// `husk port-forward` forwards connections to this machine to the guest's server.
pub fn greets(vm: &Vm<'_>) -> Result<()> {
    let ctx = vm.ctx();
    let forward = Session::piped(
        ctx.husk(&["port-forward", vm.name(), "0:22"]),
        &ctx.log("forward.log"),
    )?;
    let said = forward.expect(r"127\.0\.0\.1:(\d+)", TIMEOUT)?;
    let near = SocketAddr::from(([127, 0, 0, 1], said[1].parse()?));
    let mut stream = TcpStream::connect_timeout(&near, TIMEOUT)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut banner = [0; 8];
    stream.read_exact(&mut banner)?;
    ensure!(&banner == b"SSH-2.0-", "{banner:?}");
    Ok(())
}
