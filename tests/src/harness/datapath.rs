//! The component that forwards a guest's frames: the kernel by vhost-net, or the VMM itself.

use super::context::{Skip, TestContext};
use super::vm::Vm;
use anyhow::{Result, ensure};
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

const VHOST_NET: &str = "/dev/vhost-net";

/// A datapath from the tap to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Datapath {
    /// The kernel's vhost-net.
    Kernel,
    /// Worker threads of the VMM.
    Process,
}

/// Runs a command where the device node in the second argument belongs to a driver that does not exist: minor 255 of
/// the miscellaneous devices means "any other" and is never assigned.
const HIDE: &str =
    "{ [ -e \"$1\" ] || mknod \"$1\" c 10 255; } && mount --bind \"$1\" \"$2\" && shift 2 && exec \"$@\"";

impl Datapath {
    /// `husk`, which uses vhost-net if it can open it. For the other datapath it cannot.
    pub fn husk<S: AsRef<OsStr>>(self, ctx: &TestContext, words: &[S]) -> Result<Command> {
        let husk = ctx.husk(words);
        let there = Path::new(VHOST_NET).exists();
        match self {
            Self::Kernel if !there => Err(Skip(format!("no {VHOST_NET}")).into()),
            Self::Process if there => {
                ctx.needs_root()?;
                let mut command = Command::new("unshare");
                command.args(["--mount", "sh", "-c", HIDE, "sh"]);
                command.arg(ctx.path("no-vhost-net"));
                command
                    .arg(VHOST_NET)
                    .arg(husk.get_program())
                    .args(husk.get_args());
                Ok(like(command, &husk))
            }
            _ => Ok(husk),
        }
    }

    /// Checks that `vm` uses this datapath.
    pub fn check(self, vm: &Vm<'_>) -> Result<()> {
        let vmm = vm.pid("vmmPid")?;
        let opened = std::fs::read_dir(format!("/proc/{vmm}/fd"))?
            .flatten()
            .filter_map(|entry| std::fs::read_link(entry.path()).ok())
            .any(|path| path == Path::new(VHOST_NET));
        ensure!(
            opened == (self == Self::Kernel),
            "{self:?}, but {VHOST_NET} is {}open in the VMM",
            if opened { "" } else { "not " }
        );
        Ok(())
    }
}

/// `command` with the environment and the folder of `other`.
fn like(mut command: Command, other: &Command) -> Command {
    for (name, value) in other.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    if let Some(folder) = other.get_current_dir() {
        command.current_dir(folder);
    }
    command
}
