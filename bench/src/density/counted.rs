//! Starts in a machine whose clock counts instructions.

use super::inside::Plan;
use crate::counted::{self, Run, there};
use crate::guest::FLOOR_PROGRAM;
use crate::record::Record;
use crate::vmm::Vmm;
use anyhow::Result;
use std::path::PathBuf;
use xtask::lab::counted::{CountedMachine, FILES};
use xtask::progress::Progress;

/// Measures each case of `plan` in `plan.rounds` machines.
pub fn measure(progress: &Progress, plan: &Plan, record: &mut Record) -> Result<()> {
    let this = std::env::current_exe()?;
    let guest = [plan.kernel.as_path(), plan.initrd.as_path()];
    let mut programs = Vec::new();
    if plan.cases.contains(&Vmm::Floor) {
        programs.push(FLOOR_PROGRAM);
    }
    let mut files = counted::files(&this, (&plan.release, &programs), guest, &plan.peers);
    files.push(plan.halted.clone());
    let machine = CountedMachine::new(progress, &files.iter().map(PathBuf::as_path).collect::<Vec<_>>())?;
    let runs = counted::runs(plan.rounds, &plan.cases, &[()], |round, case, ()| {
        let one = Plan {
            release: FILES.into(),
            kernel: there(&plan.kernel),
            halted: there(&plan.halted),
            initrd: there(&plan.initrd),
            peers: plan.peers.map(there),
            cases: vec![case],
            rounds: 1,
            thorough: false,
            ..*plan
        };
        Ok(Run {
            case: case.name(),
            round,
            command: counted::command(&this, "density", &one)?,
        })
    })?;
    counted::measure(progress, &machine, runs, record)
}
