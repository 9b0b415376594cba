//! `husk console`.

use crate::console::{OnInputEof, SessionEnd, attach};
use crate::failure::{Failure, chain};
use crate::live_vm;
use crate::signals::Signals;
use crate::vm_ref::VmRef;

/// Connect this terminal to a VM's serial console
///
/// Shows what the guest said last, then carries every key to it; ^] leaves, and the VM keeps running. There is one
/// session per VM: a new one takes over. With a pipe as stdin, leaves one second after the pipe's end and the
/// guest's last word.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 after ^] or at the VM's end, 1 if the console could not be reached or another session took over,
128 and its number if a signal ended it: 143 for SIGTERM.

Examples:
  husk console demo
  printf 'root\\n' | husk console test/demo")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let vm = &args.vm;
    live_vm::block_on(async {
        let mut signals = Signals::catch().map_err(Failure::at("catch signals"))?;
        let mut client = live_vm::connect(vm).await?;
        match attach(vm, &mut client, OnInputEof::Detach, signals.next()).await? {
            Ok(SessionEnd::Detached) => Ok(()),
            Ok(SessionEnd::VmEnded) => {
                eprintln!("\n{vm} has ended");
                Ok(())
            }
            Ok(SessionEnd::TakenOver) => {
                eprintln!();
                Err(Failure::Runtime(format!(
                    "another session took over the console of {vm}"
                )))
            }
            Ok(SessionEnd::Lost(status)) => {
                eprintln!();
                let why = status.map_or_else(|| "it closed the connection".into(), |status| chain(&status));
                Err(Failure::Runtime(format!("the monitor of {vm}: {why}")))
            }
            Err(asked) => {
                eprintln!("\nleft by {}; {vm} keeps running", asked.name());
                Err(Failure::Ended(asked.status()))
            }
        }
    })
}
