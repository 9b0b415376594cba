//! `husk console`.

use crate::console::{OnInputEof, SessionEnd, attach};
use crate::failure::{Failure, chain};
use crate::live_vm;
use crate::signals::Signals;
use crate::vm_ref::VmRef;

/// Connect this terminal to a VM's serial console
///
/// Shows the last output of the guest, then sends every key to it. ^] detaches; the VM keeps running. A VM has one
/// console session: a new one takes over. If stdin is a pipe, detaches when the pipe has ended and the guest has been
/// silent for one second.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 after ^] or at the end of the VM, 1 if the console cannot be
reached or another session took over, 128+N after signal N (143 for SIGTERM).

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
        let mut client = signals.unless_asked(live_vm::connect(vm)).await??;
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
                eprintln!("\ndetached by {}; {vm} keeps running", asked.name());
                Err(Failure::Ended(asked.status()))
            }
        }
    })
}
