//! TEST UNIT READY, REQUEST SENSE, LOG SENSE and SEND DIAGNOSTIC (SPC-4, section 6).

use super::cdb::Cdb;
use super::command_error::CommandError;
use super::logical_unit::LogicalUnit;
use super::sense::Sense;
use super::step::ScsiCommand;
use super::task::Work;
use super::task::answer;

/// Log pages: Supported Log Pages, Informational Exceptions.
const PAGES: [u8; 2] = [0x00, 0x2f];

/// TEST UNIT READY (SPC-4, section 6.47). The command table checks all conditions.
pub(crate) fn test_unit_ready(
    _: &mut LogicalUnit,
    _: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    Ok(Work::Done)
}

/// REQUEST SENSE (SPC-4, section 6.39).
pub(crate) fn request_sense(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    let sense = match unit.unit_attentions.take() {
        Some(attention) => attention.sense(),
        None => unit.ready().err().unwrap_or(Sense::NONE),
    };
    answer(sense.to_bytes(cdb.bit(1, 0)), cdb.u8(4))
}

/// LOG SENSE (SPC-4, section 6.8).
pub(crate) fn log_sense(_: &mut LogicalUnit, cdb: &Cdb, _: &ScsiCommand<'_>) -> Result<Work, CommandError> {
    cdb.require_clear(1, 0)?; // SP
    cdb.require_clear(1, 1)?; // PPC, obsolete
    let (page, subpage) = (cdb.u8(2) & 0x3f, cdb.u8(3));
    let (head, body) = match (page, subpage) {
        (0x00, 0x00) => (page, PAGES.to_vec()),
        // With subpages: page and subpage of each.
        (0x00, 0xff) => (0x40 | page, vec![0x00, 0x00, 0x00, 0xff, 0x2f, 0x00]),
        // One parameter of four bytes: no exception, temperature unknown.
        (0x2f, 0x00) => (page, vec![0x00, 0x00, 0x03, 0x04, 0x00, 0x00, 0xff, 0x00]),
        (0x00 | 0x2f, _) => return Err(Sense::invalid_cdb(3, None).into()),
        _ => return Err(Sense::invalid_cdb(2, Some(5)).into()),
    };
    if page != 0 && cdb.u16(5) > 0 {
        // The only parameter has code 0.
        return Err(Sense::invalid_cdb(5, None).into());
    }
    let mut data = vec![head, subpage, 0, body.len() as u8];
    data.extend(body);
    answer(data, cdb.u16(7))
}

/// SEND DIAGNOSTIC (SPC-4, section 6.42): the default self-test, which always passes.
pub(crate) fn send_diagnostic(
    _: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    if cdb.u8(1) >> 5 != 0 {
        return Err(Sense::invalid_cdb(1, Some(7)).into());
    }
    cdb.require_clear(1, 4)?; // PF
    if cdb.u16(3) != 0 {
        return Err(Sense::invalid_cdb(3, None).into());
    }
    Ok(Work::Done)
}

#[cfg(test)]
mod tests;
