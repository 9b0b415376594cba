//! Starting the process that serves.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use command_fds::{CommandFdExt, FdMapping};

use super::{Flags, Params};

/// Where the process finds its listening socket.
pub(crate) const LISTENER_FD: i32 = 3;
/// The variable that says where events go.
pub(crate) const TTRPC_ADDRESS: &str = "TTRPC_ADDRESS";

pub(super) fn launch(
    flags: &Flags,
    params: &Params,
    bundle: &Path,
    listener: &UnixListener,
) -> Result<(), String> {
    let program = std::env::current_exe().map_err(|error| format!("this program is not found: {error}"))?;
    let mut command = Command::new(program);
    command
        .args([
            "-namespace",
            &flags.namespace,
            "-id",
            &flags.id,
            "-address",
            &flags.address,
        ])
        .args(params.debug.then_some("-debug"))
        .env(TTRPC_ADDRESS, &params.ttrpc_address)
        .current_dir(bundle)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let copy = listener.as_fd().try_clone_to_owned();
    let copy = copy.map_err(|error| format!("the shim's socket: {error}"))?;
    let mapping = FdMapping {
        parent_fd: copy,
        child_fd: LISTENER_FD,
    };
    // One descriptor collides with none.
    let _ = command.fd_mappings(vec![mapping]);
    // SAFETY: the closure runs in the forked child before exec and makes one system call.
    unsafe {
        command.pre_exec(|| {
            // It outlives containerd, and is in nobody's session.
            rustix::process::setsid()?;
            Ok(())
        });
    }
    let child = command
        .spawn()
        .map_err(|error| format!("the shim's process: {error}"))?;
    prefer_over(child.id()).map_err(|error| format!("oom_score_adj of the shim: {error}"))
}

/// Where memory is short, the shim goes before containerd does. It is lighter than any VM, and takes its VM along.
fn prefer_over(pid: u32) -> io::Result<()> {
    let own: i32 = fs::read_to_string("/proc/self/oom_score_adj")?
        .trim()
        .parse()
        .map_err(io::Error::other)?;
    match fs::write(
        format!("/proc/{pid}/oom_score_adj"),
        (own + 1).min(1000).to_string(),
    ) {
        // A child that has ended says why in the log.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
