//! `husk logs`.

use husk_monitor::state::PODS;
use std::time::Duration;

use crate::failure::Failure;
use crate::log_file::LogFile;
use crate::vm_ref::VmRef;
use crate::{live_vm, output};

/// How often a followed log is looked at.
const INTERVAL: Duration = Duration::from_millis(100);

/// Print what a VM's guest wrote to its serial console
///
/// The bytes are the guest's own, escape sequences included. The log lives as long as the VM; of a long one the
/// beginning is dropped.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  husk logs demo
  husk logs demo -f --tail 20
  husk logs demo --monitor")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// Go on printing until the VM ends or Ctrl-C
    #[arg(short, long)]
    follow: bool,

    /// Only the last lines; 0 for none
    #[arg(short = 'n', long, value_name = "LINES")]
    tail: Option<u64>,

    /// The log of the VM's monitor and VMM instead
    #[arg(long)]
    monitor: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let dir = live_vm::find(&args.vm)?;
    if args.monitor && args.vm.namespace == PODS {
        return Err(Failure::Runtime(format!(
            "{}: what the shim of a pod says is in containerd's log: try journalctl -u containerd",
            args.vm
        )));
    }
    let path = if args.monitor {
        dir.monitor_log()
    } else {
        dir.console_log()
    };
    let mut log = LogFile::open(&path, args.tail).map_err(Failure::at(path.display()))?;
    loop {
        // StopSignal before reading, so that the last words of a VM that ends between the two are not lost.
        let live = dir.is_live();
        while let Some(bytes) = log.read().map_err(Failure::at(path.display()))? {
            if !output::write(bytes)? {
                return Ok(());
            }
        }
        if !args.follow || !live {
            return Ok(());
        }
        std::thread::sleep(INTERVAL);
    }
}
