//! Starting the process that serves.
//!
//! The process creates its socket and reports that on standard output. If containerd kills `start` meanwhile, the
//! process gets no container, removes the socket and exits.

use std::fs;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use super::flags::Flags;
use super::params::{Params, TTRPC_ADDRESS};
use super::socket::Address;

/// The report of the process when it, or another one, listens.
pub(crate) const LISTENING: &str = "listens\n";
/// Maximum length of an error report, in bytes.
const MOST: u64 = 4096;

pub(super) fn launch(flags: &Flags, params: &Params, bundle: &Path, address: &Address) -> Result<(), String> {
    let program = std::env::current_exe().map_err(|error| format!("cannot find own executable: {error}"))?;
    let mut command = Command::new(program);
    command
        .args(["-namespace", &flags.namespace, "-id", &flags.id])
        .args(["-address", &flags.address, "-socket"])
        .arg(address.path())
        .args(params.debug.then_some("-debug"))
        .env(TTRPC_ADDRESS, &params.ttrpc_address)
        .current_dir(bundle)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    // SAFETY: the closure runs in the forked child before exec and makes one system call.
    unsafe {
        command.pre_exec(|| {
            // The process outlives containerd and needs a session of its own.
            rustix::process::setsid()?;
            Ok(())
        });
    }
    let mut child = command
        .spawn()
        .map_err(|error| format!("the shim's process: {error}"))?;
    prefer_over(child.id()).map_err(|error| format!("oom_score_adj of the shim: {error}"))?;
    let mut answer = String::new();
    if let Some(stdout) = child.stdout.take() {
        let read = stdout.take(MOST).read_to_string(&mut answer);
        read.map_err(|error| format!("the shim's process: {error}"))?;
    }
    match answer.as_str() {
        LISTENING => Ok(()),
        "" => Err("the shim ended before it listened".into()),
        why => Err(why.trim_end().to_owned()),
    }
}

/// Makes the OOM killer prefer the shim to containerd. The VM ends with its shim.
fn prefer_over(pid: u32) -> io::Result<()> {
    let own: i32 = fs::read_to_string("/proc/self/oom_score_adj")?
        .trim()
        .parse()
        .map_err(io::Error::other)?;
    match fs::write(
        format!("/proc/{pid}/oom_score_adj"),
        (own + 1).min(1000).to_string(),
    ) {
        // If the child has exited, its log holds the cause.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
