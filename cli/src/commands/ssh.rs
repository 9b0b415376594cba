//! `husk ssh`.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use husk_monitor::client;

use crate::failure::Failure;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Log in to a VM by the system's ssh, at the VM's address
///
/// The guest's host key is taken as it is at the first time, and must be the same while the VM runs: it is kept with
/// the VM's state and goes with it, and your own known_hosts is left alone. The guest needs a server and an account.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: ssh's own, which is that of the remote command, or 255; 1 if ssh could not be started.

Examples:
  husk ssh demo -l debian
  husk ssh demo -l debian -- uname -a
  husk ssh test/demo -- -i key -L 8080:localhost:80 -N")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// Log in as this user; else as ssh does
    #[arg(short, long, value_name = "USER")]
    login: Option<String>,

    /// Options for ssh, then a command for the guest to run
    #[arg(last = true, value_name = "SSH ARGS")]
    args: Vec<OsString>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let vm = &args.vm;
    let dir = live_vm::find(vm)?;
    let info = live_vm::block_on(async { live_vm::info(&mut client::connect(&dir).await?).await })?;
    let address = live_vm::address(vm, &info)?;
    let mut ssh = Command::new("ssh");
    ssh.args([
        "-o",
        "StrictHostKeyChecking=accept-new",
        "-o",
        "UpdateHostKeys=no",
    ])
    .arg("-o")
    .arg(format!("UserKnownHostsFile={}", known_hosts(&dir.known_hosts())));
    if let Some(user) = &args.login {
        ssh.arg("-l").arg(user);
    }
    // What follows the host are options to begin with.
    let error = ssh.arg(address.to_string()).args(&args.args).exec();
    Err(Failure::Runtime(match error.kind() {
        ErrorKind::NotFound => {
            "there is no ssh on PATH: install OpenSSH's client (package openssh-client)".into()
        }
        _ => format!("ssh: {error}"),
    }))
}

/// A path as ssh reads it, in which blanks separate files and `%` begins a token.
fn known_hosts(path: &Path) -> String {
    match path.to_str() {
        Some(path) if !path.contains(['"', '\\', '$']) => format!("\"{}\"", path.replace('%', "%%")),
        _ => "/dev/null".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ssh_finds_the_file_whatever_it_is_called() {
        let of = |path: &str| known_hosts(Path::new(path));
        assert_eq!(
            of("/run/my vms/100%/known_hosts"),
            "\"/run/my vms/100%%/known_hosts\""
        );
        assert_eq!(of("/run/\"x\"/known_hosts"), "/dev/null");
    }
}
