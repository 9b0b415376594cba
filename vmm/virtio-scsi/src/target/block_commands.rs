//! READ, WRITE, SYNCHRONIZE CACHE and READ CAPACITY (SBC-3, section 5).

use super::cdb::Cdb;
use super::command_error::CommandError;
use super::logical_unit::LogicalUnit;
use super::properties::MediumLimits;
use super::sense::Sense;
use super::step::{DataLocation, ScsiCommand, Step};
use super::task::Work;
use super::task::answer;

/// LOGICAL BLOCK ADDRESS and TRANSFER LENGTH (or NUMBER OF LOGICAL BLOCKS) of a CDB, and the byte of the latter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LbaRange {
    pub first: u64,
    pub count: u32,
    count_at: u16,
}

impl LbaRange {
    /// Reads the fields of CDBs of 6, 10, 12 and 16 bytes.
    pub fn of(cdb: &Cdb) -> Self {
        let (first, count, count_at) = match cdb.opcode() >> 5 {
            0 => {
                let first = cdb.u32(0) & 0x1f_ffff;
                // 0 means 256 blocks.
                let count = if cdb.u8(4) == 0 { 256 } else { cdb.u8(4).into() };
                (first.into(), count, 4)
            }
            1 | 2 => (cdb.u32(2).into(), cdb.u16(7).into(), 7),
            5 => (cdb.u32(2).into(), cdb.u32(6), 6),
            _ => (cdb.u64(2), cdb.u32(10), 10),
        };
        Self {
            first,
            count,
            count_at,
        }
    }

    /// Checks that the blocks exist.
    pub fn check(&self, limits: &MediumLimits) -> Result<(), Sense> {
        match self.first.checked_add(self.count.into()) {
            Some(end) if end <= limits.blocks => Ok(()),
            _ => Err(Sense::OUT_OF_RANGE),
        }
    }

    /// Checks that the blocks exist and are at most `max`.
    pub fn check_within(&self, limits: &MediumLimits, max: u32) -> Result<(), Sense> {
        self.check(limits)?;
        if self.count > max {
            return Err(Sense::invalid_cdb(self.count_at, None));
        }
        Ok(())
    }

    pub fn offset(&self, limits: &MediumLimits) -> u64 {
        self.first * u64::from(limits.block_size)
    }

    pub fn len(&self, limits: &MediumLimits) -> u64 {
        u64::from(self.count) * u64::from(limits.block_size)
    }
}

/// Refuses RDPROTECT, WRPROTECT and VRPROTECT: there is no protection information.
pub(crate) fn check_protect_field(cdb: &Cdb) -> Result<(), Sense> {
    if cdb.u8(1) & 0xe0 == 0 {
        Ok(())
    } else {
        Err(Sense::invalid_cdb(1, Some(7)))
    }
}

impl LogicalUnit {
    /// True if writes must be stable when they complete. `fua`: FUA of the CDB.
    pub(crate) fn durable(&self, fua: bool) -> bool {
        fua || !self.modes.write_cache
    }
}

fn is_6(cdb: &Cdb) -> bool {
    cdb.opcode() < 0x20
}

/// READ (SBC-3, section 5). DPO is a hint. So is FUA: reads return what is in any cache.
pub(crate) fn read(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    command: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    if !is_6(cdb) {
        check_protect_field(cdb)?;
    }
    let limits = unit.ready()?;
    let blocks = LbaRange::of(cdb);
    blocks.check_within(limits, limits.max_transfer_blocks())?;
    let (offset, len) = (blocks.offset(limits), blocks.len(limits));
    command.check_data_in(len)?;
    if len == 0 {
        return Ok(Work::Done);
    }
    let into = DataLocation::Initiator(0);
    Ok(Work::Once(Step::Read { offset, len, into }))
}

/// WRITE (SBC-3, section 5).
pub(crate) fn write(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    command: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    let fua = !is_6(cdb) && cdb.bit(1, 3);
    if !is_6(cdb) {
        check_protect_field(cdb)?;
    }
    let limits = unit.ready()?;
    let blocks = LbaRange::of(cdb);
    blocks.check_within(limits, limits.max_transfer_blocks())?;
    let (offset, len) = (blocks.offset(limits), blocks.len(limits));
    command.check_data_out(len)?;
    if len == 0 {
        return Ok(Work::Done);
    }
    Ok(Work::Once(Step::Write {
        offset,
        len,
        from: DataLocation::Initiator(0),
        durable: unit.durable(fua),
    }))
}

/// SYNCHRONIZE CACHE (SBC-3, section 5). Flushes everything. Ignores IMMED: the status comes after the flush.
pub(crate) fn synchronize(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    let limits = unit.ready()?;
    LbaRange::of(cdb).check(limits)?;
    if limits.read_only {
        return Ok(Work::Done);
    }
    Ok(Work::Once(Step::Flush))
}

/// READ CAPACITY (10) (SBC-3, section 5).
pub(crate) fn capacity10(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    let limits = unit.ready()?;
    // PMI asks for the last block before a delay, and there are none. Without PMI the address must be 0.
    if !cdb.bit(8, 0) && cdb.u32(2) != 0 {
        return Err(Sense::invalid_cdb(2, None).into());
    }
    let last = u32::try_from(limits.blocks - 1).unwrap_or(u32::MAX);
    let mut data = last.to_be_bytes().to_vec();
    data.extend(limits.block_size.to_be_bytes());
    Ok(Work::Data(data))
}

/// READ CAPACITY (16) (SBC-3, section 5).
pub(crate) fn capacity16(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    let limits = unit.ready()?;
    let mut data = vec![0; 32];
    data[..8].copy_from_slice(&(limits.blocks - 1).to_be_bytes());
    data[8..12].copy_from_slice(&limits.block_size.to_be_bytes());
    data[13] = limits.physical_exponent;
    if limits.thin {
        data[14] = 0x80 | u8::from(limits.unmapped_are_zeroes) << 6; // LBPME, LBPRZ
    }
    answer(data, cdb.u32(10))
}
