//! `husk port-forward`.

use crate::failure::Failure;
use crate::live_vm;
use crate::port_forward::{PortListener, PortSpec, raise_file_limit};
use crate::signals::Signals;
use crate::vm_ref::VmRef;

/// Forward TCP ports of this machine to a VM
///
/// Each connection to a local port is forwarded to the port of the VM. Runs in the foreground until Ctrl-C or the end of
/// the VM.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 at the end of the VM, 1 if a local port is not available,
128+N after signal N (130 for Ctrl-C).

Examples:
  husk port-forward demo 8080:80
  husk port-forward demo 5432 0.0.0.0:8443:443
  husk port-forward demo 0:22")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// Local port and port of the VM; a single number is used for both; local port 0 picks a free one. Listens on
    /// 127.0.0.1 by default
    #[arg(value_name = "[ADDRESS:]LOCAL:REMOTE", required = true)]
    ports: Vec<PortSpec>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let vm = &args.vm;
    raise_file_limit();
    live_vm::block_on(async {
        let mut signals = Signals::catch().map_err(Failure::at("catch signals"))?;
        let connecting = async {
            let mut client = live_vm::connect(vm).await?;
            let info = live_vm::info(&mut client).await?;
            Ok::<_, Failure>((client, info))
        };
        let (mut client, info) = signals.unless_asked(connecting).await??;
        let address = live_vm::address(vm, &info)?;
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
