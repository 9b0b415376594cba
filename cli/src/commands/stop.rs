//! `husk stop`.

use crate::failure::Failure;
use crate::live_vm;
use crate::shutdown::{StopMode, stop_all};
use crate::vm_ref::VmRef;

/// Shut down VMs and wait until they have ended
///
/// Presses the ACPI power button and kills the VM if it is still running after the grace period, which is
/// terminationGracePeriodSeconds of the manifest. Ctrl-C ends the wait, not the shutdown.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if all VMs have ended, gracefully or not.

Examples:
  husk stop demo
  husk stop demo --grace-period 120
  husk stop demo --force")]
pub(crate) struct Args {
    /// The VMs: NAME or NAMESPACE/NAME
    #[arg(value_name = "VM", required = true)]
    vms: Vec<VmRef>,

    /// Grace period in seconds, instead of that of the manifest; 0 kills at once
    #[arg(short, long, value_name = "SECONDS")]
    grace_period: Option<u64>,

    /// Kill the VMs at once; data not yet written to their disks is lost
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
