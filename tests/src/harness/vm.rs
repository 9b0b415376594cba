//! A VM started by `husk run` in the foreground, with a session on its console and its monitor's log kept.

use super::PATIENCE;
use super::datapath::Datapath;
use super::manifest::Manifest;
use super::program::Session;
use super::scene::{Answer, Scene};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::process::Command;
use std::time::{Duration, Instant};

/// A running VM. Dropped, its `husk run` is killed, which leaves the VM running.
#[derive(Debug)]
pub struct Vm<'s> {
    scene: &'s Scene,
    name: String,
    run: Session,
    console: Session,
    /// Keeps the monitor's log, which goes with the VM.
    _monitor: Session,
}

impl<'s> Vm<'s> {
    /// Starts it and waits until it runs.
    ///
    /// # Errors
    /// With what `husk run` said, if it does not.
    pub fn start(scene: &'s Scene, manifest: &Manifest) -> Result<Self> {
        let words = manifest.run_words(scene)?;
        Self::start_by(scene, manifest, scene.husk(&words))
    }

    /// The same where its frames go by `datapath`.
    pub fn start_with(scene: &'s Scene, manifest: &Manifest, datapath: Datapath) -> Result<Self> {
        let words = manifest.run_words(scene)?;
        let command = datapath.husk(scene, &words)?;
        let vm = Self::start_by(scene, manifest, command)?;
        datapath.check(&vm)?;
        Ok(vm)
    }

    fn start_by(scene: &'s Scene, manifest: &Manifest, command: Command) -> Result<Self> {
        let name = manifest.name().to_owned();
        let run = Session::piped(command, &scene.log(&format!("{name}.run.log")))?;
        run.expect(&format!(r"(?m)^{name}: running"), PATIENCE)
            .with_context(|| format!("{name} does not run"))?;
        Self::attach(scene, name, run)
    }

    /// Attaches to the VM called `name`, which `run` has started.
    pub fn attach(scene: &'s Scene, name: String, run: Session) -> Result<Self> {
        let console = console(scene, &name)?;
        let words = ["logs", &name, "--monitor", "--follow"];
        let monitor = Session::piped(scene.husk(&words), &scene.log(&format!("{name}.monitor.log")))?;
        Ok(Self {
            scene,
            name,
            run,
            console,
            _monitor: monitor,
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The scene it is in.
    pub fn scene(&self) -> &'s Scene {
        self.scene
    }

    /// The session on its console.
    pub fn console(&self) -> &Session {
        &self.console
    }

    /// Its `husk run`.
    pub fn run(&self) -> &Session {
        &self.run
    }

    /// Waits until its guest's console says `pattern`, for as long as a guest's step may take.
    pub fn expect(&self, pattern: &str) -> Result<Vec<String>> {
        self.console.expect(pattern, PATIENCE)
    }

    /// `husk inspect`.
    pub fn inspect(&self) -> Result<Value> {
        self.scene.json(&["inspect", &self.name, "-o", "json"])
    }

    /// The id of its process called `field` in `husk inspect`.
    pub fn pid(&self, field: &str) -> Result<i32> {
        let pid = self.inspect()?[field].as_i64().filter(|&pid| pid > 1);
        Ok(i32::try_from(
            pid.with_context(|| format!("no {field} in inspect"))?,
        )?)
    }

    /// Kills its process called `field` in `husk inspect` without a word.
    pub fn kill(&self, field: &str) -> Result<()> {
        Ok(kill(Pid::from_raw(self.pid(field)?), Signal::SIGKILL)?)
    }

    /// Waits for its end, and that nothing of it is left then; what `husk run` said.
    pub fn end(&self, limit: Duration) -> Result<Answer> {
        let answer = self
            .run
            .wait(limit)
            .with_context(|| format!("{} does not end", self.name))?;
        self.scene.nothing_left(Duration::from_secs(10))?;
        Ok(answer)
    }

    /// Waits for the guest to power off, and that it was the guest which ended it.
    pub fn powered_off(&self) -> Result<()> {
        let answer = self.end(PATIENCE)?;
        ensure!(
            answer.status == 0 && answer.text.contains("powered off"),
            "not a poweroff: exit status {}:\n{}",
            answer.status,
            answer.text
        );
        Ok(())
    }

    /// Kills the VM by `husk stop --force` and waits for its end.
    pub fn discard(&self) -> Result<()> {
        self.scene.run(&["stop", "--force", &self.name])?.ok()?;
        self.end(PATIENCE)?;
        Ok(())
    }

    /// Waits until `husk inspect` satisfies `wanted`, called `what` in the error.
    pub fn until(&self, what: &str, limit: Duration, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let deadline = Instant::now() + limit;
        loop {
            let seen = self.inspect()?;
            if wanted(&seen) {
                return Ok(seen);
            }
            if Instant::now() >= deadline {
                bail!("not {what} after {} s: {seen:#}", limit.as_secs());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// A session on the console of the VM called `name`.
pub fn console(scene: &Scene, name: &str) -> Result<Session> {
    Session::on_terminal(
        scene.husk(&["console", name]),
        &scene.log(&format!("{name}.console.log")),
    )
}
