//! `husk stop`.

use crate::failure::Failure;
use crate::live_vm;
use crate::shutdown::{StopMode, stop_all};
use crate::vm_ref::VmRef;

/// Shut VMs down and wait until they have ended
///
/// Presses the guest's power button; a guest that has not powered off when the grace period is over is killed. The
/// grace period is the manifest's terminationGracePeriodSeconds. Ctrl-C stops waiting, not the shutdown.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 when the VMs have ended, however they did.

Examples:
  husk stop demo
  husk stop demo --grace-period 120
  husk stop demo --force")]
pub(crate) struct Args {
    /// The VMs: NAME or NAMESPACE/NAME
    #[arg(value_name = "VM", required = true)]
    vms: Vec<VmRef>,

    /// Seconds until the guest is killed, instead of the manifest's; 0 kills at once
    #[arg(short, long, value_name = "SECONDS")]
    grace_period: Option<u64>,

    /// Kill the guest at once; what it has not written to its disks is lost
    #[arg(short, long, conflicts_with = "grace_period")]
    force: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let mode = if args.force {
        StopMode::Force
    } else {
        StopMode::Graceful(args.grace_period)
    };
    live_vm::block_on(stop_all(args.vms.iter().map(live_vm::find), mode))
}
