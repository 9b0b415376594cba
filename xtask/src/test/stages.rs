//! Stages of a run: the time of each, and the total counts.

use super::tally::Tally;
use crate::progress::wait_with_cpu;
use anyhow::{Context, Result};
use std::process::{Command, ExitStatus};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The counts of a run and the times of its stages. Stages may run side by side.
#[derive(Debug)]
pub struct Stages {
    started: Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    tally: Tally,
    times: Vec<Time>,
}

#[derive(Debug)]
struct Time {
    name: String,
    begin: Duration,
    wall: Duration,
    cpu: Duration,
}

/// Counts and CPU time of one stage.
#[derive(Debug, Default)]
pub struct Stage {
    /// Counts of the stage's tests.
    pub tally: Tally,
    /// CPU time of the stage's commands.
    pub cpu: Duration,
}

impl Stage {
    /// Runs a command to its end, and adds its CPU time.
    pub fn command(&mut self, command: &mut Command) -> Result<ExitStatus> {
        let name = command.get_program().display().to_string();
        let mut child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        let (status, cpu) = wait_with_cpu(&mut child)?;
        self.cpu += cpu;
        Ok(status)
    }
}

impl Stages {
    /// Creates the record, without stages.
    pub fn new() -> Self {
        Self {
            started: Instant::now(),
            state: Mutex::default(),
        }
    }

    /// Runs `work` as the stage `name`. An error counts as one failure, unless the stage has counted failed tests.
    /// Returns true if nothing failed in it.
    pub fn run(&self, name: &str, work: impl FnOnce(&mut Stage) -> Result<()>) -> bool {
        println!("== {name}");
        let begin = self.started.elapsed();
        let mut stage = Stage::default();
        let result = work(&mut stage);
        let wall = self.started.elapsed() - begin;
        let seconds = wall.as_secs_f64();
        match result {
            Ok(()) => println!("== {name}: {seconds:.1} s, CPU {:.1} s", stage.cpu.as_secs_f64()),
            Err(error) if stage.tally.failed > 0 => println!("== {name}: {error:#}, after {seconds:.1} s"),
            Err(error) => stage.tally.fail(name, &format!("{error:#}")),
        }
        let good = stage.tally.failed == 0;
        let mut state = self.lock();
        state.tally.add(stage.tally);
        state.times.push(Time {
            name: name.to_owned(),
            begin,
            wall,
            cpu: stage.cpu,
        });
        good
    }

    /// Counts a failure outside of any stage.
    pub fn fail(&self, what: &str, why: &str) {
        self.lock().tally.fail(what, why);
    }

    /// Prints the table of times and, alone on the last line, the counts. Returns true if the run is good.
    pub fn close(&self) -> bool {
        let mut state = self.lock();
        state.tally.judge_flaky();
        println!("== times: stage, begin, wall, CPU of its commands, in seconds");
        for time in &state.times {
            println!(
                "{:<24} {:>7.1} {:>7.1} {:>7.1}",
                time.name,
                time.begin.as_secs_f64(),
                time.wall.as_secs_f64(),
                time.cpu.as_secs_f64()
            );
        }
        println!(
            "{:<24} {:>7} {:>7.1}",
            "all",
            "",
            self.started.elapsed().as_secs_f64()
        );
        println!("{}", state.tally.flaky_line());
        println!("{}", state.tally.closing());
        state.tally.good()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
