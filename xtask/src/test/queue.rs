//! Runs the cases of the end-to-end suite, in two labs side by side, or on this machine where it runs guests natively.
//!
//! Each case is one command in a lab. If a lab fails, only the case that ran in it is repeated, in a new lab.

use super::stages::Stage;
use super::suite::{Case, NEED_THE_LAB, Suite};
use super::tally::Tally;
use crate::native::native_kvm;
use crate::progress::Progress;
use crate::{checkout, lab};
use anyhow::{Context, Result, bail};
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Attempts for a case that fails in a lab. QEMU's emulation of AMD-V has faults that hit a guest now and then. A case
/// that passes at a later attempt is flaky. A machine with native KVM gets one attempt.
const TRIES_IN_THE_LAB: u32 = 3;
/// Maximum number of labs that a run may lose.
const LABS_LOST: u32 = 5;
/// Exit statuses of a case that SIGINT or SIGTERM ended.
const INTERRUPTED: [u8; 2] = [130, 143];

/// Result of one attempt of a case.
#[derive(Debug, Default)]
struct Try {
    tally: Tally,
    /// Output of the case.
    output: String,
    interrupted: bool,
}

/// State that the workers share.
#[derive(Debug)]
struct Shared {
    queue: VecDeque<Case>,
    tally: Tally,
    lost: u32,
    /// CPU time of the labs' QEMU processes.
    cpu: Duration,
    /// Lines of `target/case-times.tsv`: case, lab, attempts, seconds, CPU seconds.
    times: String,
    error: Option<anyhow::Error>,
}

/// Runs `cases`, in this order, and adds the counts and the CPU time of the labs to `stage`, also if it fails.
///
/// After `limit` no failed case is repeated.
pub fn run(
    stage: &mut Stage,
    suite: &Suite,
    cases: Vec<Case>,
    env: &[(String, String)],
    limit: Duration,
    progress: &Progress,
) -> Result<()> {
    let labs = if native_kvm() { 1 } else { lab::affordable() };
    let shared = Mutex::new(Shared {
        queue: cases.into(),
        tally: Tally::default(),
        lost: 0,
        cpu: Duration::ZERO,
        times: String::new(),
        error: None,
    });
    let deadline = Instant::now().checked_add(limit);
    std::thread::scope(|scope| {
        for number in 1..=labs {
            let worker = Worker {
                suite,
                env,
                progress,
                shared: &shared,
                lab: number,
                deadline,
            };
            scope.spawn(move || {
                if let Err(error) = worker.run() {
                    let mut shared = worker.lock();
                    shared.queue.clear();
                    shared.error.get_or_insert(error);
                }
            });
        }
    });
    let shared = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
    // The file only helps to update seconds.txt.
    let _ = std::fs::write(checkout::target().join("case-times.tsv"), &shared.times);
    stage.tally.add(shared.tally);
    stage.cpu += shared.cpu;
    shared.error.map_or(Ok(()), Err)
}

struct Worker<'a> {
    suite: &'a Suite,
    /// Additional environment variables of the cases.
    env: &'a [(String, String)],
    progress: &'a Progress,
    shared: &'a Mutex<Shared>,
    lab: u32,
    deadline: Option<Instant>,
}

impl Worker<'_> {
    fn run(&self) -> Result<()> {
        loop {
            let Some(case) = self.lock().queue.pop_front() else {
                return Ok(());
            };
            self.case(&case)?;
        }
    }

    /// Runs `case` until it passes or has no attempts left.
    fn case(&self, case: &Case) -> Result<()> {
        let in_lab = NEED_THE_LAB.iter().any(|prefix| case.name.starts_with(prefix)) || !native_kvm();
        let tries = if in_lab { TRIES_IN_THE_LAB } else { 1 };
        let started = Instant::now();
        let mut cpu = Duration::ZERO;
        let mut failures: Vec<String> = Vec::new();
        let mut tried = 0;
        let last = loop {
            let before = lab::cpu_time(self.lab);
            let result = self.attempt(case, in_lab);
            let after = lab::cpu_time(self.lab);
            cpu += after
                .unwrap_or_default()
                .saturating_sub(before.unwrap_or_default());
            let attempt = match result {
                Ok(attempt) => attempt,
                Err(error) => {
                    self.lose(case, &error)?;
                    failures.push(format!("lab {} was lost: {error:#}\n", self.lab));
                    continue;
                }
            };
            if attempt.interrupted {
                bail!("interrupted in {}", case.name);
            }
            tried += 1;
            if attempt.tally.failed == 0 || tried == tries || self.late() {
                break attempt;
            }
            print!("{}", attempt.output);
            println!(
                "{} failed in lab {}, at try {tried} of {tries}: it runs again in a new lab",
                case.name, self.lab
            );
            failures.push(attempt.output);
            // A fault of the emulation often corrupts the lab's kernel and page cache as well.
            if let Err(error) = lab::renew(self.lab) {
                println!("lab {} stays: {error:#}", self.lab);
            }
        };
        let mut shared = self.lock();
        print!("{}", last.output);
        shared.tally.add(last.tally.clone());
        shared.cpu += cpu;
        let (seconds, cpu) = (started.elapsed().as_secs_f64(), cpu.as_secs_f64());
        let _ = writeln!(
            shared.times,
            "{}\t{}\t{}\t{seconds:.1}\t{cpu:.1}",
            case.name,
            self.lab,
            failures.len() + 1
        );
        println!(
            "{}: {seconds:.1} s in lab {}, CPU {cpu:.1} s",
            case.name, self.lab
        );
        if last.tally.failed == 0 && !failures.is_empty() {
            match keep_logs(case, self.lab, &failures) {
                Ok(folder) => println!(
                    "{} is flaky: the logs of its failures are in {}",
                    case.name,
                    folder.display()
                ),
                Err(error) => println!("{} is flaky, and its logs are lost: {error:#}", case.name),
            }
            shared.tally.flaky.push(case.name.clone());
        }
        Ok(())
    }

    /// Runs one attempt of `case`; an error is a failure of the lab.
    fn attempt(&self, case: &Case, in_lab: bool) -> Result<Try> {
        let mut attempt = Try::default();
        let mut closed = false;
        let mut command = match in_lab {
            true => self.suite.command_in_lab(case),
            false => self.suite.command(case),
        };
        command.lab = self.lab;
        command.env.extend_from_slice(self.env);
        let status = command.lines(self.progress, |line| {
            if attempt.tally.end_to_end(line) {
                closed = true;
            } else {
                attempt.output.push_str(line);
                attempt.output.push('\n');
            }
        })?;
        let why = if status == lab::TIMED_OUT {
            format!("not done after {} s", case.limit().as_secs())
        } else if !closed {
            format!("it ended early, with status {status}")
        } else {
            String::new()
        };
        if !why.is_empty() {
            // A case that was ended may have counted its failure itself.
            attempt.tally.failed = attempt.tally.failed.max(1);
            let _ = writeln!(attempt.output, "FAILED {}: {why}", case.name);
        }
        attempt.interrupted = INTERRUPTED.contains(&status);
        Ok(attempt)
    }

    /// Counts a lab that was lost during `case`.
    fn lose(&self, case: &Case, error: &anyhow::Error) -> Result<()> {
        let mut shared = self.lock();
        shared.lost += 1;
        if shared.lost > LABS_LOST || self.late() {
            bail!("lab {} was lost in {}: {error:#}", self.lab, case.name);
        }
        println!(
            "lab {} was lost in {} ({error:#}): it runs again in a new lab",
            self.lab, case.name
        );
        Ok(())
    }

    fn late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() > deadline)
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes the output of the failed attempts of `case`, and the end of the lab's console log, to `target/flaky/CASE/`.
fn keep_logs(case: &Case, number: u32, failures: &[String]) -> Result<PathBuf> {
    let folder = checkout::target().join("flaky").join(&case.name);
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for (index, output) in failures.iter().enumerate() {
        std::fs::write(folder.join(format!("try-{}.log", index + 1)), output)?;
    }
    // The failed lab is the previous one.
    let serial = lab::serial_log(number)?.with_extension("log.old");
    if serial.exists() {
        std::fs::copy(serial, folder.join("lab-serial.log"))?;
    }
    Ok(folder)
}
