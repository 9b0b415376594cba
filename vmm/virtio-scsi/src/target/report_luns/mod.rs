//! REPORT LUNS (SPC-4, section 6.33) and commands to LUNs that do not exist (SAM-5, "Addressing an incorrect logical
//! unit number").

use super::cdb::Cdb;
use super::command_error::CommandError;
use super::inquiry;
use super::logical_unit::LogicalUnit;
use super::sense::Sense;
use super::step::{Lun, ScsiCommand, ScsiResponse, ScsiStatus};
use super::task::Work;
use super::task::answer;

/// REPORT LUNS (SPC-4, section 6.33).
pub(crate) fn report(
    unit: &mut LogicalUnit,
    cdb: &Cdb,
    command: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    let data = list(cdb.u8(2), cdb.u32(6), command.luns)?;
    unit.luns_reported();
    answer(data, cdb.u32(6))
}

fn list(select: u8, allocation: u32, luns: &[Lun]) -> Result<Vec<u8>, Sense> {
    if allocation < 16 {
        return Err(Sense::invalid_cdb(6, None));
    }
    let luns = match select {
        0 | 2 => luns,
        // There are no well known logical units.
        1 => &[],
        _ => return Err(Sense::invalid_cdb(2, None)),
    };
    let mut data = (luns.len() as u32 * 8).to_be_bytes().to_vec();
    data.extend([0; 4]);
    data.extend(luns.iter().flat_map(|lun| lun.to_bytes()));
    Ok(data)
}

/// Answers a command to a LUN that does not exist. `command` has the other LUNs of the target.
#[must_use]
pub fn absent(command: ScsiCommand<'_>) -> ScsiResponse {
    let ScsiCommand {
        cdb, data_in, luns, ..
    } = command;
    let byte = |at: usize| cdb.get(at).copied().unwrap_or(0);
    let result = match byte(0) {
        0x12 if cdb.len() >= 6 => match (byte(1), byte(2)) {
            (0, 0) => Ok((inquiry::absent(), u16::from_be_bytes([byte(3), byte(4)]).into())),
            (0, _) => Err(Sense::invalid_cdb(2, None)),
            _ => Err(Sense::NO_UNIT),
        },
        0x03 if cdb.len() >= 6 => Ok((Sense::NO_UNIT.to_bytes(byte(1) & 1 != 0), byte(4).into())),
        0xa0 if cdb.len() >= 12 => {
            let allocation = u32::from_be_bytes(std::array::from_fn(|i| byte(6 + i)));
            list(byte(2), allocation, luns).map(|data| (data, allocation))
        }
        _ => Err(Sense::NO_UNIT),
    };
    let (status, sense, data) = match result {
        Ok((mut data, allocation)) => {
            let len = data_in.min(allocation.into());
            data.truncate(usize::try_from(len).unwrap_or(usize::MAX));
            (ScsiStatus::Good, Vec::new(), data)
        }
        Err(sense) => (ScsiStatus::CheckCondition, sense.to_bytes(false), Vec::new()),
    };
    ScsiResponse {
        status,
        sense,
        residual: data_in.max(command.data_out).saturating_sub(data.len() as u64),
        data,
        overrun: false,
        failure: None,
    }
}

#[cfg(test)]
mod tests;
