//! Descriptor chains, with the ways a driver can break them made visible (virtio 1.2, section 2.7).

use virtio_queue::DescriptorChain;
use vm_memory::GuestAddress;

use crate::GuestMemMmap;

/// Descriptors of one chain. What a driver may send is far less; this bounds what is looked at.
const MAX_DESCRIPTORS: usize = 1024;

/// One descriptor's range of guest memory. Nobody has checked that it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte.
    pub address: GuestAddress,
    /// Bytes, perhaps 0.
    pub len: u32,
}

/// Why a chain cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// It loops, is longer than any driver may make it, or leaves its descriptor table.
    #[error("a descriptor chain that does not end")]
    Unterminated,
    /// A device-readable descriptor follows a device-writable one (section 2.7.4.2).
    #[error("a readable descriptor after a writable one")]
    Order,
}

/// Replaces the content of `readable` and `writable` by the segments of `chain`.
///
/// # Errors
/// The chain is malformed; then what the two hold is of no use.
pub fn segments(
    chain: DescriptorChain<&GuestMemMmap>,
    readable: &mut Vec<Segment>,
    writable: &mut Vec<Segment>,
) -> Result<(), ChainError> {
    readable.clear();
    writable.clear();
    let mut more = true;
    for (count, descriptor) in chain.enumerate() {
        if count == MAX_DESCRIPTORS {
            return Err(ChainError::Unterminated);
        }
        more = descriptor.has_next();
        let segment = Segment {
            address: descriptor.addr(),
            len: descriptor.len(),
        };
        if descriptor.is_write_only() {
            writable.push(segment);
        } else if writable.is_empty() {
            readable.push(segment);
        } else {
            return Err(ChainError::Order);
        }
    }
    // The iterator stops without a word at a loop, at a descriptor outside its table and at a bad
    // indirect table: then the last one it gave promised another, or there was none.
    if more {
        Err(ChainError::Unterminated)
    } else {
        Ok(())
    }
}
