//! The compared VMMs, and how their guests are started.

use crate::bench_files::BenchFiles;
use crate::cases::BenchCase;
use crate::guest::Guest;
use crate::line::Line;
use crate::smaps;
use crate::started::Started;
use crate::vmm::Vmm;
use anyhow::{Result, ensure};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Memory of each guest.
pub const MEMORY_MIB: u64 = 128;

/// A guest that was started.
#[derive(Debug)]
pub struct Vm {
    vmm: Vmm,
    /// Its processes.
    pub started: Started,
    /// Husk's serial line, once it is watched; the others' is their output.
    line: Option<Line>,
    /// Socket of Husk's monitor.
    socket: PathBuf,
}

impl Vm {
    /// Starts guest `number` of a VMM with the kernel's command line `append`.
    pub fn start(vmm: Vmm, files: &BenchFiles, number: u32, append: &str, timeout: Duration) -> Result<Self> {
        let name = format!("density-{number}");
        let guest = Guest {
            name: &name,
            vcpus: 1,
            mib: MEMORY_MIB,
            append: Some(append),
        };
        let command = match vmm {
            Vmm::Husk => guest.husk_detached(files)?,
            _ => vmm.ready(&guest, files)?,
        };
        Ok(Self {
            vmm,
            started: Started::start(command, timeout)?,
            line: None,
            socket: guest.socket(files),
        })
    }

    /// Begins to watch the guest's serial line.
    pub fn watch(&mut self) -> Result<()> {
        if self.vmm == Vmm::Husk {
            self.line = Some(self.started.reached(&self.socket, Line::monitor)?);
        }
        Ok(())
    }

    /// Waits until the guest prints `words`.
    pub fn until(&mut self, words: &str) -> Result<Instant> {
        match &mut self.line {
            Some(line) => line.until(words, self.started.deadline()),
            None => self.started.until(words),
        }
    }

    /// The processes that stay as long as the guest.
    fn processes(&mut self) -> Result<Vec<u32>> {
        if self.vmm == Vmm::Husk {
            self.started.returned()?;
        }
        let processes = self.started.group.pids()?;
        ensure!(!processes.is_empty(), "a guest of {} has ended", self.vmm.name());
        Ok(processes)
    }

    /// KiB of memory that its processes do not share, without the guest's, and the guest's.
    pub fn memory(&mut self) -> Result<[u64; 2]> {
        let processes = self.processes()?;
        let vmm = self.vmm.process(&self.started)?;
        let guest = smaps::resident(vmm, MEMORY_MIB)?.guest_kib;
        let all = processes.into_iter().map(smaps::unshared).sum::<Result<u64>>()?;
        Ok([all.saturating_sub(guest), guest])
    }
}
