//! START STOP UNIT and PREVENT ALLOW MEDIUM REMOVAL (SBC-3, section 5; MMC-6, section 6).

use super::cdb::Cdb;
use super::command_error::CommandError;
use super::logical_unit::LogicalUnit;
use super::properties::DeviceKind;
use super::sense::Sense;
use super::step::{ScsiCommand, Step};
use super::task::{Procedure, Work};

/// START STOP UNIT
pub(crate) fn start_stop(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    const START: u8 = 0;
    const LOEJ: u8 = 1;
    const NO_FLUSH: u8 = 2;
    if cdb.u8(4) >> 4 != 0 {
        // Power conditions are not supported.
        return Err(Sense::invalid_cdb(4, Some(7)).into());
    }
    let start = cdb.bit(4, START);
    if unit.kind == DeviceKind::CdRom {
        // Start and stop without LOEJ have no effect on a drive.
        match (cdb.bit(4, LOEJ), start) {
            (true, false) => unit.unload()?,
            (true, true) if unit.tray.open => unit.close_tray(),
            _ => (),
        }
        return Ok(Work::Done);
    }
    cdb.require_clear(4, LOEJ)?;
    let read_only = unit.medium.is_none_or(|limits| limits.read_only);
    if start || cdb.bit(4, NO_FLUSH) || read_only {
        unit.stopped = !start;
        return Ok(Work::Done);
    }
    Ok(Work::Run(Box::new(Stop { flushed: false })))
}

/// Flushes the cache, then stops the unit.
#[derive(Debug)]
struct Stop {
    flushed: bool,
}

impl Procedure for Stop {
    fn advance(&mut self, unit: &mut LogicalUnit, _: &mut Vec<u8>) -> Result<Work, CommandError> {
        if !self.flushed {
            self.flushed = true;
            return Ok(Work::Once(Step::Flush));
        }
        unit.stopped = true;
        Ok(Work::Done)
    }
}

/// PREVENT ALLOW MEDIUM REMOVAL. No effect on a disk, which is not removable.
pub(crate) fn prevent_allow(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    // PERSISTENT is for changers.
    cdb.require_clear(4, 1)?;
    unit.tray.prevented = cdb.bit(4, 0) && unit.kind == DeviceKind::CdRom;
    Ok(Work::Done)
}
