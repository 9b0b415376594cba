//! `husk port-forward`.

use crate::failure::Failure;
use crate::live_vm;
use crate::port_forward::{PortListener, PortSpec, raise_file_limit};
use crate::signals::Signals;
use crate::vm_ref::VmRef;

/// PortSpec ports of this machine to a VM
///
/// What connects to a local port is connected to the VM's port, by TCP. Stays in the foreground until Ctrl-C or the
/// VM's end.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 at the VM's end, 1 if a port could not be had, 128 and its number if a signal ended it: 130 for Ctrl-C.

Examples:
  husk port-forward demo 8080:80
  husk port-forward demo 5432 0.0.0.0:8443:443
  husk port-forward demo 0:22")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// A local port and the VM's; one alone is both, 0 any local one that is free. Listens on 127.0.0.1 by default
    #[arg(value_name = "[ADDRESS:]LOCAL:REMOTE", required = true)]
    ports: Vec<PortSpec>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let vm = &args.vm;
    raise_file_limit();
    live_vm::block_on(async {
        let mut signals = Signals::catch().map_err(Failure::at("catch signals"))?;
        let mut client = live_vm::connect(vm).await?;
        let address = live_vm::address(vm, &live_vm::info(&mut client).await?)?;
        let mut listening = Vec::new();
        for forward in &args.ports {
            listening.push(PortListener::on(forward).await?);
        }
        for one in listening {
            one.serve(vm.clone(), address)?;
        }
        tokio::select! {
            ended = live_vm::wait_for_end(&mut client) => {
                ended?;
                eprintln!("{vm} has ended");
                Ok(())
            }
            asked = signals.next() => Err(Failure::Ended(asked.status())),
        }
    })
}
