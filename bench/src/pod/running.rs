//! A running guest, with all its processes.

use super::case::{Case, MEMORY_MIB};
use super::containerd::Containerd;
use super::overhead::Overhead;
use crate::bench_files::BenchFiles;
use crate::group::{Group, stat_field};
use crate::guest::Vmm;
use crate::started::milliseconds;
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{CWD, Mode, mkfifoat};
use rustix::param::clock_ticks_per_second;
use rustix::time::{ClockId, clock_gettime};
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use xtask::serial::Serial;

/// Interval at which a child is checked while its guest boots.
const LOOK: Duration = Duration::from_millis(500);
/// Field `starttime` of `/proc/PID/stat`.
const START_TIME: usize = 22;
/// Maximum time for a guest to power off and for its processes to end.
const GOING: Duration = Duration::from_secs(120);

/// Common parameters of the guests of a benchmark.
#[derive(Debug)]
pub struct PodBench {
    /// Programs and files.
    pub files: BenchFiles,
    /// The containerd that creates pods.
    pub containerd: Containerd,
}

/// A guest, whose processes are ended when this is dropped.
#[derive(Debug)]
pub struct Running<'a> {
    bench: &'a PodBench,
    case: Case,
    name: String,
    /// Time just before the start.
    pub began: Instant,
    /// The same, by the clock of process start times.
    clock: Duration,
    child: Child,
    errors: PathBuf,
    stop: Option<Command>,
    serial: Serial,
    /// Keeps the FIFO open until the shim has opened it.
    line: Option<File>,
    /// Cgroup of the VMM, if there is a shim; else of all processes.
    vmm: Group,
    shim: Option<Group>,
}

impl<'a> Running<'a> {
    /// Starts the guest.
    pub fn start(bench: &'a PodBench, case: Case, name: String) -> Result<Self> {
        let fifo = bench.files.folder.join(format!("{name}.line"));
        let Vmm {
            mut command,
            stop,
            errors,
        } = case.ready(&bench.files, &bench.containerd, &name, &fifo)?;
        let path = Case::group(&name);
        let (vmm, shim, lines) = if case == Case::Husk {
            bench.containerd.count(&mut command)?;
            let shim = Group::counted(&Case::shim_group(&name))?;
            mkfifoat(CWD, &fifo, Mode::RUSR | Mode::WUSR)?;
            // Opened for both directions, so that the call does not wait for a peer.
            let both = File::options().read(true).write(true).open(&fifo)?;
            (Group::at(&path), Some(shim), Some((both, File::open(&fifo)?)))
        } else {
            let group = Group::counted(&path)?;
            group.hold(&mut command)?;
            (group, None, None)
        };
        let log = File::create(&errors)?;
        command.stderr(log.try_clone()?);
        match lines {
            Some(_) => command.stdout(log),
            None => command.stdout(Stdio::piped()),
        };
        let (began, clock) = (Instant::now(), clock_gettime(ClockId::Boottime));
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let (serial, line) = match lines {
            Some((both, line)) => (Serial::watch(line), Some(both)),
            None => (Serial::watch(child.stdout.take().context("no pipe")?), None),
        };
        Ok(Self {
            bench,
            case,
            name,
            began,
            clock: clock.try_into()?,
            child,
            errors,
            stop,
            serial,
            line,
            vmm,
            shim,
        })
    }

    /// Waits until the guest prints `words`.
    pub fn until(&mut self, words: &str, deadline: Instant) -> Result<Instant> {
        loop {
            let pause = deadline.min(Instant::now() + LOOK);
            let said = self.serial.poll(&[words], pause);
            if let Some((_, when)) = said.with_context(|| self.complaints())? {
                return Ok(when);
            }
            // The client of a pod has nothing more to do once it runs.
            if let Some(status) = self.child.try_wait()?
                && !status.success()
            {
                bail!("{}: {status}: {}", self.name, self.complaints());
            }
            ensure!(
                Instant::now() < deadline,
                "{}: the guest did not say {words:?} in time; its last line: {}; {}",
                self.name,
                self.serial.last_line(),
                self.complaints()
            );
        }
    }

    fn complaints(&self) -> String {
        std::fs::read_to_string(&self.errors).unwrap_or_default()
    }

    fn groups(&self) -> impl Iterator<Item = &Group> {
        [Some(&self.vmm), self.shim.as_ref()].into_iter().flatten()
    }

    /// CPU time of all processes, except containerd and its clients.
    pub fn cpu(&self) -> Result<Duration> {
        self.groups().map(Group::cpu).sum()
    }

    /// Milliseconds until Husk's VMM was started.
    pub fn to_vmm(&self) -> Result<f64> {
        self.since_start(self.vmm.find("husk-vmm")?)
    }

    /// Milliseconds until the shim was started, if there is one.
    pub fn to_shim(&self) -> Result<Option<f64>> {
        // The kernel truncates the name.
        let pid = self.shim.as_ref().map(|shim| shim.find("containerd-shim"));
        pid.map(|pid| self.since_start(pid?)).transpose()
    }

    fn since_start(&self, pid: u32) -> Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let ticks = stat_field(&stat, START_TIME).context("no start time")?;
        let started = Duration::from_secs_f64(ticks as f64 / clock_ticks_per_second() as f64);
        Ok(milliseconds(started.saturating_sub(self.clock)))
    }

    /// Memory without the guest's: of the VMM (of all processes, if there is no shim), and of the shim.
    pub fn overhead(&self) -> Result<(Overhead, Option<Overhead>)> {
        let shim = self.shim.as_ref().map(|shim| Overhead::of(shim, 0));
        Ok((Overhead::of(&self.vmm, MEMORY_MIB)?, shim.transpose()?))
    }

    /// Presses a pod's power button; [`Running::gone`] ends other guests.
    pub fn stop(&self) -> Result<()> {
        if self.case == Case::Husk {
            let containerd = &self.bench.containerd;
            containerd.ctr(&["tasks", "kill", "--signal", "SIGTERM", &self.name])?;
        }
        Ok(())
    }

    /// Waits until the stopped guest has ended, and removes it.
    ///
    /// # Errors
    /// If a guest does not power off, or something of its pod is left.
    pub fn gone(mut self) -> Result<()> {
        let Some(shim) = &self.shim else {
            return Ok(());
        };
        let (containerd, deadline) = (&self.bench.containerd, Instant::now() + GOING);
        self.vmm.wait_until_empty(deadline)?;
        self.line = None;
        // The exit status is the guest's.
        while let Err(error) = containerd.ctr(&["tasks", "rm", &self.name]) {
            let early = error.to_string().contains("must be stopped");
            ensure!(early && Instant::now() < deadline, error);
        }
        containerd.ctr(&["containers", "rm", &self.name])?;
        shim.wait_until_empty(deadline)?;
        ensure!(!self.vmm.exists(), "{} stays", self.vmm.folder().display());
        let state = self.bench.files.runtime.path().join("pods").join(&self.name);
        ensure!(!state.exists(), "{} stays", state.display());
        Ok(())
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(stop) = &mut self.stop {
            let _ = stop.status();
        }
        for group in self.groups() {
            let _ = group.kill();
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        if self.case == Case::Husk && self.vmm.exists() {
            let containerd = &self.bench.containerd;
            let _ = containerd.ctr(&["tasks", "rm", "--force", &self.name]);
            let _ = containerd.ctr(&["containers", "rm", &self.name]);
        }
        let _ = std::fs::remove_file(self.bench.files.folder.join(format!("{}.line", self.name)));
    }
}
