//! Additions in a machine whose clock counts instructions.

use super::inside::Plan;
use crate::counted::{self, Run, there};
use crate::peers::Peers;
use crate::record::Record;
use anyhow::Result;
use std::path::PathBuf;
use xtask::lab::counted::{CountedMachine, FILES};
use xtask::progress::Progress;

/// Measures each case of `plan` in `plan.rounds` machines.
pub fn measure(progress: &Progress, plan: &Plan, record: &mut Record) -> Result<()> {
    let this = std::env::current_exe()?;
    let programs: &[&str] = &["husk-uevents"];
    let guest = [plan.kernel.as_path(), plan.initrd.as_path()];
    let files = counted::files(&this, (&plan.release, programs), guest, &Peers::default());
    let files: Vec<_> = files.iter().map(PathBuf::as_path).collect();
    let machine = CountedMachine::new(progress, &files)?.with_file_system()?;
    let runs = counted::runs(plan.rounds, &plan.cases, &[()], |round, case, ()| {
        let one = Plan {
            release: FILES.into(),
            kernel: there(&plan.kernel),
            initrd: there(&plan.initrd),
            cases: vec![case],
            rounds: 1,
            ..*plan
        };
        Ok(Run {
            case: case.name(),
            round,
            command: counted::command(&this, "hotplug", &one)?,
        })
    })?;
    counted::measure(progress, &machine, runs, record)
}
