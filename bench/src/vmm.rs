//! The VMMs that boot one kernel and initrd with the same devices.

use super::guest::FLOOR;
use super::peers::{Peer, Peers};
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

impl Vmm {
    /// The case's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Husk => "husk",
            Self::Microvm => "qemu-microvm",
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
            Self::Husk | Self::Microvm | Self::Q35 => true,
        }
    }
}
