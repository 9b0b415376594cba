//! Requests to a disk in a machine whose clock counts instructions.

use super::case::Case;
use super::cell::Cell;
use super::inside::Plan;
use crate::counted::{self, Run, there};
use crate::record::Record;
use anyhow::Result;
use std::path::PathBuf;
use xtask::lab::counted::{CountedMachine, FILES};
use xtask::progress::Progress;

/// Measures each case of `plan`, each kind of requests in a machine of its own: the longer a machine runs, the likelier
/// it hangs.
pub fn measure(progress: &Progress, plan: &Plan, record: &mut Record) -> Result<()> {
    let this = std::env::current_exe()?;
    let guest = [plan.kernel.as_path(), plan.initrd.as_path()];
    let files = counted::files(&this, (&plan.release, &[]), guest, &plan.peers);
    let files: Vec<_> = files.iter().map(PathBuf::as_path).collect();
    let machine = CountedMachine::new(progress, &files)?.with_file_system()?;
    let runs = counted::runs(plan.rounds, &plan.cases, &plan.cells(), |round, case, cell| {
        Ok(Run {
            case: case.name(),
            round,
            command: counted::command(&this, "disk", &one(plan, case, cell))?,
        })
    })?;
    counted::measure(progress, &machine, runs, record)
}

/// The plan of a machine, for one kind of requests of `case`.
fn one(plan: &Plan, case: Case, cell: &Cell) -> Plan {
    Plan {
        release: FILES.into(),
        kernel: there(&plan.kernel),
        initrd: there(&plan.initrd),
        cases: vec![case],
        only: Some(cell.name.to_owned()),
        peers: plan.peers.map(there),
        rounds: 1,
        thorough: false,
        ..*plan
    }
}
