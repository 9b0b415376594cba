//! A VM started by `husk run` in the foreground, with a session on its console and a copy of its monitor's log.

use super::context::{CommandResult, TestContext};
use super::datapath::Datapath;
use super::guest::Shell;
use super::manifest::Manifest;
use super::processes;
use super::program::Session;
use super::{PAUSE, TIMEOUT, poll};
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A running VM. Dropped, its `husk run` is killed, which leaves the VM running.
#[derive(Debug)]
pub struct Vm<'s> {
    ctx: &'s TestContext,
    name: String,
    run: Session,
    console: Session,
    /// Keeps the monitor's log, which is deleted with the VM.
    _monitor: Session,
}

impl<'s> Vm<'s> {
    /// Starts the VM and waits until it runs.
    ///
    /// # Errors
    /// If it does not run; with the output of `husk run`.
    pub fn start(ctx: &'s TestContext, manifest: &Manifest) -> Result<Self> {
        let words = manifest.run_words(ctx)?;
        Self::start_by(ctx, manifest, ctx.husk(&words))
    }

    /// Starts the VM with the given network `datapath`.
    pub fn start_with(ctx: &'s TestContext, manifest: &Manifest, datapath: Datapath) -> Result<Self> {
        let words = manifest.run_words(ctx)?;
        let command = datapath.husk(ctx, &words)?;
        let vm = Self::start_by(ctx, manifest, command)?;
        datapath.check(&vm)?;
        Ok(vm)
    }

    /// Restores the snapshot in `dir` as the VM called `name`, and waits until it runs.
    pub fn restore(ctx: &'s TestContext, dir: &Path, name: &str) -> Result<Self> {
        Self::restore_with(ctx, dir, name, &[])
    }

    /// The same with more arguments of `husk restore`.
    pub fn restore_with(ctx: &'s TestContext, dir: &Path, name: &str, more: &[&str]) -> Result<Self> {
        let dir = dir.display().to_string();
        let words = [&["restore", &dir, "--name", name], more].concat();
        Self::start_as(ctx, name, ctx.husk(&words))
    }

    fn start_by(ctx: &'s TestContext, manifest: &Manifest, command: Command) -> Result<Self> {
        Self::start_as(ctx, manifest.name(), command)
    }

    /// Starts the VM called `name` by `command`, and waits until it runs.
    pub fn start_as(ctx: &'s TestContext, name: &str, command: Command) -> Result<Self> {
        let name = name.to_owned();
        let run = Session::piped(command, &ctx.log(&format!("{name}.run.log")))?;
        run.expect(&format!(r"(?m)^{name}: running"), TIMEOUT)
            .with_context(|| format!("{name} does not run"))?;
        Self::attach(ctx, name, run)
    }

    /// Attaches to the VM called `name`, which `run` has started.
    pub fn attach(ctx: &'s TestContext, name: String, run: Session) -> Result<Self> {
        let console = console(ctx, &name)?;
        let words = ["logs", &name, "--monitor", "--follow"];
        let monitor = Session::piped(ctx.husk(&words), &ctx.log(&format!("{name}.monitor.log")))?;
        Ok(Self {
            ctx,
            name,
            run,
            console,
            _monitor: monitor,
        })
    }

    /// Name of the VM.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The test context that the VM belongs to.
    pub fn ctx(&self) -> &'s TestContext {
        self.ctx
    }

    /// The session on the VM's console.
    pub fn console(&self) -> &Session {
        &self.console
    }

    /// The VM's `husk run`.
    pub fn run(&self) -> &Session {
        &self.run
    }

    /// Waits until the guest's console prints `pattern`, with the time limit of a guest's step.
    pub fn expect(&self, pattern: &str) -> Result<Vec<String>> {
        self.console.expect(pattern, TIMEOUT)
    }

    /// Output of `husk inspect`.
    pub fn inspect(&self) -> Result<Value> {
        self.ctx.json(&["inspect", &self.name, "-o", "json"])
    }

    /// ID of the VM's process called `field` in `husk inspect`.
    pub fn pid(&self, field: &str) -> Result<i32> {
        let pid = self.inspect()?[field].as_i64().filter(|&pid| pid > 1);
        Ok(i32::try_from(
            pid.with_context(|| format!("no {field} in inspect"))?,
        )?)
    }

    /// Sends SIGKILL to the VM's process called `field` in `husk inspect`.
    pub fn kill(&self, field: &str) -> Result<()> {
        processes::kill(self.pid(field)?, Signal::KILL)
    }

    /// Waits until the VM has ended without leftovers; returns the output of `husk run`.
    pub fn end(&self, limit: Duration) -> Result<CommandResult> {
        let answer = self
            .run
            .wait(limit)
            .with_context(|| format!("{} does not end", self.name))?;
        self.ctx.nothing_left(Duration::from_secs(10))?;
        Ok(answer)
    }

    /// Waits for the guest to power off, and checks that the guest itself ended the VM.
    pub fn powered_off(&self) -> Result<()> {
        let answer = self.end(TIMEOUT)?;
        ensure!(
            answer.status == 0 && answer.text.contains("powered off"),
            "not a poweroff: exit status {}:\n{}",
            answer.status,
            answer.text
        );
        Ok(())
    }

    /// Powers the guest off from its shell: see [`Vm::powered_off`].
    pub fn power_off(&self, shell: &Shell<'_>) -> Result<()> {
        shell.send("poweroff -f")?;
        self.powered_off()
    }

    /// Kills the VM by `husk stop --force` and waits for its end.
    pub fn discard(&self) -> Result<()> {
        self.ctx.run(&["stop", "--force", &self.name])?.ok()?;
        self.end(TIMEOUT)?;
        Ok(())
    }

    /// Waits until `husk inspect` satisfies `wanted`, called `what` in the error.
    pub fn until(&self, what: &str, limit: Duration, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        poll(limit, PAUSE, || {
            let seen = self.inspect()?;
            Ok(if wanted(&seen) {
                Ok(seen)
            } else {
                Err(format!("not {what} after {} s: {seen:#}", limit.as_secs()))
            })
        })
    }
}

/// A session on the console of the VM called `name`.
pub fn console(ctx: &TestContext, name: &str) -> Result<Session> {
    Session::on_terminal(
        ctx.husk(&["console", name]),
        &ctx.log(&format!("{name}.console.log")),
    )
}
