//! Runs cases one after the other, each in a separate process, and checks that they leave nothing behind.
//!
//! Selection, listing and the summary are those of libtest-mimic.

use super::Case;
use super::context::files_in;
use super::output_buffer::tail;
use super::processes::{self, Process};
use anyhow::{Context, Result};
use libtest_mimic::{Arguments, Failed, Trial};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time limit for a case's remaining processes to end.
const ENDING: Duration = Duration::from_secs(5);

/// Bytes of each log that are shown when a case fails.
const LOG_TAIL: usize = 4 << 10;

/// Options beside the arguments of the standard harness.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Keep the folders of cases that fail.
    pub keep: bool,
    /// The option that selected the cases, if they are not the default ones.
    pub tier: Option<&'static str>,
}

/// Counts that libtest-mimic lacks: parts of cases, and cases that skip themselves while they run.
#[derive(Debug, Default)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

/// Result of a case.
enum Outcome {
    Passed,
    Skipped(String),
    Failed(String),
}

/// Runs the cases that `arguments` select, one after the other, each in a separate process. Returns true if none failed
/// and at least one passed.
///
/// The last line it prints is `e2e: N passed, N failed, N skipped`, with every part of a case counted too.
pub fn run(cases: &'static [Case], mut arguments: Arguments, options: Options) -> Result<bool> {
    processes::adopt_orphans()?;
    catch_signals()?;
    let base = tempfile::Builder::new()
        .prefix("husk-e2e.")
        .permissions(fs::Permissions::from_mode(0o755))
        .tempdir_in("/var/tmp")
        .context("cannot make a folder in /var/tmp")?;
    let counts = Arc::new(Mutex::new(Counts::default()));
    let trial = |case: &'static Case| {
        let (folder, counts) = (base.path().join(case.name), Arc::clone(&counts));
        Trial::test(case.name, move || trial(case, &folder, options, &counts))
    };
    // A case checks the whole machine for its leftovers.
    arguments.test_threads = Some(1);
    let conclusion = libtest_mimic::run(&arguments, cases.iter().map(trial).collect());
    if options.keep && conclusion.num_failed > 0 {
        let _ = base.keep();
    }
    let counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
    let passed = usize::try_from(conclusion.num_passed)? - counts.skipped + counts.passed;
    let failed = usize::try_from(conclusion.num_failed)? + counts.failed;
    println!(
        "e2e: {passed} passed, {failed} failed, {} skipped",
        counts.skipped
    );
    Ok(failed == 0 && passed > 0)
}

/// One case as a test of libtest-mimic, which prints the name first and the result afterwards.
fn trial(case: &'static Case, folder: &Path, options: Options, counts: &Mutex<Counts>) -> Result<(), Failed> {
    println!();
    if interrupted().is_some() {
        return Err("interrupted".into());
    }
    let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
    let started = Instant::now();
    let outcome = run_case(case, folder, options.tier, &mut counts);
    let seconds = started.elapsed().as_secs_f64();
    let result = match outcome {
        Outcome::Passed => {
            println!("ok {} {seconds:.1}s", case.name);
            Ok(())
        }
        Outcome::Skipped(why) => {
            counts.skipped += 1;
            println!("skipped {}: {why}", case.name);
            Ok(())
        }
        Outcome::Failed(why) => {
            let (first, rest) = why.split_once('\n').unwrap_or((&why, ""));
            println!("FAILED {}: {first} ({seconds:.1}s)", case.name);
            show("", rest);
            show_logs(folder);
            Err(first.into())
        }
    };
    if options.keep && result.is_err() {
        println!("    kept: {}", folder.display());
    } else {
        let _ = fs::remove_dir_all(folder);
    }
    result
}

/// Runs one case until it ends or reaches its time limit.
fn run_case(case: &Case, folder: &Path, tier: Option<&str>, counts: &mut Counts) -> Outcome {
    let mounts = mounts();
    let result = run_process(case, folder, tier, counts);
    let left = match &result {
        Ok(Outcome::Passed) => leftovers(folder, &mounts),
        _ => Vec::new(),
    };
    processes::kill_all();
    processes::wait_for_none(ENDING);
    match result {
        Ok(Outcome::Passed) if !left.is_empty() => {
            Outcome::Failed(format!("left behind:\n{}", left.join("\n")))
        }
        Ok(outcome) => outcome,
        Err(error) => Outcome::Failed(format!("{error:#}")),
    }
}

fn run_process(case: &Case, folder: &Path, tier: Option<&str>, counts: &mut Counts) -> Result<Outcome> {
    fs::create_dir_all(folder)?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(tier)
        .args(["--run-case", case.name])
        .arg(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start the case")?;
    let stdout = child.stdout.take().context("no output")?;
    let name = case.name;
    let parts = std::thread::spawn(move || print_parts(name, stdout));
    let deadline = Instant::now() + case.limit;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Ok(status);
        }
        let hung = Instant::now() >= deadline;
        if hung || interrupted().is_some() {
            let _ = child.kill();
            child.wait()?;
            break Err(hung);
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    if status.is_err() {
        processes::kill_all();
    }
    let (passed, failed) = parts.join().unwrap_or_default();
    counts.passed += passed;
    counts.failed += failed;
    let said = |file: &str| fs::read_to_string(folder.join(file)).ok();
    Ok(match status {
        Ok(status) if status.success() => Outcome::Passed,
        Ok(_) if said("skipped").is_some() => Outcome::Skipped(said("skipped").unwrap_or_default()),
        Ok(status) => {
            Outcome::Failed(said("reason").unwrap_or_else(|| format!("its process ended: {status}")))
        }
        Err(true) => Outcome::Failed(format!("still running after {} s", case.limit.as_secs())),
        Err(false) => Outcome::Failed("interrupted".to_owned()),
    })
}

/// Prints and counts the parts of the case called `case`; returns the number that passed and failed.
fn print_parts(case: &str, stdout: impl std::io::Read) -> (usize, usize) {
    let (mut passed, mut failed) = (0, 0);
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        if let Some(rest) = line.strip_prefix("part ok ") {
            passed += 1;
            println!("ok {case}/{rest}");
        } else if let Some(rest) = line.strip_prefix("part FAILED ") {
            failed += 1;
            println!("FAILED {case}/{rest}");
        } else {
            println!("    {line}");
        }
    }
    (passed, failed)
}

/// Describes the leftovers of a case that has passed.
fn leftovers(folder: &Path, mounts_before: &[String]) -> Vec<String> {
    let running: Vec<Process> = processes::wait_for_none(ENDING);
    let mut found: Vec<String> = running
        .iter()
        .map(|process| format!("process {}: {}", process.pid, process.command))
        .collect();
    for part in ["run", "scratch"] {
        found.extend(
            files_in(&folder.join(part))
                .iter()
                .map(|path| format!("file {}", path.display())),
        );
    }
    found.extend(
        mounts()
            .into_iter()
            .filter(|mount| !mounts_before.contains(mount))
            .map(|mount| format!("mount {mount}")),
    );
    found
}

/// The mount points of this process's namespace, with their sources.
fn mounts() -> Vec<String> {
    mounts_in(&fs::read_to_string("/proc/self/mountinfo").unwrap_or_default())
}

/// The mounts of a table, without those of services that systemd starts by a timer.
fn mounts_in(table: &str) -> Vec<String> {
    let mounts = table
        .lines()
        .map(|line| line.split(' ').skip(2).take(3).collect::<Vec<_>>().join(" "));
    mounts
        .filter(|mount| !mount.contains(" /run/credentials/"))
        .collect()
}

fn show_logs(folder: &Path) {
    let mut logs: Vec<_> = fs::read_dir(folder.join("logs"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    logs.sort();
    for log in logs {
        let text = fs::read(&log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).replace('\r', "");
        let name = log.file_name().unwrap_or_default().to_string_lossy();
        show(&format!("the end of {name}"), tail(&text, LOG_TAIL));
    }
}

/// Prints `text` indented, without the sequences that would move a terminal's cursor.
fn show(title: &str, text: &str) {
    if text.trim().is_empty() {
        return;
    }
    if !title.is_empty() {
        println!("    -- {title}:");
    }
    for line in text.lines() {
        println!("    {}", line.replace(|c: char| c.is_control() && c != '\t', "·"));
    }
}

/// The signal that requests the suite's end, or 0.
static INTERRUPTED: AtomicI32 = AtomicI32::new(0);

/// The signal that ended the suite early.
pub fn interrupted() -> Option<i32> {
    Some(INTERRUPTED.load(Ordering::Relaxed)).filter(|signal| *signal != 0)
}

extern "C" fn interrupt(signal: i32) {
    INTERRUPTED.store(signal, Ordering::Relaxed);
}

fn catch_signals() -> Result<()> {
    let handler: extern "C" fn(i32) = interrupt;
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only stores to an atomic, which is async-signal-safe.
        if unsafe { libc::signal(signal, handler as libc::sighandler_t) } == libc::SIG_ERR {
            return Err(std::io::Error::last_os_error().into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_other_services_are_not_leftovers() {
        let line = |mount: &str| format!("55 28 0:40 / {mount} rw,nosuid shared:9 - tmpfs none rw\n");
        let table = line("/run/credentials/systemd-tmpfiles-clean.service") + &line("/run/husk/netns");
        assert_eq!(mounts_in(&table), ["0:40 / /run/husk/netns"]);
    }
}
