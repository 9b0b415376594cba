//! `husk doctor`.

use crate::doctor::examine;
use crate::failure::{Failure, RUNTIME};
use crate::output;

/// Check whether this host can run VMs
///
/// Runs a small guest on /dev/kvm to find out whether guest kernel mode runs natively, then checks the features that a
/// node needs. Each missing feature is shown with a way to enable it. VMs cannot run without those marked MISSING.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if VMs can run on this host, 1 if not.

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
