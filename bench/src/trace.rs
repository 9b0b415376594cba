//! The kernel's tracepoints for a VMM and its descendants, in a separate trace instance.

use anyhow::{Context, Result, ensure};
use rustix::time::{ClockId, clock_gettime};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const TRACEFS: &str = "/sys/kernel/tracing";
const INSTANCE: &str = "husk-bench";

/// Starts of programs, and accesses to I/O ports, which [`END_PORTS`] narrows down to those that end a guest.
pub const ENDS: &[&str] = &["sched/sched_process_exec", PORTS];

/// The ports by which guests end: PM1a_CNT of Husk, Cloud Hypervisor and q35, and the keyboard controller.
pub const END_PORTS: &str = "port == 0x600 || port == 0x604 || port == 0x64";

/// VM exits with their reasons.
pub const EXITS: &[&str] = &[
    "sched/sched_process_exec",
    "kvm/kvm_exit",
    "kvm/kvm_mmio",
    "kvm/kvm_pio",
    "kvm/kvm_userspace_exit",
];

/// Accesses to I/O ports.
pub const PORTS: &str = "kvm/kvm_pio";

/// Buffer size in kilobytes for each processor: several times the amount that a q35 boot needs.
const BUFFER: &str = "16384";

/// A trace instance, which is removed when this is dropped.
#[derive(Debug)]
pub struct Trace {
    folder: PathBuf,
}

impl Trace {
    /// Creates the instance.
    ///
    /// # Errors
    /// If this process is not root, or the kernel has no tracefs.
    pub fn new() -> Result<Self> {
        let instances = Path::new(TRACEFS).join("instances");
        if !instances.exists() {
            let mounted = Command::new("mount")
                .args(["-t", "tracefs", "tracefs", TRACEFS])
                .status()?;
            ensure!(mounted.success(), "cannot mount tracefs: {mounted}");
        }
        let folder = instances.join(INSTANCE);
        // An instance may be left over from a benchmark that was killed.
        let _ = std::fs::remove_dir(&folder);
        std::fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let trace = Self { folder };
        trace.set("buffer_size_kb", BUFFER)?;
        trace.set("trace_clock", "mono")?;
        trace.set("options/event-fork", "1")?;
        Ok(trace)
    }

    /// Traces `events` of processes that this thread starts from now on.
    pub fn begin(&self, events: &[&str]) -> Result<()> {
        self.set("tracing_on", "0")?;
        self.set("events/enable", "0")?;
        self.set("set_event_pid", &rustix::thread::gettid().to_string())?;
        self.set("trace", "")?;
        for event in events {
            self.narrow(event, "0")?;
            self.set(&format!("events/{event}/enable"), "1")
                .with_context(|| format!("no tracepoint {event}: is the kvm module loaded?"))?;
        }
        self.set("tracing_on", "1")
    }

    /// Traces only those occurrences of an event that match `filter`; with `0`, all.
    pub fn narrow(&self, event: &str, filter: &str) -> Result<()> {
        self.set(&format!("events/{event}/filter"), filter)
    }

    /// Stops tracing; returns the events, with times in seconds of the monotonic clock.
    ///
    /// # Errors
    /// If events were lost.
    pub fn end(&self) -> Result<String> {
        self.stop()?;
        for entry in std::fs::read_dir(self.folder.join("per_cpu"))? {
            let stats = std::fs::read_to_string(entry?.path().join("stats"))?;
            let lost = |line: &&str| {
                let lost = ["overrun: ", "dropped events: "]
                    .iter()
                    .find_map(|name| line.strip_prefix(name));
                lost.is_some_and(|count| count.trim() != "0")
            };
            ensure!(
                !stats.lines().any(|line| lost(&line)),
                "the trace has lost events:\n{stats}"
            );
        }
        self.text()
    }

    /// The events so far.
    pub fn text(&self) -> Result<String> {
        let text = std::fs::read(self.folder.join("trace"))?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Stops tracing.
    pub fn stop(&self) -> Result<()> {
        self.set("tracing_on", "0")?;
        self.set("events/enable", "0")?;
        self.set("set_event_pid", "")
    }

    fn set(&self, file: &str, value: &str) -> Result<()> {
        let path = self.folder.join(file);
        std::fs::write(&path, value).with_context(|| format!("cannot write {value:?} to {}", path.display()))
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = self.stop();
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// One line of a trace: `COMM-PID [CPU] FLAGS SECONDS: NAME: ARGS`.
#[derive(Debug)]
pub struct Event<'a> {
    /// Seconds of the monotonic clock.
    pub time: f64,
    /// Name of the tracepoint.
    pub name: &'a str,
    /// Fields of the event, as text.
    pub args: &'a str,
}

impl<'a> Event<'a> {
    /// The event of a line, unless it is a comment.
    pub fn parse(line: &'a str) -> Option<Self> {
        let (head, rest) = line.split_once(": ")?;
        let (name, args) = rest.split_once(": ")?;
        let time = head.rsplit(' ').next()?.parse().ok()?;
        Some(Self { time, name, args })
    }

    /// The word after the word `key`; empty if there is none.
    pub fn after(&self, key: &str) -> &'a str {
        let mut words = self.args.split_whitespace();
        words
            .find(|word| *word == key)
            .and_then(|_| words.next())
            .unwrap_or_default()
    }

    /// The byte that the guest writes to its serial line by this event, if it does.
    pub fn serial_byte(&self) -> Option<u8> {
        let is_write = self.name == "kvm_pio" && self.args.starts_with("pio_write at 0x3f8 ");
        let value = self.after("val").trim_start_matches("0x");
        is_write.then(|| u8::from_str_radix(value, 16).ok()).flatten()
    }
}

/// Seconds of the monotonic clock, as in [`Event::time`].
pub fn now() -> Result<f64> {
    Ok(Duration::try_from(clock_gettime(ClockId::Monotonic))?.as_secs_f64())
}
