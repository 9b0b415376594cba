//! Commands of CD and DVD drives other than reading (MMC-6, sections 5 and 6).
//!
//! A disc is one session with one data track.

use super::cdb::Cdb;
use super::command_error::CommandError;
use super::logical_unit::LogicalUnit;
use super::properties::MediumLimits;
use super::sense::Sense;
use super::step::ScsiCommand;
use super::task::Work;
use super::task::answer;

/// Profiles.
const CD_ROM: u16 = 0x0008;
const DVD_ROM: u16 = 0x0010;

/// Blocks of an 80-minute CD. A larger disc is a DVD.
const CD_BLOCKS: u64 = 80 * 60 * 75;

/// ADR 1; CONTROL: data track, recorded uninterrupted, copying prohibited.
const DATA_TRACK: u8 = 0x14;

fn profile(limits: &MediumLimits) -> u16 {
    if limits.blocks > CD_BLOCKS {
        DVD_ROM
    } else {
        CD_ROM
    }
}

/// An address in a table of contents: the block, or with `msf` minutes, seconds and frames, which start at two seconds.
fn address(block: u64, msf: bool) -> [u8; 4] {
    if !msf {
        return u32::try_from(block).unwrap_or(u32::MAX).to_be_bytes();
    }
    let frames = block.saturating_add(150);
    let minutes = u8::try_from(frames / 75 / 60).unwrap_or(u8::MAX);
    [0, minutes, (frames / 75 % 60) as u8, (frames % 75) as u8]
}

/// READ TOC/PMA/ATIP (MMC-6, section 6).
pub(crate) fn toc(unit: &mut LogicalUnit, cdb: &Cdb, _: &ScsiCommand<'_>) -> Result<Work, CommandError> {
    const LEAD_OUT: u8 = 0xaa;
    let limits = unit.ready()?;
    let msf = cdb.bit(1, 1);
    // Linux asks for sessions in the vendor specific bits of CONTROL, as in SFF-8020i.
    let format = match cdb.u8(2) & 0x0f {
        0 => cdb.u8(9) >> 6,
        format => format,
    };
    let track = |number: u8, block: u64| {
        let [a, b, c, d] = address(block, msf);
        [0, DATA_TRACK, number, 0, a, b, c, d]
    };
    let mut body = vec![1, 1]; // first and last track, or session
    match (format, cdb.u8(6)) {
        (0, first) => {
            match first {
                0 | 1 => body.extend(track(1, 0)),
                LEAD_OUT => (),
                _ => return Err(Sense::invalid_cdb(6, None).into()),
            }
            body.extend(track(LEAD_OUT, limits.blocks));
        }
        (1, _) => body.extend(track(1, 0)),
        _ => return Err(Sense::invalid_cdb(2, Some(3)).into()),
    }
    let mut data = (body.len() as u16).to_be_bytes().to_vec();
    data.extend(body);
    answer(data, cdb.u16(7))
}

/// GET CONFIGURATION (MMC-6, section 6).
pub(crate) fn configuration(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    let (which, start) = (cdb.u8(1) & 3, cdb.u16(2));
    let current = unit.ready().map_or(0, profile);
    let loaded = current != 0;
    let profiles = [(DVD_ROM, current == DVD_ROM), (CD_ROM, current == CD_ROM)];
    let mut body = vec![0, 0];
    body.extend(current.to_be_bytes());
    // Code, version, persistent, current, data.
    let features: [(u16, u8, bool, bool, Vec<u8>); 6] = [
        (
            0x0000, // profile list
            0,
            true,
            true,
            profiles
                .iter()
                .flat_map(|&(code, now)| {
                    let [high, low] = code.to_be_bytes();
                    [high, low, now.into(), 0]
                })
                .collect(),
        ),
        (0x0001, 2, true, true, vec![0, 0, 0, 1, 0x01, 0, 0, 0]), // core: SCSI; DBE
        (0x0002, 1, true, true, vec![0x02, 0, 0, 0]),             // morphing: OCEvent
        (0x0003, 2, true, true, vec![0x39, 0, 0, 0]),             // removable medium: tray, load, eject, lock
        (0x0010, 0, false, loaded, vec![0, 0, 0x08, 0, 0, 1, 0, 0]), // random readable: blocks of 2048 bytes
        (
            if current == DVD_ROM { 0x001f } else { 0x001e }, // DVD read, CD read
            u8::from(current != DVD_ROM) * 2,
            false,
            loaded,
            vec![0; 4],
        ),
    ];
    for (code, version, persistent, now, bytes) in features {
        let wanted = match which {
            0 => code >= start,
            1 => code >= start && now,
            2 => code == start,
            _ => return Err(Sense::invalid_cdb(1, Some(1)).into()),
        };
        if wanted {
            body.extend(code.to_be_bytes());
            body.push(version << 2 | u8::from(persistent) << 1 | u8::from(now));
            body.push(bytes.len() as u8);
            body.extend(bytes);
        }
    }
    let mut data = (body.len() as u32).to_be_bytes().to_vec();
    data.extend(body);
    answer(data, cdb.u16(7))
}

/// GET EVENT STATUS NOTIFICATION (MMC-6, section 6): polled, media class only.
pub(crate) fn event_status(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    const MEDIA: u8 = 4;
    const NOTHING: u8 = 0x80;
    if !cdb.bit(1, 0) {
        return Err(Sense::invalid_cdb(1, Some(0)).into());
    }
    let supported = 1 << MEDIA;
    let data = if cdb.bit(4, MEDIA) {
        let open = unit.tray.open;
        let present = !open && unit.medium.is_some();
        // An allocation length without room for the event keeps the event.
        let event = if cdb.u16(7) > 4 {
            unit.tray.event.take()
        } else {
            None
        };
        let event = event.map_or(0, |event| event as u8);
        vec![
            0,
            4,
            MEDIA,
            supported,
            event,
            u8::from(present) << 1 | u8::from(open),
            0,
            0,
        ]
    } else {
        vec![0, 0, NOTHING, supported]
    };
    answer(data, cdb.u16(7))
}

/// READ DISC INFORMATION (MMC-6, section 6): standard information of a finalized disc.
pub(crate) fn disc_information(
    _: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    if cdb.u8(1) & 7 != 0 {
        return Err(Sense::invalid_cdb(1, Some(2)).into());
    }
    let mut data = vec![0; 34];
    data[1] = 32;
    data[2] = 0x0e; // last session complete, disc finalized
    data[3..7].fill(1); // first track; sessions; first and last track of the last session
    data[7] = 0x20; // unrestricted use
    data[16..24].fill(0xff); // no lead-in and lead-out to be written
    answer(data, cdb.u16(7))
}

/// READ TRACK INFORMATION (MMC-6, section 6) of the only track.
pub(crate) fn track_information(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    let limits = unit.ready()?;
    let number = cdb.u32(2);
    match cdb.u8(1) & 3 {
        0 if u64::from(number) >= limits.blocks => return Err(Sense::OUT_OF_RANGE.into()),
        1 | 2 if number != 1 => return Err(Sense::invalid_cdb(2, None).into()),
        3 => return Err(Sense::invalid_cdb(1, Some(1)).into()),
        _ => (),
    }
    let mut data = vec![0; 36];
    data[1] = 34;
    data[2] = 1; // track
    data[3] = 1; // session
    data[5] = DATA_TRACK & 0x0f;
    data[6] = 0x01; // mode 1
    let blocks = u32::try_from(limits.blocks).unwrap_or(u32::MAX);
    data[24..28].copy_from_slice(&blocks.to_be_bytes());
    answer(data, cdb.u16(7))
}

/// READ DVD STRUCTURE (MMC-6, section 6): a DVD-ROM with one layer. A drive that reads DVDs has to have the command.
pub(crate) fn dvd_structure(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    const PHYSICAL: u8 = 0x00;
    const COPYRIGHT: u8 = 0x01;
    const MANUFACTURING: u8 = 0x04;
    const LIST: u8 = 0xff;
    /// Bytes of the structures, without their headers.
    const LENGTHS: [(u8, u16); 3] = [(PHYSICAL, 2048), (COPYRIGHT, 4), (MANUFACTURING, 2048)];
    /// Number of the first physical sector with data.
    const FIRST_SECTOR: u32 = 0x3_0000;
    if cdb.u8(1) & 0x0f != 0 {
        return Err(Sense::invalid_cdb(1, Some(3)).into()); // not a DVD's structures
    }
    let format = cdb.u8(7);
    let body = if format == LIST {
        let entry = |(format, len): (u8, u16)| {
            let [high, low] = (len + 4).to_be_bytes();
            [format, 0x40, high, low] // readable
        };
        LENGTHS.into_iter().flat_map(entry).collect()
    } else {
        let limits = unit.ready()?;
        if profile(limits) != DVD_ROM {
            return Err(Sense::INCOMPATIBLE_MEDIUM.into());
        }
        let known = LENGTHS.iter().find(|(known, _)| *known == format);
        let &(_, len) = known.ok_or(Sense::invalid_cdb(7, None))?;
        if cdb.u8(6) != 0 {
            return Err(Sense::invalid_cdb(6, None).into()); // layer
        }
        let mut body = vec![0; len.into()];
        if format == PHYSICAL {
            let last = u64::from(FIRST_SECTOR) + limits.blocks - 1;
            let last = u32::try_from(last).unwrap_or(u32::MAX).min(0xff_ffff);
            body[..4].copy_from_slice(&[0x01, 0x0f, 0x01, 0]); // DVD-ROM; 120 mm, any rate; embossed
            body[4..8].copy_from_slice(&FIRST_SECTOR.to_be_bytes());
            body[8..12].copy_from_slice(&last.to_be_bytes());
        }
        body
    };
    let mut data = (body.len() as u16 + 2).to_be_bytes().to_vec();
    data.extend([0; 2]);
    data.extend(body);
    answer(data, cdb.u16(8))
}

/// MECHANISM STATUS (MMC-6, section 6): no changer.
pub(crate) fn mechanism_status(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    let mut data = vec![0; 8];
    data[1] = u8::from(unit.tray.open) << 4;
    data[5] = 1; // slots
    answer(data, cdb.u16(8))
}

#[cfg(test)]
mod tests;
