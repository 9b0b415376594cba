//! REPORT SUPPORTED OPERATION CODES and REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS (SPC-4, sections 6.35 and 6.36).

use super::cdb::Cdb;
use super::command_descriptor::CommandDescriptor;
use super::command_error::CommandError;
use super::logical_unit::LogicalUnit;
use super::sense::Sense;
use super::step::ScsiCommand;
use super::task::Work;
use super::task::answer;

/// Functions that the controller supports: ABORT TASK, ABORT TASK SET, CLEAR TASK SET, LOGICAL UNIT RESET, QUERY TASK;
/// QUERY TASK SET, I_T NEXUS RESET.
const TASK_MANAGEMENT: [u8; 2] = [0x80 | 0x40 | 0x10 | 0x08 | 0x04, 0x02 | 0x01];

/// RECOMMENDED COMMAND TIMEOUT in seconds.
const TIMEOUT: u32 = 60;

/// REPORT SUPPORTED OPERATION CODES
pub(crate) fn report(
    commands: impl Iterator<Item = &'static CommandDescriptor>,
    cdb: &Cdb,
) -> Result<Work, CommandError> {
    let timeouts = cdb.bit(2, 7);
    let data = match cdb.u8(2) & 7 {
        0 => all(commands, timeouts),
        options => one(commands, cdb, options, timeouts)?,
    };
    answer(data, cdb.u32(6))
}

fn all(commands: impl Iterator<Item = &'static CommandDescriptor>, timeouts: bool) -> Vec<u8> {
    let mut data = vec![0; 4];
    for op in commands {
        let flags = u8::from(timeouts) << 1 | u8::from(op.action.is_some());
        data.extend([
            op.opcode,
            0,
            0,
            op.action.unwrap_or(0),
            0,
            flags,
            0,
            op.usage.len() as u8,
        ]);
        if timeouts {
            data.extend(timeouts_descriptor());
        }
    }
    let len = data.len() as u32 - 4;
    data[..4].copy_from_slice(&len.to_be_bytes());
    data
}

fn one(
    commands: impl Iterator<Item = &'static CommandDescriptor>,
    cdb: &Cdb,
    options: u8,
    timeouts: bool,
) -> Result<Vec<u8>, Sense> {
    let (opcode, action) = (cdb.u8(3), cdb.u16(4));
    let mut candidates = commands.filter(|op| op.opcode == opcode).peekable();
    let by_action = candidates.peek().is_some_and(|op| op.action.is_some());
    let exists = candidates.peek().is_some();
    let matching = |op: &&CommandDescriptor| op.action.is_none_or(|a| u16::from(a) == action);
    let found = match options {
        1 if by_action => return Err(Sense::invalid_cdb(2, Some(2))),
        1 => candidates.next(),
        2 if exists && !by_action => return Err(Sense::invalid_cdb(2, Some(2))),
        2 => candidates.find(matching),
        // Either form. A command without service actions has only 0.
        3 if !by_action && action != 0 => None,
        3 => candidates.find(matching),
        _ => return Err(Sense::invalid_cdb(2, Some(2))),
    };
    let Some(op) = found else {
        return Ok(vec![0, 1, 0, 0]); // not supported
    };
    let timeouts_flag = u8::from(timeouts) << 7;
    let mut data = vec![0, timeouts_flag | 3, 0, op.usage.len() as u8];
    data.extend(op.usage);
    if timeouts {
        data.extend(timeouts_descriptor());
    }
    Ok(data)
}

/// Command timeouts descriptor without a nominal time.
fn timeouts_descriptor() -> Vec<u8> {
    let mut bytes = vec![0, 0x0a, 0, 0, 0, 0, 0, 0];
    bytes.extend(TIMEOUT.to_be_bytes());
    bytes
}

/// REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS
pub(crate) fn task_management(
    _: &mut LogicalUnit,
    cdb: &Cdb,
    _: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    if cdb.u32(6) < 4 {
        return Err(Sense::invalid_cdb(6, None).into());
    }
    let [first, second] = TASK_MANAGEMENT;
    let mut data = vec![first, second, 0, 0];
    if cdb.bit(2, 7) {
        // REPD: extended parameter data, without timeouts.
        data[3] = 0x0c;
        data.extend([0; 12]);
    }
    answer(data, cdb.u32(6))
}

#[cfg(test)]
mod tests;
