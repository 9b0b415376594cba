//! INQUIRY and vital product data (SPC-4, sections 6.6 and 7.8; SBC-3, section 6).

use super::cdb::Cdb;
use super::command_error::CommandError;
use super::logical_unit::LogicalUnit;
use super::properties::{DeviceKind, MediumLimits};
use super::provisioning::MAX_DESCRIPTORS;
use super::sense::Sense;
use super::step::ScsiCommand;
use super::task::Work;
use super::task::answer;
use super::verify::max_compare_blocks;

/// Length of standard INQUIRY data: up to the end of the version descriptors.
const STANDARD_LEN: usize = 74;

/// Version descriptors: SAM-5, SPC-4, SBC-3, no version claimed.
const DISK_VERSIONS: [u16; 3] = [0x00a0, 0x0460, 0x04c0];

/// Version descriptors: SAM-5, SPC-4.
const CD_VERSIONS: [u16; 2] = [0x00a0, 0x0460];

/// MEDIUM ROTATION RATE of a rotating medium, per minute.
const ROTATION: u16 = 7200;

/// INQUIRY (SPC-4, section 6.6).
pub(crate) fn inquiry(unit: &mut LogicalUnit, cdb: &Cdb, _: &ScsiCommand<'_>) -> Result<Work, CommandError> {
    cdb.require_clear(1, 1)?; // CMDDT, obsolete
    let page = cdb.u8(2);
    let data = if cdb.bit(1, 0) {
        vital(unit, page).ok_or(Sense::invalid_cdb(2, None))?
    } else if page == 0 {
        standard(unit)
    } else {
        return Err(Sense::invalid_cdb(2, None).into());
    };
    answer(data, cdb.u16(3))
}

/// Standard INQUIRY data of a LUN that does not exist: peripheral qualifier 011b, device type 1Fh.
pub(crate) fn absent() -> Vec<u8> {
    let mut data = vec![0; 36];
    data[0] = 0x7f;
    data[2] = 0x06;
    data[3] = 0x12;
    data[4] = 36 - 5;
    data[8..].fill(b' ');
    data
}

fn device_type(unit: &LogicalUnit) -> u8 {
    match unit.kind {
        DeviceKind::Disk | DeviceKind::Passthrough => 0x00,
        DeviceKind::CdRom => 0x05,
    }
}

fn standard(unit: &LogicalUnit) -> Vec<u8> {
    let mut data = vec![0; STANDARD_LEN];
    data[0] = device_type(unit);
    data[1] = if unit.kind == DeviceKind::CdRom { 0x80 } else { 0 }; // RMB
    data[2] = 0x06; // SPC-4
    data[3] = 0x12; // HISUP, response data format 2
    data[4] = STANDARD_LEN as u8 - 5;
    data[7] = 0x02; // CMDQUE
    text(&mut data[8..16], &unit.identity.vendor);
    text(&mut data[16..32], &unit.identity.product);
    text(&mut data[32..36], &unit.identity.revision);
    let versions: &[u16] = match unit.kind {
        DeviceKind::Disk | DeviceKind::Passthrough => &DISK_VERSIONS,
        DeviceKind::CdRom => &CD_VERSIONS,
    };
    for (field, version) in data[58..].as_chunks_mut::<2>().0.iter_mut().zip(versions) {
        *field = version.to_be_bytes();
    }
    data
}

/// Left-aligned and padded with spaces.
fn text(field: &mut [u8], text: &str) {
    let printable = text.bytes().filter(|b| matches!(b, b' '..=b'~'));
    for (to, from) in field.iter_mut().zip(printable.chain(std::iter::repeat(b' '))) {
        *to = from;
    }
}

fn vital(unit: &LogicalUnit, page: u8) -> Option<Vec<u8>> {
    let disk = unit.medium.as_ref().filter(|_| unit.kind == DeviceKind::Disk);
    let body = match page {
        0x00 => {
            let mut pages = vec![0x00, 0x83];
            if unit.identity.serial.is_some() {
                pages.insert(1, 0x80);
            }
            if disk.is_some() {
                pages.extend([0xb0, 0xb1, 0xb2]);
            }
            pages
        }
        0x80 => unit.identity.serial_bytes()?,
        0x83 => designators(unit),
        0xb0 => block_limits(disk?),
        0xb1 => characteristics(disk?),
        0xb2 => provisioning(disk?),
        _ => return None,
    };
    let mut data = vec![device_type(unit), page];
    data.extend((body.len() as u16).to_be_bytes());
    data.extend(body);
    Some(data)
}

/// Device Identification VPD page: one vendor specific ASCII designator of the logical unit.
fn designators(unit: &LogicalUnit) -> Vec<u8> {
    let id = unit.identity.designator();
    if id.is_empty() {
        return Vec::new();
    }
    let mut page = vec![0x02, 0x00, 0, id.len() as u8];
    page.extend(id);
    page
}

/// Block Limits VPD page (SBC-3, section 6) without its header. Fields count blocks.
fn block_limits(limits: &MediumLimits) -> Vec<u8> {
    let mut page = vec![0; 0x3c];
    let mut put = |at: usize, bytes: &[u8]| page[at - 4..][..bytes.len()].copy_from_slice(bytes);
    put(4, &[0x01]); // WSNZ
    if !limits.read_only && !limits.shareable {
        put(5, &[max_compare_blocks(limits)]);
    }
    put(6, &(1u16 << limits.physical_exponent).to_be_bytes());
    put(8, &limits.max_transfer_blocks().to_be_bytes());
    let optimal = (limits.optimal_io / limits.block_size).min(limits.max_transfer_blocks());
    put(12, &optimal.to_be_bytes());
    if limits.thin {
        put(20, &limits.max_unmap_blocks().to_be_bytes());
        put(24, &(MAX_DESCRIPTORS as u32).to_be_bytes());
        put(
            28,
            &(limits.discard_granularity / limits.block_size).to_be_bytes(),
        );
    }
    put(36, &u64::from(limits.max_unmap_blocks()).to_be_bytes());
    page
}

/// Block Device Characteristics VPD page (SBC-3, section 6).
fn characteristics(limits: &MediumLimits) -> Vec<u8> {
    let mut page = vec![0; 0x3c];
    let rate = if limits.rotational { ROTATION } else { 1 };
    page[..2].copy_from_slice(&rate.to_be_bytes());
    page[4] = 0x02; // FUAB: FUA and SYNCHRONIZE CACHE are meant as in SBC-3
    page
}

/// Logical Block Provisioning VPD page (SBC-3, section 6).
fn provisioning(limits: &MediumLimits) -> Vec<u8> {
    if limits.thin {
        // LBPU, LBPWS, LBPWS10, LBPRZ; thin provisioned.
        vec![0, 0xe0 | u8::from(limits.unmapped_are_zeroes) << 2, 0x02, 0]
    } else {
        vec![0, 0, 0, 0]
    }
}

#[cfg(test)]
mod tests;
