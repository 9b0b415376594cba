//! One run of a target, which is a program with libFuzzer in it.

use super::confinement::confined;
use super::corpus::stored;
use crate::checkout;
use crate::exit_code;
use crate::progress::ends_with_this_process;
use anyhow::{Context, Result};
use std::fmt;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::Instant;

/// Time in seconds that one input may take.
const INPUT_LIMIT: u32 = 20;
/// Memory of a target, in MiB.
const MEMORY_LIMIT: u32 = 2048;
/// Lines kept of a target that found something.
const TAIL: usize = 60;

/// Result of one run.
#[derive(Debug)]
pub struct Outcome {
    /// Inputs that were made by the run: those that it began with are not counted.
    pub executions: u64,
    /// Edges of the code that any input reached.
    pub coverage: u32,
    pub seconds: f64,
    pub finding: Option<Finding>,
}

/// An input that makes a target fail.
#[derive(Debug)]
pub struct Finding {
    target: String,
    /// None if the target ended in another way, such as by an overflow of its stack.
    input: Option<PathBuf>,
    output: String,
    panicked: bool,
    /// Exit status of the target, or the signal that killed it.
    status: String,
    seed: u32,
}

impl Finding {
    /// True if the target panics with an input. A busy machine can make any input too slow.
    pub fn is_panic(&self) -> bool {
        self.input.is_some() && self.panicked
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} executions in {:.0} s, {} edges covered{}",
            self.executions,
            self.seconds,
            self.coverage,
            if self.finding.is_some() { ", FAILED" } else { "" }
        )
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\nFAILED {}", self.output, self.target)?;
        match &self.input {
            Some(input) => write!(
                f,
                "repeat it: cargo xtask fuzz {} --input {}",
                self.target,
                input.display()
            ),
            None => write!(
                f,
                "it ended without an input ({}); with the same corpus, the seed repeats it: cargo xtask fuzz {} --seed {}",
                self.status, self.target, self.seed
            ),
        }
    }
}

/// Runs `target` for `seconds`. New inputs go to the folder `corpus`.
pub fn run(program: &Path, target: &str, corpus: &Path, seconds: u32, seed: u32) -> Result<Outcome> {
    let artifacts = checkout::folder(checkout::target().join("fuzz/artifacts").join(target))?;
    let started = Instant::now();
    let (status, output) = confined(program, &[corpus, &artifacts], |mut command| {
        command
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-timeout={INPUT_LIMIT}"))
            .arg(format!("-rss_limit_mb={MEMORY_LIMIT}"))
            // 0 has a meaning of its own.
            .arg(format!("-seed={}", seed.max(1)))
            .arg(format!("-artifact_prefix={}/", artifacts.display()))
            // Long inputs at once: a short program does little.
            .args(["-len_control=0", "-print_final_stats=1"])
            .arg(corpus);
        let stored = stored(target);
        if stored.is_dir() {
            command.arg(stored);
        }
        observe(command)
    })?;
    let finding = (!status.success()).then(|| Finding {
        target: target.to_owned(),
        input: output.input,
        output: output.tail.join("\n"),
        panicked: output.panicked,
        status: status.to_string(),
        seed,
    });
    Ok(Outcome {
        executions: output.executions.saturating_sub(output.loaded),
        coverage: output.coverage,
        seconds: started.elapsed().as_secs_f64(),
        finding,
    })
}

/// Runs the command to its end, and reads its output.
fn observe(mut command: Command) -> Result<(ExitStatus, Output)> {
    ends_with_this_process(&mut command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let mut output = Output::default();
    if let Some(stderr) = child.stderr.take() {
        for line in BufReader::new(stderr).split(b'\n') {
            output.line(&String::from_utf8_lossy(&line?));
        }
    }
    Ok((child.wait()?, output))
}

/// Runs one input, with the output of the target on the terminal.
pub fn repeat(program: &Path, input: &Path) -> Result<ExitCode> {
    std::fs::File::open(input).with_context(|| input.display().to_string())?;
    let status = confined(program, &[], |mut command| {
        command.arg(format!("-timeout={INPUT_LIMIT}")).arg(input);
        Ok(command.status()?)
    })?;
    Ok(exit_code(status.success()))
}

/// The figures in the output of libFuzzer.
#[derive(Debug, Default)]
struct Output {
    executions: u64,
    /// Executions until all inputs of the corpus have run.
    loaded: u64,
    coverage: u32,
    input: Option<PathBuf>,
    panicked: bool,
    tail: Vec<String>,
}

impl Output {
    /// Takes one line, such as `#512 DONE cov: 120 ft: 300 corp: 9/40b …` or `stat::number_of_executed_units: 512`.
    fn line(&mut self, line: &str) {
        if let Some((_, rest)) = line.split_once(" cov: ")
            && let Some(edges) = rest.split_whitespace().next().and_then(|word| word.parse().ok())
        {
            self.coverage = edges;
        }
        if line.contains("\tINITED") {
            let number = line.trim_start_matches('#').split_whitespace().next();
            self.loaded = number.and_then(|number| number.parse().ok()).unwrap_or_default();
        }
        if let Some(units) = line.strip_prefix("stat::number_of_executed_units:") {
            self.executions = units.trim().parse().unwrap_or_default();
        }
        // A slow input is written too, and the run goes on.
        if let Some((_, path)) = line.split_once("Test unit written to ")
            && !path.contains("slow-unit-")
        {
            self.input = Some(PathBuf::from(path));
        }
        // Its backtrace may be longer than the tail.
        self.panicked |= line.contains(" panicked at ");
        if !line.starts_with('#') {
            if self.tail.len() == TAIL {
                self.tail.remove(0);
            }
            self.tail.push(line.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_come_from_the_last_lines() {
        let mut output = Output::default();
        for line in [
            "INFO: Seed: 7",
            "#2\tINITED cov: 12 ft: 13 corp: 1/1b exec/s: 0 rss: 30Mb",
            "#4096\tpulse  cov: 120 ft: 300 corp: 9/40b lim: 43 exec/s: 2048 rss: 31Mb",
            "#8192\tDONE   cov: 121 ft: 301 corp: 9/40b lim: 43 exec/s: 2048 rss: 31Mb",
            "stat::number_of_executed_units: 8192",
        ] {
            output.line(line);
        }
        assert_eq!(
            (output.executions, output.loaded, output.coverage),
            (8192, 2, 121)
        );
        assert_eq!((output.input, output.tail.len()), (None, 2));
    }

    #[test]
    fn a_finding_names_its_input() {
        let mut output = Output::default();
        output.line("artifact_prefix='/a/'; Test unit written to /a/slow-unit-4567");
        assert_eq!(output.input, None);
        output.line("thread '<unnamed>' panicked at src/lib.rs:7:9:");
        output.line("artifact_prefix='/a/'; Test unit written to /a/crash-0123");
        assert_eq!(output.input.as_deref(), Some(Path::new("/a/crash-0123")));
        let mut finding = Finding {
            target: "qcow2".to_owned(),
            input: output.input,
            output: output.tail.join("\n"),
            panicked: output.panicked,
            status: "signal: 11 (SIGSEGV)".to_owned(),
            seed: 7,
        };
        assert!(finding.is_panic());
        let text = finding.to_string();
        assert!(
            text.contains("lib.rs:7:9") && text.ends_with("fuzz qcow2 --input /a/crash-0123"),
            "{text}"
        );
        finding.input = None;
        let text = finding.to_string();
        assert!(
            text.contains("SIGSEGV") && text.ends_with("fuzz qcow2 --seed 7"),
            "{text}"
        );
    }
}
