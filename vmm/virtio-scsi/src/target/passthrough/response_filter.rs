//! Filters for a passthrough device's responses: what the guest sees, and what the limits are updated from.

use super::super::passthrough_device::{MAX_PRIVILEGED, PassthroughLimits};

/// A filter for the response to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResponseFilter {
    /// Supported VPD pages: adds Block Limits.
    Pages,
    /// Block Limits VPD page: lowers the limits to those of the host.
    BlockLimits,
    /// MODE SENSE: sets WP in this byte.
    WriteProtect(usize),
    /// READ CAPACITY (10) and (16): updates the limits.
    Capacity10,
    Capacity16,
    /// REPORT SUPPORTED OPERATION CODES, all commands: removes those that are not allowed.
    Opcodes,
    /// REPORT SUPPORTED OPERATION CODES, one command that is not allowed.
    NoOpcode,
}

pub(super) const BLOCK_LIMITS: u8 = 0xb0;

/// Length of the page with its header.
const BLOCK_LIMITS_LEN: usize = 0x40;

impl ResponseFilter {
    /// A response for which the device is not asked.
    pub fn known(self) -> Option<Vec<u8>> {
        (self == Self::NoOpcode).then(|| vec![0, 1, 0, 0])
    }

    /// ALLOCATION LENGTH for the device, if not the initiator's: enough for the filter.
    pub fn allocation(self) -> Option<u32> {
        match self {
            // Old devices support a length of one byte only.
            Self::Pages | Self::BlockLimits => Some(252),
            Self::Capacity16 => Some(32),
            Self::Opcodes => Some(32 << 10),
            Self::WriteProtect(_) | Self::Capacity10 | Self::NoOpcode => None,
        }
    }

    /// Applies the filter to a response. `is_supported` is true for a command that the guest can send.
    pub fn apply(
        self,
        limits: &mut PassthroughLimits,
        mut data: Vec<u8>,
        is_supported: fn(&PassthroughLimits, u8, u8) -> bool,
    ) -> Vec<u8> {
        match self {
            Self::Pages => add_block_limits(&mut data),
            Self::BlockLimits => clamp(limits, &mut data),
            Self::WriteProtect(at) => {
                if let Some(byte) = data.get_mut(at) {
                    *byte |= 0x80;
                }
            }
            Self::Capacity10 => limits.update_from_capacity10(&data),
            Self::Capacity16 => limits.update_from_capacity16(&data),
            Self::Opcodes => data = supported_opcodes(limits, &data, is_supported),
            Self::NoOpcode => {}
        }
        data
    }

    /// A response in place of an ILLEGAL REQUEST of the device.
    pub fn replacement(self, limits: &PassthroughLimits) -> Option<Vec<u8>> {
        if self != Self::BlockLimits {
            return None;
        }
        let mut page = vec![0; BLOCK_LIMITS_LEN];
        (page[1], page[3]) = (BLOCK_LIMITS, BLOCK_LIMITS_LEN as u8 - 4);
        clamp(limits, &mut page);
        Some(page)
    }
}

fn add_block_limits(data: &mut Vec<u8>) {
    let Some((&[high, low], pages)) = data.get(2..).and_then(<[u8]>::split_first_chunk) else {
        return;
    };
    let len = usize::from(u16::from_be_bytes([high, low])).min(pages.len());
    let pages = &pages[..len];
    if pages.contains(&BLOCK_LIMITS) {
        return;
    }
    // The list is in ascending order.
    let at = 4 + pages.partition_point(|page| *page < BLOCK_LIMITS);
    data.truncate(4 + len);
    data.insert(at, BLOCK_LIMITS);
    let [high, low] = (len as u16 + 1).to_be_bytes();
    data[2..4].copy_from_slice(&[high, low]);
}

/// Lowers the device's limits to those of the host. 0 is no limit.
fn clamp(limits: &PassthroughLimits, page: &mut [u8]) {
    let most = limits.max_transfer_blocks();
    let mut lower = |at: usize, unlimited: bool| {
        let field = page.get_mut(at..).and_then(<[u8]>::first_chunk_mut::<4>);
        if let Some(field) = field {
            let reported = u32::from_be_bytes(*field);
            if reported > most || reported == 0 && unlimited {
                *field = most.to_be_bytes();
            }
        }
    };
    lower(8, true); // MAXIMUM TRANSFER LENGTH
    lower(12, false); // OPTIMAL TRANSFER LENGTH
    if let Some(compared) = page.get_mut(5) {
        let most = match limits.privileged {
            true => MAX_PRIVILEGED / 2 / limits.block_size.max(1),
            false => 0,
        };
        *compared = (*compared).min(u8::try_from(most).unwrap_or(u8::MAX));
    }
}

/// Removes commands that are not allowed from a list of all commands.
fn supported_opcodes(
    limits: &PassthroughLimits,
    data: &[u8],
    is_supported: fn(&PassthroughLimits, u8, u8) -> bool,
) -> Vec<u8> {
    let mut known = vec![0; 4];
    let Some((&len, mut rest)) = data.split_first_chunk::<4>() else {
        return data.to_vec();
    };
    rest = &rest[..rest.len().min(u32::from_be_bytes(len) as usize)];
    while let Some(flags) = rest.get(5) {
        let size = if flags & 0x02 == 0 { 8 } else { 20 };
        let Some((descriptor, others)) = rest.split_at_checked(size) else {
            break;
        };
        if is_supported(limits, descriptor[0], descriptor[3]) {
            known.extend(descriptor);
        }
        rest = others;
    }
    let len = known.len() as u32 - 4;
    known[..4].copy_from_slice(&len.to_be_bytes());
    known
}
