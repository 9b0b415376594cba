//! The compared VMMs, and how their guests are started.

use crate::bench_files::BenchFiles;
use crate::guest::{FLOOR, Guest};
use crate::line::Line;
use crate::peers::{Devices, Peer, Peers};
use crate::smaps;
use crate::started::Started;
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Case {
    /// `husk run --detach`: the VM is left with its monitor and its VMM.
    Husk,
    /// QEMU's q35.
    Q35,
    /// Another VMM.
    Peer(Peer),
    /// `husk-floor`, which loads the kernel and does hardly anything else.
    Floor,
}

/// Memory of each guest.
pub const MEMORY_MIB: u64 = 128;

/// A guest that was started.
#[derive(Debug)]
pub struct Vm {
    case: Case,
    /// Its processes.
    pub started: Started,
    /// Husk's serial line, once it is watched; the others' is their output.
    line: Option<Line>,
    /// Socket of Husk's monitor.
    socket: PathBuf,
}

impl Case {
    /// Husk first, then those it is compared with.
    pub const ALL: [Self; 5] = [
        Self::Husk,
        Self::Q35,
        Self::Peer(Peer::Firecracker),
        Self::Peer(Peer::CloudHypervisor),
        Self::Floor,
    ];

    /// Name of the case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Husk => "husk",
            Self::Q35 => "qemu-q35",
            Self::Peer(peer) => peer.name(),
            Self::Floor => FLOOR,
        }
    }

    /// True if this case of another VMM or of the floor is to be measured. The others always are.
    pub fn asked_for(self, peers: &Peers, floor: bool) -> bool {
        match self {
            Self::Peer(peer) => peers.has(peer),
            Self::Floor => floor,
            Self::Husk | Self::Q35 => true,
        }
    }

    /// Starts guest `number` with the kernel's command line `append`.
    pub fn start(
        self,
        files: &BenchFiles,
        peers: &Peers,
        number: u32,
        append: &str,
        patience: Duration,
    ) -> Result<Vm> {
        let name = format!("density-{number}");
        let guest = Guest {
            name: &name,
            vcpus: 1,
            mib: MEMORY_MIB,
            append: Some(append),
        };
        let vmm = match self {
            Self::Husk => guest.husk_detached(files)?,
            Self::Q35 => guest.qemu("q35", files),
            Self::Peer(peer) => peers.ready(peer, &guest, files, &Devices::default())?,
            Self::Floor => guest.floor(files),
        };
        Ok(Vm {
            case: self,
            started: Started::start(vmm, patience)?,
            line: None,
            socket: guest.socket(files),
        })
    }
}

impl Vm {
    /// Begins to watch the guest's serial line.
    pub fn watch(&mut self) -> Result<()> {
        if self.case == Case::Husk {
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
    pub fn processes(&mut self) -> Result<Vec<u32>> {
        if self.case == Case::Husk {
            self.started.returned()?;
        }
        let processes = self.started.group.pids()?;
        ensure!(!processes.is_empty(), "a guest of {} has ended", self.case.name());
        Ok(processes)
    }

    /// KiB of memory that its processes do not share, without the guest's, and the guest's.
    pub fn memory(&mut self) -> Result<[u64; 2]> {
        let processes = self.processes()?;
        let vmm = match self.case {
            Case::Husk => self.started.group.find("husk-vmm")?,
            _ => self.started.pid(),
        };
        let guest = smaps::resident(vmm, MEMORY_MIB)?.guest_kib;
        let all = processes.into_iter().map(smaps::unshared).sum::<Result<u64>>()?;
        Ok([all.saturating_sub(guest), guest])
    }
}
