//! Forwards a guest's command to a passthrough device and its answer to the guest.

use super::super::cdb::Cdb;
use super::super::command_error::CommandError;
use super::super::command_table;
use super::super::logical_unit::LogicalUnit;
use super::super::passthrough_device::{
    CommandResult, DeliveryFailure, MAX_PRIVILEGED, PassthroughCommand, PassthroughLimits, PassthroughResult,
    Transfer,
};
use super::super::sense::{Sense, SenseKey};
use super::super::step::{ScsiCommand, ScsiStatus, Step};
use super::super::task::{Direction, Procedure, Task, Work, answer};
use super::allowed_commands::{self, AllowedCommand, ExpectedTransfer, Length, is_supported};
use super::response_filter::ResponseFilter;

/// Maximum length of sense data.
const MAX_SENSE: usize = 252;

/// REQUEST SENSE, INQUIRY
const IGNORES_UNIT_ATTENTION: [u8; 2] = [0x03, 0x12];

/// SYNCHRONIZE CACHE (10) and (16), and START STOP UNIT, which would stop the device of the host. They succeed at once if
/// the guest may not write.
const NEEDLESS_IF_READ_ONLY: [u8; 3] = [0x35, 0x91, 0x1b];

/// Starts a command to a passthrough unit with these limits.
pub(crate) fn begin(unit: &mut LogicalUnit, limits: PassthroughLimits, command: ScsiCommand<'_>) -> Task {
    let action = command.cdb.get(1).map_or(0, |byte| byte & 0x1f);
    if let Some(&opcode) = command.cdb.first()
        && allowed_commands::is_own(opcode, action)
    {
        let op = command_table::own(opcode, action);
        let work = unit.admit(op, &command);
        return Task::of(unit, op, work, &command);
    }
    let allowed = allowed_commands::find(&limits, command.cdb);
    let direction = match allowed.map(|allowed| allowed.length) {
        Ok(Length::Allocation(..) | Length::Fixed(_) | Length::Read) | Err(_) => Direction::In,
        Ok(Length::None) => Direction::None,
        Ok(_) => Direction::Out,
    };
    let work = admit(unit, limits, allowed, &command);
    Task::new(unit, direction, work, &command)
}

fn admit(
    unit: &mut LogicalUnit,
    mut limits: PassthroughLimits,
    allowed: Result<&'static AllowedCommand, Sense>,
    command: &ScsiCommand<'_>,
) -> Result<Work, CommandError> {
    let opcode = command.cdb.first().copied().unwrap_or_default();
    if !IGNORES_UNIT_ATTENTION.contains(&opcode)
        && let Some(attention) = unit.unit_attentions.take()
    {
        return Err(attention.sense().into());
    }
    let allowed = allowed?;
    let cdb = Cdb::of_len(command.cdb, allowed_commands::cdb_len(opcode))?;
    if allowed_commands::has_protection(allowed.length) && cdb.u8(1) & 0xe0 != 0 {
        return Err(Sense::invalid_cdb(1, Some(7)).into());
    }
    if limits.read_only && allowed.writes {
        return Err(Sense::WRITE_PROTECTED.into());
    }
    if limits.read_only && NEEDLESS_IF_READ_ONLY.contains(&opcode) {
        return Ok(Work::Done);
    }
    if opcode == IGNORES_UNIT_ATTENTION[0]
        && let Some(attention) = unit.unit_attentions.take()
    {
        return answer(attention.sense().to_bytes(cdb.bit(1, 0)), cdb.u8(4));
    }
    if allowed.privileged {
        limits.max_transfer = limits.max_transfer.min(MAX_PRIVILEGED);
    }
    let filter = (allowed.filter)(&limits, &cdb);
    if let Some(data) = filter.and_then(ResponseFilter::known) {
        return answer(data, cdb.u32(6));
    }
    let asked = match allowed.length {
        Length::Allocation(at, len) => cdb.number(at, len),
        _ => u64::MAX,
    };
    let (cdb, transfer) = plan(&limits, allowed, cdb, filter, command)?;
    let mut bytes = [0; 16];
    bytes[..cdb.len()].copy_from_slice(cdb.bytes());
    Ok(Work::Run(Box::new(ForwardedCommand {
        command_out: PassthroughCommand {
            cdb: bytes,
            len: cdb.len() as u8,
            transfer,
            timeout: allowed.timeout(),
        },
        filter,
        asked,
        passed: None,
    })))
}

/// Checks the amount of data. The returned CDB has the exact length.
fn plan(
    limits: &PassthroughLimits,
    allowed: &AllowedCommand,
    mut cdb: Cdb,
    filter: Option<ResponseFilter>,
    command: &ScsiCommand<'_>,
) -> Result<(Cdb, Transfer), CommandError> {
    let most = u64::from(limits.max_transfer());
    let expected_transfer = allowed_commands::expected_transfer(allowed.length, &cdb, limits.block_size)?;
    if let Length::Allocation(at, len) = allowed.length
        && let ExpectedTransfer::In(asked) = expected_transfer
    {
        // An allocation length of 0 is not an error and transfers nothing.
        let least = match filter.and_then(ResponseFilter::allocation) {
            Some(least) if asked > 0 => u64::from(least),
            Some(_) => 0,
            None => asked.min(command.data_in),
        };
        let allocation = least.min(most);
        cdb.set_number(at, len, allocation);
        return Ok((cdb, incoming(allocation as u32, filter)));
    }
    let too_long = match expected_transfer {
        ExpectedTransfer::In(bytes) | ExpectedTransfer::Out(bytes) => bytes > most,
    };
    if too_long {
        return Err(Sense::TOO_LONG.into());
    }
    match expected_transfer {
        ExpectedTransfer::In(bytes) => {
            if filter.is_none() {
                command.check_data_in(bytes)?;
            }
            Ok((cdb, incoming(bytes as u32, filter)))
        }
        ExpectedTransfer::Out(bytes) => {
            command.check_data_out(bytes)?;
            let transfer = match bytes {
                0 => Transfer::None,
                bytes => Transfer::Out(bytes as u32),
            };
            Ok((cdb, transfer))
        }
    }
}

fn incoming(bytes: u32, filter: Option<ResponseFilter>) -> Transfer {
    match (bytes, filter) {
        (0, _) => Transfer::None,
        (bytes, None) => Transfer::In(bytes),
        (bytes, Some(_)) => Transfer::Internal(bytes),
    }
}

/// A command in flight.
#[derive(Debug)]
struct ForwardedCommand {
    command_out: PassthroughCommand,
    filter: Option<ResponseFilter>,
    /// ALLOCATION LENGTH from the initiator.
    asked: u64,
    passed: Option<Result<PassthroughResult, DeliveryFailure>>,
}

impl Procedure for ForwardedCommand {
    fn advance(&mut self, unit: &mut LogicalUnit, _: &mut Vec<u8>) -> Result<Work, CommandError> {
        let Some(passed) = self.passed.take() else {
            return Ok(Work::Once(Step::Passthrough(self.command_out)));
        };
        let passed = passed.map_err(DeliveryFailure::fault)?;
        let Some(limits) = &mut unit.passthrough else {
            return Err(Sense::TARGET_FAILURE.into());
        };
        match self.filter {
            None if passed.good() => Ok(Work::Done),
            Some(filter) if passed.good() => {
                answer(filter.apply(limits, passed.data, is_supported), self.asked)
            }
            // The device does not have the page.
            Some(filter) if passed.refused() => match filter.replacement(limits) {
                Some(data) => answer(data, self.asked),
                None => Err(passed.fault()),
            },
            _ => Err(passed.fault()),
        }
    }

    fn passthrough_done(&mut self, passed: Result<PassthroughResult, DeliveryFailure>) {
        self.passed = Some(passed);
    }
}

impl PassthroughResult {
    fn good(&self) -> bool {
        self.outcome.status == ScsiStatus::Good as u8
    }

    /// True for ILLEGAL REQUEST, in either format of sense data.
    fn refused(&self) -> bool {
        let sense = &self.outcome.sense;
        let key = match sense.first().map(|code| code & 0x7f) {
            Some(0x70) => sense.get(2),
            Some(0x72) => sense.get(1),
            _ => None,
        };
        key.is_some_and(|key| key & 0xf == SenseKey::IllegalRequest as u8)
    }

    /// The error for the initiator, of a status other than [`ScsiStatus::Good`].
    fn fault(self) -> CommandError {
        let CommandResult {
            status, mut sense, ..
        } = self.outcome;
        let status = match status {
            0x04 => ScsiStatus::ConditionMet,
            0x08 => ScsiStatus::Busy,
            0x18 => ScsiStatus::ReservationConflict,
            0x28 => ScsiStatus::TaskSetFull,
            0x30 => ScsiStatus::AcaActive,
            0x40 => ScsiStatus::TaskAborted,
            // CHECK CONDITION, and unknown codes.
            _ => ScsiStatus::CheckCondition,
        };
        match status {
            ScsiStatus::CheckCondition if sense.is_empty() => return Sense::TARGET_FAILURE.into(),
            ScsiStatus::CheckCondition => {}
            _ => sense.clear(),
        }
        sense.truncate(MAX_SENSE);
        CommandError::Ended(status, sense)
    }
}

impl DeliveryFailure {
    fn fault(self) -> CommandError {
        match self {
            Self::Refused => Sense::INVALID_OPCODE.into(),
            Self::Gone => Sense::NO_UNIT.into(),
            other => CommandError::Failed(other),
        }
    }
}
