//! The demonstration's VM.

use super::console::Console;
use super::place::Place;
use super::show::Message;
use crate::serial::Serial;
use anyhow::{Context, Result, bail, ensure};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Interval at which the guest's newest line is shown.
const GLANCE: Duration = Duration::from_millis(250);
/// Time limit of one step of a boot, in a lab on a busy machine.
const STEP: Duration = Duration::from_secs(600);

/// The console of a VM that `husk apply` has started, by `husk console`.
#[derive(Debug)]
pub struct Guest {
    client: Child,
    pub console: Console,
    /// Start of the VMM.
    began: Instant,
}

impl Guest {
    /// Runs `start`, which starts the VM `name`, and attaches to its console as soon as there is one.
    pub fn started(place: &Place, name: &str, start: impl FnOnce() -> Result<String>) -> Result<Self> {
        let ended = AtomicBool::new(false);
        // A socket from before belongs to the earlier life of the VM.
        let socket = || Place::socket(name).metadata().map(|file| file.ino()).ok();
        let earlier = socket();
        let (mut client, began) = std::thread::scope(|scope| {
            let attached = scope.spawn(|| {
                while socket().is_none_or(|now| Some(now) == earlier) {
                    ensure!(!ended.load(Ordering::Relaxed), "{name} has no console");
                    std::thread::sleep(Duration::from_millis(10));
                }
                let mut client = place.command("husk");
                client.args(["console", name]).stdin(Stdio::piped());
                client
                    .stdout(Stdio::piped())
                    .stderr(Stdio::null())
                    .spawn()
                    .context("cannot start husk")
            });
            let wall = SystemTime::now();
            let began = Instant::now();
            let done = start();
            ended.store(true, Ordering::Relaxed);
            let client = attached
                .join()
                .unwrap_or_else(|_| bail!("the console's thread ended"));
            done?;
            let view: serde_json::Value =
                serde_json::from_str(&place.husk(&["inspect", "-o", "json", name])?)?;
            let time = |which: &str| -> Result<SystemTime> {
                let text = view["times"][which].as_str().context("no time")?;
                Ok(text.parse::<jiff::Timestamp>()?.into())
            };
            let (started, running) = (time("vmmStarted")?, time("running")?);
            let before = started.duration_since(wall).unwrap_or_default();
            let mib = view["memoryBytes"].as_u64().unwrap_or_default() >> 20;
            let cpus = view["cpus"].as_u64().unwrap_or_default();
            let what = format!(
                "{cpus} vCPU{}, {mib} MiB; {:.1} s after the command",
                if cpus == 1 { "" } else { "s" },
                before.as_secs_f64()
            );
            moment(0.0, "VMM started", &what);
            let runs = running.duration_since(started).unwrap_or_default();
            moment(runs.as_secs_f64(), "guest runs", "");
            anyhow::Ok((client?, began + before))
        })?;
        let keyboard = client.stdin.take().context("no pipe")?;
        let output = Serial::watch(client.stdout.take().context("no pipe")?);
        Ok(Self {
            client,
            console: Console::new(keyboard, output),
            began,
        })
    }

    /// Waits until the guest prints one of `words`, and shows its output meanwhile. Returns the index and the seconds
    /// since the start.
    pub fn until(&mut self, words: &[&str]) -> Result<(usize, f64)> {
        let deadline = Instant::now() + STEP;
        let mut shown = String::new();
        while Instant::now() < deadline {
            if let Some((which, when)) = self.console.output.poll(words, Instant::now() + GLANCE)? {
                return Ok((which, when.saturating_duration_since(self.began).as_secs_f64()));
            }
            let line = self.console.output.last_line();
            if line != shown {
                Message::News(line.clone()).tell();
                shown = line;
            }
        }
        bail!(
            "the guest did not say {words:?} within {} s; last: {shown}",
            STEP.as_secs()
        )
    }

    /// Shows a command and its output in the guest.
    pub fn shows(&mut self, command: &str) -> Result<()> {
        Message::Command(format!("{command}      # in the guest")).tell();
        for line in self.console.run(command)?.lines() {
            Message::Line(line.to_owned()).tell();
        }
        Ok(())
    }
}

pub fn moment(seconds: f64, what: &str, more: &str) {
    Message::Moment(seconds, what.to_owned(), more.to_owned()).tell();
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}
