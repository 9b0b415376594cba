//! Ethernet addresses.

/// An Ethernet (MAC) address, in the order of transmission.
pub type Mac = [u8; 6];

/// Most addresses kept of each kind, unicast or multicast. With more of a kind, all frames of that kind are received.
pub(crate) const MAC_TABLE_SIZE: usize = 64;
