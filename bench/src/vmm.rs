//! The VMMs that boot one kernel and initrd with the same devices.

use crate::bench_files::BenchFiles;
use crate::cases::BenchCase;
use crate::guest::{self, FLOOR, Guest};
use crate::peers::{Devices, Peer, Peers};
use crate::started::Started;
use anyhow::Result;
use serde::{Deserialize, Serialize};

/// A VMM in one configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Vmm {
    /// Husk, as users start it.
    Husk,
    /// QEMU's microvm. Without an RTC the guest would search for one for over a second.
    Microvm,
    /// QEMU's q35.
    Q35,
    /// Another VMM.
    Peer(Peer),
    /// `husk-floor`, which shows the guest as little as possible.
    Floor,
}

impl BenchCase for Vmm {
    fn name(self) -> &'static str {
        match self {
            Self::Husk => "husk",
            Self::Microvm => "qemu-microvm",
            Self::Q35 => "qemu-q35",
            Self::Peer(peer) => peer.name(),
            Self::Floor => FLOOR,
        }
    }
}

impl Vmm {
    /// Husk first, then those it is compared with.
    pub const ALL: [Self; 6] = [
        Self::Husk,
        Self::Microvm,
        Self::Q35,
        Self::Peer(Peer::Firecracker),
        Self::Peer(Peer::CloudHypervisor),
        Self::Floor,
    ];

    /// True if this case of another VMM or of the floor is to be measured. The others always are.
    pub fn asked_for(self, peers: &Peers, floor: bool) -> bool {
        match self {
            Self::Floor => floor,
            _ => self.is_given(peers),
        }
    }

    /// The VMM of a guest that boots the benchmark's kernel and initrd.
    pub fn ready(self, guest: &Guest<'_>, files: &BenchFiles) -> Result<guest::Vmm> {
        match self {
            Self::Husk => guest.husk(files, "", ""),
            Self::Microvm => Ok(guest.qemu("microvm,rtc=on", files)),
            Self::Q35 => Ok(guest.qemu("q35", files)),
            Self::Peer(peer) => peer.ready(guest, files, &Devices::default()),
            Self::Floor => Ok(guest.floor(files, None)),
        }
    }

    /// The process that holds the guest's memory.
    pub fn process(self, started: &Started) -> Result<u32> {
        match self {
            Self::Husk => started.group.find("husk-vmm"),
            _ => Ok(started.pid()),
        }
    }
}
