//! What of a device's answers is changed, and what is learned of them.

use super::super::cdb::Cdb;
use super::{MAX_PRIVILEGED, PassthroughLimits, allowed_commands};

/// Something to be done about the answer to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResponseFilter {
    /// Supported VPD pages: block limits is among them.
    Pages,
    /// VPD page block limits: those of the host are kept too.
    BlockLimits,
    /// MODE SENSE, with the byte that has WP.
    WriteProtect(usize),
    /// READ CAPACITY (10) and (16) tell how long blocks are.
    Capacity10,
    Capacity16,
    /// REPORT SUPPORTED OPERATION CODES, all of them.
    Opcodes,
    /// The same of one command, which is not permitted.
    NoOpcode,
}

const BLOCK_LIMITS: u8 = 0xb0;

/// Bytes of the page with its header.
const BLOCK_LIMITS_LEN: usize = 0x40;

pub(super) fn for_inquiry(_: &PassthroughLimits, cdb: &Cdb) -> Option<ResponseFilter> {
    match (cdb.u8(1) & 3, cdb.u8(2)) {
        (1, 0x00) => Some(ResponseFilter::Pages),
        (1, BLOCK_LIMITS) => Some(ResponseFilter::BlockLimits),
        _ => None,
    }
}

pub(super) fn for_capacity10(_: &PassthroughLimits, _: &Cdb) -> Option<ResponseFilter> {
    Some(ResponseFilter::Capacity10)
}

pub(super) fn for_capacity16(_: &PassthroughLimits, _: &Cdb) -> Option<ResponseFilter> {
    Some(ResponseFilter::Capacity16)
}

pub(super) fn for_mode_sense(limits: &PassthroughLimits, cdb: &Cdb) -> Option<ResponseFilter> {
    let at = if cdb.opcode() == 0x1a { 2 } else { 3 };
    limits.read_only.then_some(ResponseFilter::WriteProtect(at))
}

pub(super) fn for_opcodes(limits: &PassthroughLimits, cdb: &Cdb) -> Option<ResponseFilter> {
    if cdb.u8(2) & 7 == 0 {
        return Some(ResponseFilter::Opcodes);
    }
    (!is_supported(limits, cdb.u8(3), cdb.u8(5))).then_some(ResponseFilter::NoOpcode)
}

/// Whether a guest can send a command; of those without service actions, `action` is not looked at.
fn is_supported(limits: &PassthroughLimits, opcode: u8, action: u8) -> bool {
    allowed_commands::is_own(opcode, action) || allowed_commands::find(limits, &[opcode, action]).is_ok()
}

impl ResponseFilter {
    /// The answer where the device is not asked.
    pub fn known(self) -> Option<Vec<u8>> {
        (self == Self::NoOpcode).then(|| vec![0, 1, 0, 0])
    }

    /// How many bytes to ask the device for, at most and if that is not what the initiator asks for: enough for what is
    /// looked at.
    pub fn allocation(self) -> Option<u32> {
        match self {
            // Old devices know a length of one byte.
            Self::Pages | Self::BlockLimits => Some(252),
            Self::Capacity16 => Some(32),
            Self::Opcodes => Some(32 << 10),
            Self::WriteProtect(_) | Self::Capacity10 | Self::NoOpcode => None,
        }
    }

    /// Changes an answer.
    pub fn apply(self, limits: &mut PassthroughLimits, mut data: Vec<u8>) -> Vec<u8> {
        match self {
            Self::Pages => add_block_limits(&mut data),
            Self::BlockLimits => clamp(limits, &mut data),
            Self::WriteProtect(at) => {
                if let Some(byte) = data.get_mut(at) {
                    *byte |= 0x80;
                }
            }
            Self::Capacity10 => update_from_capacity10(limits, &data),
            Self::Capacity16 => update_from_capacity16(limits, &data),
            Self::Opcodes => data = supported_opcodes(limits, &data),
            Self::NoOpcode => {}
        }
        data
    }

    /// The answer where the device refuses one.
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

pub(super) fn update_from_capacity10(limits: &mut PassthroughLimits, data: &[u8]) {
    if let Some((&last, rest)) = data.split_first_chunk::<4>()
        && let Some(size) = rest.first_chunk()
    {
        follow(limits, u32::from_be_bytes(last).into(), *size);
    }
}

pub(super) fn update_from_capacity16(limits: &mut PassthroughLimits, data: &[u8]) {
    if let Some((&last, rest)) = data.split_first_chunk::<8>()
        && let Some(size) = rest.first_chunk()
    {
        follow(limits, u64::from_be_bytes(last), *size);
    }
}

/// Takes over what a device says of its blocks, where that can be.
fn follow(limits: &mut PassthroughLimits, last: u64, size: [u8; 4]) {
    let size = u32::from_be_bytes(size);
    if size.is_power_of_two() && (256..=1 << 16).contains(&size) {
        limits.block_size = size;
        // One that has more than the command can tell says so with all ones.
        if last != u64::from(u32::MAX) {
            limits.blocks = last.saturating_add(1);
        }
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
    // The list ascends.
    let at = 4 + pages.partition_point(|page| *page < BLOCK_LIMITS);
    data.truncate(4 + len);
    data.insert(at, BLOCK_LIMITS);
    let [high, low] = (len as u16 + 1).to_be_bytes();
    data[2..4].copy_from_slice(&[high, low]);
}

/// Lowers what a device can do to what the host can. A limit of 0 is none.
fn clamp(limits: &PassthroughLimits, page: &mut [u8]) {
    let most = limits.max_transfer_blocks();
    let mut lower = |at: usize, unlimited: bool| {
        let field = page.get_mut(at..).and_then(<[u8]>::first_chunk_mut::<4>);
        if let Some(field) = field {
            let told = u32::from_be_bytes(*field);
            if told > most || told == 0 && unlimited {
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

/// Of a list of commands those that can be sent.
fn supported_opcodes(limits: &PassthroughLimits, data: &[u8]) -> Vec<u8> {
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
