//! The `husk-vmm` program: one VM, started and controlled by its monitor.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::process::ExitCode;

use husk_confine::{Credentials, confine};
use husk_vmm::control::VmExit;
use husk_vmm::ram::PageMap;

const USAGE: &str = "\
husk-vmm is the virtual machine monitor of Husk. Do not start it by hand: `husk run`, or the containerd shim,
starts it with two inherited sockets, sends it descriptors over one and controls it over the other.

usage: husk-vmm --control-fd N --fd-channel-fd N [--uid N --gid N]

  --control-fd N     stream socket on which husk.vmm.v1 is served; closing it ends the VM
  --fd-channel-fd N  SOCK_SEQPACKET socket over which descriptors arrive
  --uid N, --gid N   user and group to switch to when started as root (default 107)
  --version, --help

To run a VM: husk run FILE";

const DEFAULT_ID: u32 = 107;

struct Arguments {
    control: RawFd,
    fd_channel: RawFd,
    credentials: Credentials,
}

enum Invocation {
    Run(Arguments),
    Print(String),
}

fn parse(arguments: impl Iterator<Item = String>) -> Result<Invocation, String> {
    let (mut control, mut fd_channel) = (None, None);
    let mut credentials = Credentials {
        uid: DEFAULT_ID,
        gid: DEFAULT_ID,
    };
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        let mut number = || {
            let value = arguments
                .next()
                .ok_or_else(|| format!("{argument} needs a number"))?;
            value
                .parse::<u32>()
                .map_err(|_| format!("{argument}: {value:?} is not a number"))
        };
        let fd = |n: u32| RawFd::try_from(n).map_err(|_| format!("{n} is not a descriptor"));
        match argument.as_str() {
            "--control-fd" => control = Some(fd(number()?)?),
            "--fd-channel-fd" => fd_channel = Some(fd(number()?)?),
            "--uid" => credentials.uid = number()?,
            "--gid" => credentials.gid = number()?,
            "--version" | "-V" => {
                return Ok(Invocation::Print(format!(
                    "husk-vmm {}",
                    env!("CARGO_PKG_VERSION")
                )));
            }
            "--help" | "-h" => return Ok(Invocation::Print(USAGE.into())),
            other => return Err(format!("unknown argument {other:?}")),
        }
    }
    match (control, fd_channel) {
        (Some(control), Some(fd_channel)) if control > 2 && fd_channel > 2 && control != fd_channel => {
            if credentials.uid == 0 || credentials.gid == 0 {
                return Err("--uid and --gid must not be 0".into());
            }
            Ok(Invocation::Run(Arguments {
                control,
                fd_channel,
                credentials,
            }))
        }
        _ => Err("--control-fd and --fd-channel-fd must name two different inherited sockets".into()),
    }
}

/// Takes ownership of an inherited descriptor and sets its close-on-exec flag. Fails if the descriptor is not open.
fn inherited(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl(F_SETFD) takes numbers and touches no memory; nothing owns the descriptor yet.
    let valid = unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } == 0;
    if !valid {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open, the parent process passed it to this one, and only this function takes it over.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn run(arguments: Arguments) -> Result<VmExit, String> {
    let open = |fd| inherited(fd).map_err(|e| format!("descriptor {fd}: {e}"));
    let (control, fd_channel) = (open(arguments.control)?, open(arguments.fd_channel)?);
    let pagemap = PageMap::open()
        .inspect_err(|error| tracing::warn!(%error, "no page map: a save reads all memory"))
        .ok();
    confine(arguments.credentials).map_err(|e| e.to_string())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .on_thread_start(|| husk_seccomp::install(husk_seccomp::ThreadRole::Blocking))
        .build()
        .map_err(|e| e.to_string())?;
    let exit = runtime.block_on(husk_vmm::control::run(control, fd_channel, pagemap));
    runtime.shutdown_background();
    exit.map_err(|error| format!("control sockets: {error}"))
}

fn main() -> ExitCode {
    husk_vmm::memory_trim::share_heap();
    tracing_subscriber::fmt().json().with_writer(io::stderr).init();
    let arguments = match parse(std::env::args().skip(1)) {
        Ok(Invocation::Run(arguments)) => arguments,
        Ok(Invocation::Print(text)) => {
            println!("{text}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("husk-vmm: {error}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(arguments) {
        Ok(exit) => ExitCode::from(exit.status()),
        Err(error) => {
            tracing::error!(error, "VMM failed");
            ExitCode::from(1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Invocation, String> {
        parse(arguments.iter().map(|a| (*a).to_owned()))
    }

    #[test]
    fn the_sockets_are_required_and_root_is_refused() {
        assert!(matches!(
            parsed(&["--control-fd", "3", "--fd-channel-fd", "4"]),
            Ok(Invocation::Run(_))
        ));
        for bad in [
            &["--control-fd", "3"][..],
            &["--control-fd", "3", "--fd-channel-fd", "3"],
            &["--control-fd", "0", "--fd-channel-fd", "4"],
            &["--control-fd", "3", "--fd-channel-fd", "x"],
            &["--control-fd", "3", "--fd-channel-fd", "4", "--uid", "0"],
            &["--control-fd"],
            &["frobnicate"],
        ] {
            assert!(parsed(bad).is_err(), "{bad:?}");
        }
        assert!(matches!(parsed(&["--help"]), Ok(Invocation::Print(_))));
    }
}
