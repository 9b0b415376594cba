//! `cargo xtask soak`: tests that take from minutes to hours, in rounds that accumulate over runs.

use super::queue;
use super::rounds::{self, Round};
use super::stages::{Stage, Stages};
use super::suite::{Suite, Tier};
use crate::binaries::Profile;
use crate::exit_code;
use crate::progress::Progress;
use crate::{binaries, images};
use anyhow::{Result, bail};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Environment variable that gives a case its seed.
const SEED: &str = "HUSK_FIO_SEED";

/// Arguments of `cargo xtask soak`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Rounds of each case; each has a seed of its own
    #[arg(long, value_name = "N", default_value_t = 1)]
    rounds: u32,
    /// Seed of the first round; each further round adds one [default: the time]
    #[arg(long, value_name = "S")]
    seed: Option<u32>,
    /// Print the totals of all recorded rounds and run nothing
    #[arg(long)]
    totals: bool,
    /// Run only cases whose name contains this
    filter: Option<String>,
}

/// Runs `cargo xtask soak`.
pub fn run(args: &Args) -> Result<ExitCode> {
    if args.totals {
        print!("{}", rounds::totals()?);
        return Ok(ExitCode::SUCCESS);
    }
    crate::lab::exit_on_signals()?;
    let progress = Progress::on_stderr();
    binaries::build(Profile::Release, &progress)?;
    images::ensure_all(&progress)?;
    let stages = Stages::new();
    stages.run("soak", |stage| run_rounds(stage, args, &progress));
    print!("{}", rounds::totals()?);
    let good = stages.close();
    Ok(exit_code(good))
}

fn run_rounds(stage: &mut Stage, args: &Args, progress: &Progress) -> Result<()> {
    let suite = Suite::copy(Profile::Release)?;
    let cases = suite.cases(&[Tier::Long], args.filter.as_deref())?;
    if cases.is_empty() {
        bail!("no case of that name");
    }
    let commit = rounds::commit()?;
    let first = args
        .seed
        .unwrap_or_else(|| jiff::Timestamp::now().subsec_nanosecond().unsigned_abs());
    for number in 0..args.rounds {
        let seed = first.wrapping_add(number);
        for case in &cases {
            println!(
                "{}: round {} of {}, seed {seed}",
                case.name,
                number + 1,
                args.rounds
            );
            let (started, clock) = (jiff::Timestamp::now(), Instant::now());
            let env = [(SEED.to_owned(), seed.to_string())];
            let mut one = Stage::default();
            let result = queue::run(
                &mut one,
                &suite,
                vec![case.clone()],
                &env,
                Duration::MAX,
                progress,
            );
            let outcome = match (&result, &one.tally) {
                (Err(_), _) => "not run",
                (_, tally) if tally.failed > 0 => "failed",
                (_, tally) if tally.passed > 0 => "passed",
                _ => "skipped",
            };
            let round = Round {
                seed,
                commit: commit.clone(),
                outcome: outcome.to_owned(),
                started: started.to_string(),
                seconds: clock.elapsed().as_secs_f64(),
                ..Round::default()
            };
            rounds::record(&case.name, &round)?;
            stage.tally.add(one.tally);
            stage.cpu += one.cpu;
            result?;
        }
    }
    Ok(())
}
