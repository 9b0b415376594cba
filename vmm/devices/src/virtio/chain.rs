//! Descriptor chains of split virtqueues, with detection of malformed ones (virtio 1.2, section 2.7).

use virtio_queue::DescriptorChain;
use vm_memory::GuestAddress;

use crate::GuestMemMmap;

/// Most descriptors read of one chain. Drivers may send far fewer.
const MAX_DESCRIPTORS: usize = 1024;

/// One descriptor's range of guest memory, not yet checked to exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical address of the first byte.
    pub address: GuestAddress,
    /// Length in bytes; may be 0.
    pub len: u32,
}

/// Errors of a malformed descriptor chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// The chain loops, exceeds the longest allowed chain, or leaves its descriptor table.
    #[error("descriptor chain does not end")]
    Unterminated,
    /// A device-readable descriptor follows a device-writable one (section 2.7.4.2).
    #[error("device-readable descriptor after a device-writable one")]
    Order,
}

/// Replaces the content of `readable` and `writable` with the device-readable and device-writable segments of
/// `chain`.
///
/// # Errors
/// The chain is malformed; the content of the two lists is then unspecified.
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
    // The iterator stops silently at a loop, at a descriptor outside its table and at a bad indirect table. Then its
    // last descriptor has the NEXT flag, or it returned none.
    if more {
        Err(ChainError::Unterminated)
    } else {
        Ok(())
    }
}
