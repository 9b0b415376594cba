//! Every fuzz target for a short time.

use super::stages::Stage;
use crate::fuzz;
use crate::progress::Progress;
use anyhow::Result;

/// Time of each target in seconds.
const SECONDS: u32 = 10;

/// Runs all targets. Each counts as one test.
pub fn check(stage: &mut Stage, progress: &Progress) -> Result<()> {
    let (targets, findings) = fuzz::run_all(SECONDS, progress)?;
    stage.tally.passed += (targets - findings.len()) as u64;
    for finding in findings {
        stage.tally.fail("fuzz target", &finding.to_string());
    }
    Ok(())
}
