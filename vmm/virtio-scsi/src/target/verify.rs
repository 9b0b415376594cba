//! VERIFY, WRITE AND VERIFY and COMPARE AND WRITE (SBC-3, section 5).

use std::ops::Range;

use super::block_commands::{LbaRange, check_protect_field};
use super::cdb::Cdb;
use super::command_error::CommandError;
use super::logical_unit::LogicalUnit;
use super::properties::MediumLimits;
use super::sense::Sense;
use super::step::{DataLocation, ScsiCommand, Step};
use super::task::{Procedure, SCRATCH, Work};

/// Bytes compared at a time. The scratch buffer holds them twice.
const CHUNK: u64 = SCRATCH as u64 / 2;

/// MAXIMUM COMPARE AND WRITE LENGTH.
pub(crate) fn max_compare_blocks(limits: &MediumLimits) -> u8 {
    u8::try_from(CHUNK / u64::from(limits.block_size)).unwrap_or(u8::MAX)
}

/// BYTCHK
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Check {
    /// Check that the medium can be read.
    Medium,
    /// Compare with the data-out buffer.
    All,
    /// Compare every block with the one block in the data-out buffer.
    Same,
}

impl Check {
    fn of(cdb: &Cdb) -> Result<Self, Sense> {
        match cdb.u8(1) >> 1 & 3 {
            0 => Ok(Self::Medium),
            1 => Ok(Self::All),
            3 => Ok(Self::Same),
            _ => Err(Sense::invalid_cdb(1, Some(2))),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Write,
    Pull,
    Read,
    Compare,
}

/// Compares piece by piece. The first half of the scratch buffer is the initiator's piece, the second the medium's.
#[derive(Debug)]
struct Verify {
    check: Check,
    block: u64,
    /// The range that is left, in bytes of the medium.
    range: Range<u64>,
    /// Offset in the data-out buffer.
    at: u64,
    stage: Stage,
}

/// VERIFY
pub(crate) fn verify(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    command: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    start(unit, cdb, command, Stage::Pull)
}

/// WRITE AND VERIFY
pub(crate) fn write_and_verify(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    command: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    start(unit, cdb, command, Stage::Write)
}

fn start(
    unit: &LogicalUnit,
    cdb: &Cdb,
    command: &ScsiCommand<'_>,
    stage: Stage,
) -> Result<Work, CommandError> {
    check_protect_field(cdb)?;
    let limits = unit.ready()?;
    let blocks = LbaRange::of(cdb);
    blocks.check_within(limits, limits.max_transfer_blocks())?;
    let check = Check::of(cdb)?;
    let block = u64::from(limits.block_size);
    let (offset, len) = (blocks.offset(limits), blocks.len(limits));
    let sent = match (stage, check) {
        // WRITE AND VERIFY does not support this BYTCHK.
        (Stage::Write, Check::Same) => return Err(Sense::invalid_cdb(1, Some(2)).into()),
        (Stage::Write, _) | (_, Check::All) => len,
        (_, Check::Same) => block.min(len),
        (_, Check::Medium) => 0,
    };
    command.check_data_out(sent)?;
    if len == 0 {
        return Ok(Work::Done);
    }
    Ok(Work::Run(Box::new(Verify {
        check,
        block,
        range: offset..offset + len,
        at: 0,
        stage,
    })))
}

impl Verify {
    fn piece(&self) -> usize {
        (self.range.end - self.range.start).min(CHUNK) as usize
    }
}

impl Procedure for Verify {
    fn advance(&mut self, _: &mut LogicalUnit, scratch: &mut Vec<u8>) -> Result<Work, CommandError> {
        let offset = self.range.start;
        if self.stage == Stage::Write {
            self.stage = Stage::Pull;
            return Ok(Work::Once(Step::Write {
                offset,
                len: self.range.end - offset,
                from: DataLocation::Initiator(0),
                // The verification reads what is on the medium.
                durable: true,
            }));
        }
        if self.stage == Stage::Compare {
            let piece = self.piece();
            let (expected, found) = scratch.split_at(piece);
            if self.check != Check::Medium && expected != &found[..piece] {
                return Err(Sense::MISCOMPARE.into());
            }
            self.range.start += piece as u64;
            self.at += piece as u64;
            self.stage = match self.check {
                Check::Same => Stage::Read,
                _ => Stage::Pull,
            };
        }
        if self.range.is_empty() {
            return Ok(Work::Done);
        }
        let piece = self.piece();
        scratch.resize(scratch.len().max(2 * piece), 0);
        let pulled = match self.check {
            Check::Medium => 0,
            Check::All => piece,
            Check::Same => self.block as usize,
        };
        if self.stage == Stage::Pull && pulled > 0 {
            self.stage = Stage::Read;
            return Ok(Work::Once(Step::Pull {
                offset: self.at,
                into: 0..pulled,
            }));
        }
        if self.check == Check::Same {
            // The block is at the start of the buffer, perhaps only since the last step.
            let block = self.block as usize;
            for at in (block..piece).step_by(block) {
                scratch.copy_within(..block, at);
            }
        }
        self.stage = Stage::Compare;
        Ok(Work::Once(Step::Read {
            offset: self.range.start,
            len: piece as u64,
            into: DataLocation::Scratch(piece),
        }))
    }
}

/// COMPARE AND WRITE. The data-out buffer holds the expected data, then the data to write.
#[derive(Debug)]
struct CompareAndWrite {
    offset: u64,
    len: usize,
    durable: bool,
    stage: Stage,
}

/// COMPARE AND WRITE (SBC-3, section 5).
pub(crate) fn compare_and_write(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    command: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    check_protect_field(cdb)?;
    let limits = unit.ready()?;
    let count = cdb.u8(13);
    let mut blocks = LbaRange::of(cdb);
    blocks.count = count.into();
    blocks.check(limits)?;
    if count > max_compare_blocks(limits) {
        return Err(Sense::invalid_cdb(13, None).into());
    }
    let (offset, len) = (blocks.offset(limits), blocks.len(limits));
    command.check_data_out(2 * len)?;
    if len == 0 {
        return Ok(Work::Done);
    }
    Ok(Work::Run(Box::new(CompareAndWrite {
        offset,
        len: len as usize,
        durable: unit.durable(cdb.bit(1, 3)),
        stage: Stage::Pull,
    })))
}

impl Procedure for CompareAndWrite {
    fn advance(&mut self, _: &mut LogicalUnit, scratch: &mut Vec<u8>) -> Result<Work, CommandError> {
        let Self {
            offset, len, durable, ..
        } = *self;
        let (stage, step) = match self.stage {
            Stage::Pull => {
                scratch.resize(2 * len, 0);
                let (offset, into) = (0, 0..len);
                (Stage::Read, Step::Pull { offset, into })
            }
            Stage::Read => {
                let (len, into) = (len as u64, DataLocation::Scratch(len));
                (Stage::Compare, Step::Read { offset, len, into })
            }
            Stage::Compare => {
                let (expected, found) = scratch.split_at(len);
                if let Some(at) = expected.iter().zip(found).position(|(a, b)| a != b) {
                    return Err(Sense::MISCOMPARE.with_information(at as u64).into());
                }
                let (len, from) = (len as u64, DataLocation::Initiator(len as u64));
                let step = Step::Write {
                    offset,
                    len,
                    from,
                    durable,
                };
                (Stage::Write, step)
            }
            Stage::Write => return Ok(Work::Done),
        };
        self.stage = stage;
        Ok(Work::Once(step))
    }

    fn exclusive(&self) -> Option<Range<u64>> {
        Some(self.offset..self.offset + self.len as u64)
    }
}
