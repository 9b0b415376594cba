//! Boots whose clock counts instructions.

use super::inside::Plan;
use crate::counted::{self, Run, there};
use crate::guest::FLOOR_PROGRAM;
use crate::record::Record;
use crate::vmm::Vmm;
use anyhow::Result;
use std::path::{Path, PathBuf};
use xtask::lab::counted::{CountedMachine, FILES};
use xtask::progress::Progress;

/// Measures each case of `plan` in `plan.rounds` machines.
pub fn measure(progress: &Progress, plan: &Plan, record: &mut Record) -> Result<()> {
    let this = std::env::current_exe()?;
    let files = files(plan, &this);
    let machine = CountedMachine::new(progress, &files.iter().map(PathBuf::as_path).collect::<Vec<_>>())?;
    let runs = counted::runs(plan.rounds, &plan.cases, &[()], |round, case, ()| {
        Ok(Run {
            case: case.name(),
            round,
            command: command(plan, case, &this)?,
        })
    })?;
    counted::measure(progress, &machine, runs, record)
}

/// The files that a machine needs.
fn files(plan: &Plan, this: &Path) -> Vec<PathBuf> {
    let mut programs = Vec::new();
    if plan.cases.contains(&Vmm::Floor) {
        programs.push(FLOOR_PROGRAM);
    }
    let guest = [plan.kernel.as_path(), plan.initrd.as_path()];
    counted::files(this, (&plan.release, &programs), guest, &plan.peers)
}

/// The command that measures one case in a machine.
fn command(plan: &Plan, case: Vmm, this: &Path) -> Result<String> {
    let plan = Plan {
        release: FILES.into(),
        kernel: there(&plan.kernel),
        initrd: there(&plan.initrd),
        disk: PathBuf::new(),
        peers: plan.peers.map(there),
        cases: vec![case],
        rounds: 1,
        first_line: false,
        observed: 0,
        disk_rounds: 0,
        // Guests hang in some machines, so each has one only.
        thorough: false,
    };
    counted::command(this, "boot", &plan)
}
