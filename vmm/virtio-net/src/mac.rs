//! Ethernet addresses.

/// An Ethernet (MAC) address, in the order of transmission.
pub type Mac = [u8; 6];

/// Addresses of each kind that are kept; with more of a kind, all of the kind are received.
pub(crate) const MAC_TABLE_SIZE: usize = 64;
