//! A login shell on a guest's console.

use crate::serial::Serial;
use anyhow::{Context, Result};
use std::io::Write;
use std::process::ChildStdin;
use std::time::{Duration, Instant};

/// Time limit of the guest's reply to one line of input.
const ANSWER: Duration = Duration::from_secs(60);

/// Both directions of a guest's serial line.
#[derive(Debug)]
pub struct Console {
    keyboard: ChildStdin,
    /// Output of the guest.
    pub output: Serial,
}

impl Console {
    /// The console of a program that connects its standard input and `output` to the serial line.
    pub fn new(keyboard: ChildStdin, output: Serial) -> Self {
        Self { keyboard, output }
    }

    /// The rest of the current line.
    pub fn rest_of_line(&mut self) -> Result<String> {
        self.output.wait_for("\n", Instant::now() + ANSWER)?;
        let line = self.output.said();
        Ok(line.trim().to_owned())
    }

    /// Types a line.
    pub fn type_line(&mut self, line: &str) -> Result<()> {
        self.keyboard
            .write_all(format!("{line}\n").as_bytes())
            .context("the console does not take input")
    }

    /// Logs in at a login prompt.
    pub fn log_in(&mut self, user: &str, password: &str) -> Result<()> {
        // Other output may follow the prompt: request a fresh one.
        self.type_line("")?;
        let soon = Instant::now() + ANSWER;
        self.output.wait_for("login: ", soon)?;
        self.type_line(user)?;
        self.output.wait_for("Password: ", soon)?;
        self.type_line(password)?;
        self.output.wait_for("$ ", soon)?;
        // Without echo and prompt, all output is the command's. The terminal's width is set as well.
        self.type_line("PS1=; PS2=; stty -echo cols 100; export LC_ALL=C.UTF-8; echo rea''dy")?;
        self.output.wait_for("ready\r\n", soon)?;
        Ok(())
    }

    /// Runs a shell command in the guest; returns its output.
    pub fn run(&mut self, command: &str) -> Result<String> {
        self.type_line(&format!("echo beg''in; {{ {command}; }} 2>&1; echo en''d"))?;
        let soon = Instant::now() + ANSWER;
        self.output.wait_for("begin\r\n", soon)?;
        self.output.wait_for("end\r\n", soon)?;
        Ok(self.output.said())
    }
}
