//! `husk doctor`.

use crate::doctor::examine;
use crate::failure::{Failure, RUNTIME};
use crate::output;

/// Say whether this machine can run VMs, and what it lacks
///
/// Runs a small guest on /dev/kvm to learn whether guest kernel mode is native, then looks for what a node
/// needs. What is missing comes with the way to get it; MISSING in capitals keeps VMs from running.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if VMs can run here, 1 if not.

Examples:
  husk doctor
  husk doctor --json | jq -r '.checks[] | select(.status == \"missing\") | .fix'")]
pub(crate) struct Args {
    /// Print JSON: {canRunVms, summary, checks: [{name, status, severity, detail, fix}]}
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let report = examine();
    let text = if args.json {
        report.json() + "\n"
    } else {
        report.table(output::colour())
    };
    output::print(&text)?;
    if report.can_run_vms {
        Ok(())
    } else {
        Err(Failure::Ended(RUNTIME))
    }
}
