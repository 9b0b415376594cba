//! The fuzz targets: whether they compile, and each for a short time.

use super::stages::Stage;
use super::unit::{cargo, in_background};
use crate::progress::Progress;
use crate::{checkout, fuzz};
use anyhow::{Result, bail};

/// Time of each target in seconds.
const SECONDS: u32 = 10;

/// Checks that all targets compile, without a C++ compiler.
pub fn compile(stage: &mut Stage) -> Result<()> {
    let mut check = cargo(&[
        "check",
        "--quiet",
        "--locked",
        "--manifest-path",
        "fuzz/Cargo.toml",
    ]);
    check
        .env("CARGO_TARGET_DIR", checkout::target().join("fuzz/check"))
        // Nothing is linked, so any file will do, and libFuzzer need not be built.
        .env("CUSTOM_LIBFUZZER_PATH", checkout::root().join("fuzz/Cargo.toml"));
    in_background(&mut check);
    let status = stage.command(&mut check)?;
    if !status.success() {
        bail!("cargo check: {status}");
    }
    Ok(())
}

/// Runs all targets. Each counts as one test.
pub fn check(stage: &mut Stage, progress: &Progress) -> Result<()> {
    let (targets, findings) = fuzz::run_all(SECONDS, progress)?;
    stage.tally.passed += (targets - findings.len()) as u64;
    for finding in findings {
        stage.tally.fail("fuzz target", &finding.to_string());
    }
    Ok(())
}
