//! PERSISTENT RESERVE IN and PERSISTENT RESERVE OUT (SPC-4, sections 6.15 and 6.16).

use super::cdb::Cdb;
use super::command_error::CommandError;
use super::logical_unit::LogicalUnit;
use super::reservation_state::ReservationType;
use super::sense::Sense;
use super::step::ScsiCommand;
use super::task::Work;
use super::task::answer;

/// PARAMETER LIST LENGTH of PERSISTENT RESERVE OUT.
const LIST: u32 = 24;

/// Bytes of a TransportID.
const TRANSPORT_ID: usize = 24;

/// PERSISTENT RESERVE IN (SPC-4, section 6.15).
pub(crate) fn read(unit: &mut LogicalUnit, cdb: &Cdb, _: &ScsiCommand<'_>) -> Result<Work, CommandError> {
    let state = &unit.reservations;
    if cdb.u8(1) & 0x1f == 2 {
        return answer(capabilities(), cdb.u16(7));
    }
    let body = match (cdb.u8(1) & 0x1f, state.key) {
        // READ KEYS
        (0, Some(key)) => key.to_be_bytes().to_vec(),
        // READ RESERVATION: the key is 0 for the all registrants types.
        (1, Some(key)) => state.held.map_or_else(Vec::new, |held| {
            let key = if held.all_registrants() { 0 } else { key };
            let mut bytes = key.to_be_bytes().to_vec();
            bytes.extend([0, 0, 0, 0, 0, held as u8, 0, 0]);
            bytes
        }),
        // READ FULL STATUS
        (3, Some(key)) => {
            let mut bytes = key.to_be_bytes().to_vec();
            bytes.extend([0; 4]);
            bytes.extend([
                state.held.is_some().into(),
                state.held.map_or(0, |held| held as u8),
            ]);
            bytes.extend([0; 4]);
            bytes.extend(1u16.to_be_bytes()); // relative target port
            bytes.extend((TRANSPORT_ID as u32).to_be_bytes());
            bytes.push(0x0f); // no specific protocol
            bytes.resize(bytes.len() + TRANSPORT_ID - 1, 0);
            bytes
        }
        _ => Vec::new(),
    };
    let mut data = state.generation.to_be_bytes().to_vec();
    data.extend((body.len() as u32).to_be_bytes());
    data.extend(body);
    answer(data, cdb.u16(7))
}

/// REPORT CAPABILITIES data: the six types, valid, and no optional feature.
fn capabilities() -> Vec<u8> {
    vec![0, 8, 0, 0x80, 0xea, 0x01, 0, 0]
}

/// PERSISTENT RESERVE OUT (SPC-4, section 6.16).
pub(crate) fn write(_: &mut LogicalUnit, cdb: &Cdb, command: &ScsiCommand<'_>) -> Result<Work, CommandError> {
    if cdb.u32(5) != LIST {
        return Err(Sense::LIST_LENGTH.into());
    }
    Work::list(cdb, command, LIST as usize, write_list)
}

fn write_list(unit: &mut LogicalUnit, cdb: &Cdb, list: &[u8]) -> Result<Work, CommandError> {
    let key = u64::from_be_bytes(std::array::from_fn(|i| list[i]));
    let service = u64::from_be_bytes(std::array::from_fn(|i| list[8 + i]));
    let action = cdb.u8(1) & 0x1f;
    // SPEC_I_PT, ALL_TG_PT and APTPL, which apply to registrations only, are not supported.
    if matches!(action, 0 | 6) {
        for bit in [3, 2, 0] {
            if list[20] >> bit & 1 != 0 {
                return Err(Sense::invalid_parameter(20, Some(bit)).into());
            }
        }
    }
    let state = &mut unit.reservations;
    match action {
        0 => state.register(Some(key), service)?,
        1 => state.reserve(key, kind(cdb)?)?,
        2 => state.release(key, kind(cdb)?)?,
        3 => state.clear(key)?,
        4 | 5 => state.preempt(key, service, kind(cdb)?)?,
        _ => state.register(None, service)?,
    }
    Ok(Work::Done)
}

/// SCOPE, which must be the logical unit, and TYPE.
fn kind(cdb: &Cdb) -> Result<ReservationType, Sense> {
    if cdb.u8(2) >> 4 != 0 {
        return Err(Sense::invalid_cdb(2, Some(7)));
    }
    ReservationType::from_code(cdb.u8(2) & 0x0f).ok_or(Sense::invalid_cdb(2, Some(3)))
}

#[cfg(test)]
mod tests;
