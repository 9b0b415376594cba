//! Mode pages, MODE SENSE and MODE SELECT (SPC-4, sections 6.10 to 6.14 and 7.5; SBC-3, section 6; MMC-6, section 7).

use super::cdb::Cdb;
use super::command_error::CommandError;
use super::logical_unit::LogicalUnit;
use super::mode_parameters::Modes;
use super::properties::DeviceKind;
use super::sense::Sense;
use super::step::{ScsiCommand, Step};
use super::task::{Procedure, Work, answer};

/// Page codes.
const ERROR_RECOVERY: u8 = 0x01;
const CACHING: u8 = 0x08;
const CONTROL: u8 = 0x0a;
const EXCEPTIONS: u8 = 0x1c;
const CAPABILITIES: u8 = 0x2a;
const ALL: u8 = 0x3f;

/// WCE of the Caching page and D_SENSE of the Control page are both bit 2 of byte 2.
const CHANGEABLE_BYTE: usize = 2;
const CHANGEABLE_BIT: u8 = 0x04;

fn pages(kind: DeviceKind) -> &'static [u8] {
    match kind {
        DeviceKind::Disk => &[ERROR_RECOVERY, CACHING, CONTROL, EXCEPTIONS],
        DeviceKind::CdRom => &[ERROR_RECOVERY, CACHING, CONTROL, CAPABILITIES],
        DeviceKind::Passthrough => &[],
    }
}

/// A mode page with its header, with the values `modes`.
fn page(unit: &LogicalUnit, code: u8, modes: Modes) -> Vec<u8> {
    let len = match code {
        CACHING => 0x12,
        CAPABILITIES => 0x14,
        _ => 0x0a,
    };
    let mut page = vec![0; 2 + len];
    page[0] = code;
    page[1] = len as u8;
    match code {
        ERROR_RECOVERY if unit.kind == DeviceKind::Disk => page[2] = 0x80, // AWRE
        CACHING if modes.write_cache => page[CHANGEABLE_BYTE] = CHANGEABLE_BIT,
        CONTROL => {
            if modes.descriptor_sense {
                page[CHANGEABLE_BYTE] = CHANGEABLE_BIT;
            }
            page[3] = 0x10; // commands may be reordered without restriction
        }
        EXCEPTIONS => page[2] = 0x08, // DEXCPT
        CAPABILITIES => capabilities(unit, &mut page),
        _ => (),
    }
    page
}

/// CD/DVD Capabilities and Mechanical Status page.
fn capabilities(unit: &LogicalUnit, page: &mut [u8]) {
    /// Kilobytes per second of a 50-speed drive.
    const SPEED: u16 = 50 * 176;
    page[2] = 0x1b; // reads CD-R, CD-RW, DVD-ROM, DVD-R
    page[4] = 0x70; // multi-session, mode 2 forms 1 and 2
    page[6] = 0x29; // a tray, which can eject and be locked
    if unit.tray.prevented {
        page[6] |= 0x02;
    }
    page[8..10].copy_from_slice(&SPEED.to_be_bytes());
    page[10..12].copy_from_slice(&2u16.to_be_bytes()); // volume levels
    page[12..14].copy_from_slice(&2048u16.to_be_bytes()); // buffer, in KiB
    page[14..16].copy_from_slice(&SPEED.to_be_bytes());
}

/// The changeable bits of a page, with the page's header.
fn changeable(unit: &LogicalUnit, code: u8) -> Vec<u8> {
    let mut mask = page(unit, code, unit.modes);
    mask[2..].fill(0);
    let cache = unit
        .medium
        .is_some_and(|limits| limits.write_cache && !limits.read_only);
    if code == CONTROL || code == CACHING && cache {
        mask[CHANGEABLE_BYTE] = CHANGEABLE_BIT;
    }
    mask
}

/// MODE SENSE (6) and (10) (SPC-4, sections 6.13 and 6.14).
pub(crate) fn sense(unit: &mut LogicalUnit, cdb: &Cdb, _: &ScsiCommand<'_>) -> Result<Work, CommandError> {
    let six = cdb.opcode() == 0x1a;
    let (control, code, subpage) = (cdb.u8(2) >> 6, cdb.u8(2) & 0x3f, cdb.u8(3));
    if control == 3 {
        return Err(Sense::NO_SAVING.into());
    }
    let known = pages(unit.kind);
    let wanted: Vec<u8> = match code {
        ALL => known.to_vec(),
        _ if known.contains(&code) => vec![code],
        _ => return Err(Sense::invalid_cdb(2, Some(5)).into()),
    };
    if !matches!(subpage, 0x00 | 0xff) {
        return Err(Sense::invalid_cdb(3, None).into());
    }
    let long = !six && cdb.bit(1, 4);
    let descriptor = if cdb.bit(1, 3) {
        Vec::new()
    } else {
        block_descriptor(unit, long)
    };
    let mut body = descriptor.clone();
    for code in wanted {
        body.extend(match control {
            0 => page(unit, code, unit.modes),
            1 => changeable(unit, code),
            _ => page(unit, code, Modes::new(unit.medium.as_ref())),
        });
    }
    let specific = match (&unit.medium, unit.kind) {
        (Some(limits), DeviceKind::Disk) => 0x10 | u8::from(limits.read_only) << 7, // DPOFUA, WP
        _ => 0,
    };
    // MODE DATA LENGTH does not count itself.
    if six {
        let mut data = vec![(body.len() + 3) as u8, 0, specific, descriptor.len() as u8];
        data.extend(body);
        answer(data, cdb.u8(4))
    } else {
        let mut data = ((body.len() + 6) as u16).to_be_bytes().to_vec();
        let long = long && !descriptor.is_empty();
        data.extend([0, specific, long.into(), 0, 0, descriptor.len() as u8]);
        data.extend(body);
        answer(data, cdb.u16(7))
    }
}

/// Mode parameter block descriptor (SBC-3, section 6). CD-ROM drives have none.
fn block_descriptor(unit: &LogicalUnit, long: bool) -> Vec<u8> {
    let (Some(limits), DeviceKind::Disk) = (&unit.medium, unit.kind) else {
        return Vec::new();
    };
    if long {
        let mut bytes = limits.blocks.to_be_bytes().to_vec();
        bytes.extend([0; 4]);
        bytes.extend(limits.block_size.to_be_bytes());
        bytes
    } else {
        let blocks = u32::try_from(limits.blocks).unwrap_or(u32::MAX);
        let mut bytes = blocks.to_be_bytes().to_vec();
        // A reserved byte, then three of length.
        bytes.extend(limits.block_size.to_be_bytes());
        bytes
    }
}

/// MODE SELECT (6) and (10) (SPC-4, sections 6.11 and 6.12).
pub(crate) fn select(
    _: &mut LogicalUnit,
    cdb: &Cdb,
    command: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    cdb.require_clear(1, 0)?; // SP: nothing is saved
    if !cdb.bit(1, 4) {
        // Without PF, the parameters are not mode pages.
        return Err(Sense::invalid_cdb(1, Some(4)).into());
    }
    let len = if cdb.opcode() == 0x15 {
        cdb.u8(4).into()
    } else {
        cdb.u16(7)
    };
    match len {
        0 => Ok(Work::Done),
        _ => Work::list(cdb, command, len.into(), select_list),
    }
}

fn select_list(unit: &mut LogicalUnit, cdb: &Cdb, list: &[u8]) -> Result<Work, CommandError> {
    let modes = parse(unit, cdb.opcode() == 0x15, list)?;
    if unit.modes.write_cache && !modes.write_cache {
        let flushed = false;
        return Ok(Work::Run(Box::new(CacheOff { modes, flushed })));
    }
    unit.modes = modes;
    Ok(Work::Done)
}

/// Flushes the cache, then sets modes that switch it off: data in the cache must be as durable as later writes.
#[derive(Debug)]
struct CacheOff {
    modes: Modes,
    flushed: bool,
}

impl Procedure for CacheOff {
    fn advance(&mut self, unit: &mut LogicalUnit, _: &mut Vec<u8>) -> Result<Work, CommandError> {
        if !self.flushed {
            self.flushed = true;
            return Ok(Work::Once(Step::Flush));
        }
        unit.modes = self.modes;
        Ok(Work::Done)
    }
}

/// Checks a parameter list and returns the new values.
fn parse(unit: &LogicalUnit, six: bool, list: &[u8]) -> Result<Modes, Sense> {
    let header = if six { 4 } else { 8 };
    if list.len() < header {
        return Err(Sense::LIST_LENGTH);
    }
    let (long, descriptor) = if six {
        (false, usize::from(list[3]))
    } else {
        (
            list[4] & 1 != 0,
            usize::from(u16::from_be_bytes([list[6], list[7]])),
        )
    };
    let Some(body) = list.get(header + descriptor..) else {
        return Err(Sense::LIST_LENGTH);
    };
    if descriptor > 0 {
        check_descriptor(unit, long, &list[header..header + descriptor], header)?;
    }
    let mut modes = unit.modes;
    let mut rest = body;
    while !rest.is_empty() {
        let at = list.len() - rest.len();
        let code = rest[0] & 0x3f; // PS is reserved here
        if !pages(unit.kind).contains(&code) || rest[0] & 0x40 != 0 {
            return Err(Sense::invalid_parameter(at as u16, None));
        }
        let current = page(unit, code, modes);
        let mask = changeable(unit, code);
        if rest
            .get(1)
            .is_some_and(|&len| usize::from(len) != current.len() - 2)
        {
            return Err(Sense::invalid_parameter(at as u16 + 1, None));
        }
        let (new, later) = rest.split_at_checked(current.len()).ok_or(Sense::LIST_LENGTH)?;
        for (i, ((new, current), mask)) in new.iter().zip(&current).zip(&mask).enumerate().skip(2) {
            let wrong = (new ^ current) & !mask;
            if wrong != 0 {
                let bit = 7 - wrong.leading_zeros() as u8;
                return Err(Sense::invalid_parameter((at + i) as u16, Some(bit)));
            }
        }
        match code {
            CACHING => modes.write_cache = new[CHANGEABLE_BYTE] & CHANGEABLE_BIT != 0,
            CONTROL => modes.descriptor_sense = new[CHANGEABLE_BYTE] & CHANGEABLE_BIT != 0,
            _ => (),
        }
        rest = later;
    }
    Ok(modes)
}

/// Checks that a block descriptor matches the current one.
fn check_descriptor(unit: &LogicalUnit, long: bool, given: &[u8], at: usize) -> Result<(), Sense> {
    let mut current = block_descriptor(unit, long);
    if given.len() != current.len() {
        // The length field is at the end of the header.
        return Err(Sense::invalid_parameter(at as u16 - 1, None));
    }
    // 0 blocks stand for all blocks.
    let count = if long { 8 } else { 4 };
    if given[..count].iter().all(|&b| b == 0) {
        current[..count].fill(0);
    }
    match given.iter().zip(&current).position(|(a, b)| a != b) {
        Some(byte) => Err(Sense::invalid_parameter((at + byte) as u16, None)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
