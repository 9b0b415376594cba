//! SSH connections to a lab.

use super::state::Lab;
use crate::checkout;
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Path of the private key for all labs of this user, which start from one snapshot.
fn key_path() -> Result<PathBuf> {
    Ok(checkout::folder(checkout::cache()?.join("lab"))?.join("key"))
}

/// Makes the labs' key pair if there is none; returns the public key.
pub fn key() -> Result<String> {
    let key = key_path()?;
    let public = key.with_extension("pub");
    let lock = File::create(key.with_extension("lock"))?;
    lock.lock()?;
    if !key.exists() || !public.exists() {
        let _ = std::fs::remove_file(&key);
        let status = Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-C", "husk-lab", "-f"])
            .arg(&key)
            .status()
            .context("cannot start ssh-keygen")?;
        if !status.success() {
            bail!("ssh-keygen: {status}");
        }
    }
    Ok(std::fs::read_to_string(public)?.trim().to_owned())
}

/// An `ssh` command to the lab, as root, to which the caller adds the remote command.
pub fn command(port: u16) -> Command {
    let mut command = Command::new("ssh");
    command
        .args(["-F", "/dev/null", "-i"])
        .arg(key_path().unwrap_or_default())
        .args(["-p", &port.to_string(), "-l", "root"]);
    for option in [
        "BatchMode=yes",
        "IdentitiesOnly=yes",
        "IdentityAgent=none",
        // A loopback port and a disposable machine: checking its host key proves nothing.
        "StrictHostKeyChecking=no",
        "UserKnownHostsFile=/dev/null",
        "LogLevel=ERROR",
        "ConnectTimeout=30",
        // A hung lab ends a command after two minutes instead of never.
        "ServerAliveInterval=15",
        "ServerAliveCountMax=8",
        "ControlPath=none",
        "EscapeChar=none",
        "Ciphers=aes128-gcm@openssh.com",
    ] {
        command.args(["-o", option]);
    }
    command.arg("127.0.0.1");
    command
}

/// True if the lab's sshd sends its banner within `limit`. A slower lab counts as hung.
pub fn greets(port: u16, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    let Ok(mut stream) =
        TcpStream::connect_timeout(&SocketAddrV4::new(Ipv4Addr::LOCALHOST, port).into(), limit)
    else {
        return false;
    };
    let left = deadline
        .saturating_duration_since(Instant::now())
        .max(Duration::from_millis(1));
    let mut greeting = [0; 4];
    stream.set_read_timeout(Some(left)).is_ok()
        && stream.read_exact(&mut greeting).is_ok()
        && &greeting == b"SSH-"
}

/// True if the lab runs a command within `limit`.
pub fn answers(lab: &Lab, limit: Duration) -> bool {
    quietly(lab.port, "true", limit).is_some_and(|(status, _)| status == Some(0))
}

/// Runs the shell command `remote`, with no input and with errors hidden. Returns its exit status (none if killed by a
/// signal) and output (at most 64 KiB), or nothing if it took longer than `limit`.
pub fn quietly(port: u16, remote: &str, limit: Duration) -> Option<(Option<i32>, String)> {
    let mut child = command(port)
        .arg(remote)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let deadline = Instant::now() + limit;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status.code()),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            _ => break None,
        }
    };
    if status.is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
    let mut output = String::new();
    if let Some(stdout) = child.stdout.take() {
        let _ = stdout.take(65_536).read_to_string(&mut output);
    }
    Some((status?, output))
}
