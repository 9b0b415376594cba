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

/// Log in to a VM with ssh
///
/// Runs the ssh client of this host with the address of the VM. The host key of the guest is accepted on the first
/// connection and checked afterwards. It is stored with the state of the VM, not in your known_hosts. The guest needs an
/// SSH server and an account.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: that of ssh (the status of the remote command, or 255); 1 if ssh
could not be started.

Examples:
  husk ssh demo -l debian
  husk ssh demo -l debian -- uname -a
  husk ssh test/demo -- -i key -L 8080:localhost:80 -N")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// User to log in as [default: chosen by ssh]
    #[arg(short, long, value_name = "USER")]
    login: Option<String>,

    /// Options for ssh, then a command to run in the guest
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
    // ssh accepts options after the host name too.
    let error = ssh.arg(address.to_string()).args(&args.args).exec();
    Err(Failure::Runtime(match error.kind() {
        ErrorKind::NotFound => {
            "ssh was not found on PATH: install the OpenSSH client (package openssh-client)".into()
        }
        _ => format!("ssh: {error}"),
    }))
}

/// Quotes a path for ssh, where blanks separate files and `%` begins a token.
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
