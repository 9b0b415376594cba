//! UNMAP, WRITE SAME and GET LBA STATUS (SBC-3, sections 4 and 5).

use std::ops::Range;
use std::vec;

use super::block_commands::{LbaRange, check_protect_field};
use super::cdb::Cdb;
use super::command_error::CommandError;
use super::logical_unit::LogicalUnit;
use super::sense::Sense;
use super::step::{DataLocation, Extent, ScsiCommand, Step};
use super::task::{Procedure, SCRATCH, Work};

/// MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT. With the header they fill 4 KiB.
pub(crate) const MAX_DESCRIPTORS: usize = 255;

/// Bytes of the header of an UNMAP parameter list and of GET LBA STATUS data.
const HEADER: usize = 8;

/// Bytes of an UNMAP block descriptor and of an LBA status descriptor.
const DESCRIPTOR: usize = 16;

/// Maximum LBA status descriptors in one response.
const MAX_EXTENTS: usize = 64;

/// UNMAP (SBC-3, section 5).
pub(crate) fn unmap(_: &mut LogicalUnit, cdb: &Cdb, command: &ScsiCommand<'_>) -> Result<Work, CommandError> {
    cdb.require_clear(1, 0)?; // ANCHOR
    match cdb.u16(7).into() {
        0 => Ok(Work::Done),
        len if len < HEADER => Err(Sense::LIST_LENGTH.into()),
        len => Work::list(cdb, command, len, unmap_list),
    }
}

fn unmap_list(unit: &mut LogicalUnit, _: &Cdb, list: &[u8]) -> Result<Work, CommandError> {
    let limits = *unit.ready()?;
    let len = usize::from(u16::from_be_bytes([list[2], list[3]]));
    // Incomplete descriptors do not count.
    let (descriptors, _) = list[HEADER..].as_chunks::<DESCRIPTOR>();
    let descriptors = &descriptors[..descriptors.len().min(len / DESCRIPTOR)];
    if descriptors.len() > MAX_DESCRIPTORS {
        return Err(Sense::invalid_parameter(2, None).into());
    }
    let mut left = u64::from(limits.max_unmap_blocks());
    let mut ranges = Vec::with_capacity(descriptors.len());
    for (i, descriptor) in descriptors.iter().enumerate() {
        let first = u64::from_be_bytes(std::array::from_fn(|i| descriptor[i]));
        let count = u64::from(u32::from_be_bytes(std::array::from_fn(|i| descriptor[8 + i])));
        let end = first.checked_add(count).ok_or(Sense::OUT_OF_RANGE)?;
        if end > limits.blocks {
            return Err(Sense::OUT_OF_RANGE.into());
        }
        let Some(rest) = left.checked_sub(count) else {
            let byte = HEADER + i * DESCRIPTOR + 8;
            return Err(Sense::invalid_parameter(byte as u16, None).into());
        };
        left = rest;
        if count > 0 {
            let block = u64::from(limits.block_size);
            ranges.push(first * block..end * block);
        }
    }
    Ok(Work::Run(Box::new(Unmap(ranges.into_iter()))))
}

/// Ranges that are left to unmap, in bytes.
#[derive(Debug)]
struct Unmap(vec::IntoIter<Range<u64>>);

impl Procedure for Unmap {
    fn advance(&mut self, unit: &mut LogicalUnit, _: &mut Vec<u8>) -> Result<Work, CommandError> {
        Ok(match self.0.next() {
            Some(range) => Work::Once(Step::Discard {
                offset: range.start,
                len: range.end - range.start,
                durable: unit.durable(false),
            }),
            None => Work::Done,
        })
    }
}

/// A WRITE SAME command in execution.
#[derive(Debug)]
struct Same {
    /// The range that is left, in bytes of the medium.
    range: Range<u64>,
    block: usize,
    /// First byte of NUMBER OF LOGICAL BLOCKS in the CDB.
    count_at: u16,
    unmap: bool,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Pull,
    Look,
    Zero,
    Write,
}

/// WRITE SAME (SBC-3, section 5).
pub(crate) fn write_same(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    command: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    const NDOB: u8 = 0;
    const UNMAP: u8 = 3;
    check_protect_field(cdb)?;
    let limits = unit.ready()?;
    cdb.require_clear(1, 4)?; // ANCHOR
    cdb.require_clear(1, 2)?; // PBDATA, LBDATA: obsolete
    cdb.require_clear(1, 1)?;
    let ten = cdb.opcode() == 0x41;
    if ten {
        cdb.require_clear(1, NDOB)?; // RELADR there: obsolete
    }
    if !limits.thin {
        cdb.require_clear(1, UNMAP)?;
    }
    let blocks = LbaRange::of(cdb);
    let count_at = if ten { 7 } else { 10 };
    if blocks.count == 0 {
        // WSNZ: 0 blocks do not mean the rest of the medium.
        return Err(Sense::invalid_cdb(count_at, None).into());
    }
    blocks.check_within(limits, limits.max_unmap_blocks())?;
    let block = limits.block_size;
    let stage = if cdb.bit(1, NDOB) {
        Stage::Zero
    } else {
        Stage::Pull
    };
    if stage == Stage::Pull {
        command.check_data_out(block.into())?;
    }
    let offset = blocks.offset(limits);
    Ok(Work::Run(Box::new(Same {
        range: offset..offset + blocks.len(limits),
        block: block as usize,
        count_at,
        unmap: cdb.bit(1, UNMAP),
        stage,
    })))
}

impl Procedure for Same {
    fn advance(&mut self, unit: &mut LogicalUnit, scratch: &mut Vec<u8>) -> Result<Work, CommandError> {
        let durable = unit.durable(false);
        let (offset, left) = (self.range.start, self.range.end - self.range.start);
        if self.stage == Stage::Pull {
            scratch.resize(self.block, 0);
            self.stage = Stage::Look;
            let (offset, into) = (0, 0..self.block);
            return Ok(Work::Once(Step::Pull { offset, into }));
        }
        if self.stage == Stage::Look {
            self.stage = if scratch.iter().all(|&b| b == 0) {
                Stage::Zero
            } else {
                Stage::Write
            };
            if self.stage == Stage::Write {
                let limits = unit.ready()?;
                // Each block is written, as by WRITE, and a pause waits for it.
                if left / u64::from(limits.block_size) > limits.max_transfer_blocks().into() {
                    return Err(Sense::invalid_cdb(self.count_at, None).into());
                }
                scratch.resize(left.min(SCRATCH as u64) as usize, 0);
                for at in (self.block..scratch.len()).step_by(self.block) {
                    scratch.copy_within(..self.block, at);
                }
            }
        }
        if left == 0 {
            return Ok(Work::Done);
        }
        let (len, step) = if self.stage == Stage::Zero {
            let (len, unmap) = (left, self.unmap);
            let step = Step::WriteZeroes {
                offset,
                len,
                unmap,
                durable,
            };
            (len, step)
        } else {
            let len = left.min(SCRATCH as u64);
            let from = DataLocation::Scratch(0);
            let step = Step::Write {
                offset,
                len,
                from,
                durable,
            };
            (len, step)
        };
        self.range.start += len;
        Ok(Work::Once(step))
    }
}

/// A GET LBA STATUS command in execution.
#[derive(Debug)]
struct LbaStatus {
    block: u64,
    /// The range that is left, in bytes of the medium.
    range: Range<u64>,
    allocation: u64,
    answer: Option<Extent>,
    /// First block, number of blocks, and true if they are mapped.
    found: Vec<(u64, u32, bool)>,
    room: usize,
    asked: usize,
}

/// GET LBA STATUS (SBC-3, section 5).
pub(crate) fn lba_status(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    let limits = unit.ready()?;
    let first = cdb.u64(2);
    if first >= limits.blocks {
        return Err(Sense::OUT_OF_RANGE.into());
    }
    let block = u64::from(limits.block_size);
    let allocation = cdb.u32(10);
    let room = (allocation as usize).saturating_sub(HEADER).div_ceil(DESCRIPTOR);
    Ok(Work::Run(Box::new(LbaStatus {
        block,
        range: first * block..limits.blocks * block,
        allocation: allocation.into(),
        answer: None,
        found: Vec::new(),
        // At least one is determined, even if it does not fit the response.
        room: room.clamp(1, MAX_EXTENTS),
        asked: 0,
    })))
}

impl LbaStatus {
    /// Bytes to query: as many blocks as a descriptor can report.
    fn len(&self) -> u64 {
        let most = u64::from(u32::MAX) * self.block;
        (self.range.end - self.range.start).min(most)
    }

    fn take(&mut self, extent: Extent) {
        let len = extent.len.clamp(1, self.len());
        // A block that is partly a hole is mapped.
        let (blocks, mapped) = if extent.allocated {
            (len.div_ceil(self.block), true)
        } else if len < self.block {
            (1, true)
        } else {
            (len / self.block, false)
        };
        let first = self.range.start / self.block;
        self.range.start += blocks * self.block;
        if let Some(last) = self.found.last_mut()
            && last.2 == mapped
            && let Some(sum) = last.1.checked_add(blocks as u32)
        {
            last.1 = sum;
        } else {
            self.found.push((first, blocks as u32, mapped));
        }
    }
}

impl Procedure for LbaStatus {
    fn advance(&mut self, _: &mut LogicalUnit, _: &mut Vec<u8>) -> Result<Work, CommandError> {
        if let Some(extent) = self.answer.take() {
            self.take(extent);
        }
        if !self.range.is_empty() && self.found.len() <= self.room && self.asked < 2 * MAX_EXTENTS {
            self.asked += 1;
            let (offset, len) = (self.range.start, self.len());
            return Ok(Work::Once(Step::Extent { offset, len }));
        }
        // The extra descriptor showed where the one before it ended.
        self.found.truncate(self.room);
        let len = HEADER - 4 + self.found.len() * DESCRIPTOR;
        let mut data = (len as u32).to_be_bytes().to_vec();
        data.extend([0; 4]);
        for (first, count, mapped) in &self.found {
            data.extend(first.to_be_bytes());
            data.extend(count.to_be_bytes());
            data.extend([u8::from(!mapped), 0, 0, 0]);
        }
        super::task::answer(data, self.allocation)
    }

    fn extent(&mut self, extent: Extent) {
        self.answer = Some(extent);
    }
}
