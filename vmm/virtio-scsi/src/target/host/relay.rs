//! From a guest's command to the device's, and back to the guest's answer.

use super::super::cdb::{Cdb, answer};
use super::super::opcode;
use super::super::sense::Sense;
use super::super::step::{Command, Step};
use super::super::task::{Direction, Fault, Procedure, Task, Work};
use super::super::unit::LogicalUnit;
use super::edit::Edit;
use super::permit::{self, Length, Permit, Wanted};
use super::{Failure, HostLimits, MAX_PRIVILEGED, Passage, Passed, Transfer};

/// REQUEST SENSE, INQUIRY
const DESPITE_ATTENTION: [u8; 2] = [0x03, 0x12];

/// SYNCHRONIZE CACHE (10) and (16): there is nothing to do about them where nothing may be changed.
const SYNCHRONIZE: [u8; 2] = [0x35, 0x91];

/// Begins a command to a unit that is a device of the host with these limits.
pub(crate) fn begin(unit: &mut LogicalUnit, limits: HostLimits, command: Command<'_>) -> Task {
    let action = command.cdb.get(1).map_or(0, |byte| byte & 0x1f);
    if let Some(&opcode) = command.cdb.first()
        && permit::is_own(opcode, action)
    {
        let op = opcode::own(opcode, action);
        let work = unit.admit(op, &command);
        return Task::of(unit, op, work, &command);
    }
    let permit = permit::find(&limits, command.cdb);
    let direction = match permit.map(|permit| permit.length) {
        Ok(Length::Allocation(..) | Length::Fixed(_) | Length::Read) | Err(_) => Direction::In,
        Ok(Length::None) => Direction::None,
        Ok(_) => Direction::Out,
    };
    let work = admit(unit, limits, permit, &command);
    Task::new(unit, direction, work, &command)
}

fn admit(
    unit: &mut LogicalUnit,
    mut limits: HostLimits,
    permit: Result<&'static Permit, Sense>,
    command: &Command<'_>,
) -> Result<Work, Fault> {
    let opcode = command.cdb.first().copied().unwrap_or_default();
    if !DESPITE_ATTENTION.contains(&opcode)
        && let Some(attention) = unit.attentions.take()
    {
        return Err(attention.sense().into());
    }
    let permit = permit?;
    let cdb = Cdb::of_len(command.cdb, permit::cdb_len(opcode))?;
    if permit::has_protection(permit.length) && cdb.u8(1) & 0xe0 != 0 {
        return Err(Sense::invalid_cdb(1, Some(7)).into());
    }
    if limits.read_only && permit.writes {
        return Err(Sense::WRITE_PROTECTED.into());
    }
    if limits.read_only && SYNCHRONIZE.contains(&opcode) {
        return Ok(Work::Done);
    }
    if opcode == DESPITE_ATTENTION[0]
        && let Some(attention) = unit.attentions.take()
    {
        return answer(attention.sense().to_bytes(cdb.bit(1, 0)), cdb.u8(4));
    }
    if permit.privileged {
        limits.max_transfer = limits.max_transfer.min(MAX_PRIVILEGED);
    }
    let edit = (permit.edit)(&limits, &cdb);
    if let Some(data) = edit.and_then(Edit::known) {
        return answer(data, cdb.u32(6));
    }
    let asked = match permit.length {
        Length::Allocation(at, len) => cdb.number(at, len),
        _ => u64::MAX,
    };
    let (cdb, transfer) = plan(&limits, permit, cdb, edit, command)?;
    let mut bytes = [0; 16];
    bytes[..cdb.len()].copy_from_slice(cdb.bytes());
    Ok(Work::Run(Box::new(Relay {
        passage: Passage {
            cdb: bytes,
            len: cdb.len() as u8,
            transfer,
            timeout: permit.timeout(),
        },
        edit,
        asked,
        passed: None,
    })))
}

/// Checks how much a command transfers; the CDB says it exactly afterwards.
fn plan(
    limits: &HostLimits,
    permit: &Permit,
    mut cdb: Cdb,
    edit: Option<Edit>,
    command: &Command<'_>,
) -> Result<(Cdb, Transfer), Fault> {
    let most = u64::from(limits.max_transfer());
    let wanted = permit::wanted(permit.length, &cdb, limits.block_size)?;
    if let Length::Allocation(at, len) = permit.length
        && let Wanted::In(asked) = wanted
    {
        // Room for nothing is no error, and asks for nothing.
        let least = match edit.and_then(Edit::allocation) {
            Some(least) if asked > 0 => u64::from(least),
            Some(_) => 0,
            None => asked.min(command.data_in),
        };
        let allocation = least.min(most);
        cdb.set_number(at, len, allocation);
        return Ok((cdb, incoming(allocation as u32, edit)));
    }
    let too_long = match wanted {
        Wanted::In(bytes) | Wanted::Out(bytes) => bytes > most,
    };
    if too_long {
        return Err(Sense::TOO_LONG.into());
    }
    match wanted {
        Wanted::In(bytes) => {
            if edit.is_none() {
                command.takes(bytes)?;
            }
            Ok((cdb, incoming(bytes as u32, edit)))
        }
        Wanted::Out(bytes) => {
            command.sends(bytes)?;
            let transfer = match bytes {
                0 => Transfer::None,
                bytes => Transfer::Out(bytes as u32),
            };
            Ok((cdb, transfer))
        }
    }
}

fn incoming(bytes: u32, edit: Option<Edit>) -> Transfer {
    match (bytes, edit) {
        (0, _) => Transfer::None,
        (bytes, None) => Transfer::In(bytes),
        (bytes, Some(_)) => Transfer::Kept(bytes),
    }
}

/// A command on its way.
#[derive(Debug)]
struct Relay {
    passage: Passage,
    edit: Option<Edit>,
    /// ALLOCATION LENGTH as the initiator had it.
    asked: u64,
    passed: Option<Result<Passed, Failure>>,
}

impl Procedure for Relay {
    fn advance(&mut self, unit: &mut LogicalUnit, _: &mut Vec<u8>) -> Result<Work, Fault> {
        let Some(passed) = self.passed.take() else {
            return Ok(Work::Once(Step::Pass(self.passage)));
        };
        let passed = passed.map_err(Failure::fault)?;
        let Some(limits) = &mut unit.host else {
            return Err(Sense::TARGET_FAILURE.into());
        };
        match self.edit {
            None if passed.good() => Ok(Work::Done),
            Some(edit) if passed.good() => answer(edit.apply(limits, passed.data), self.asked),
            // A device without the page.
            Some(edit) if passed.refused() => match edit.instead(limits) {
                Some(data) => answer(data, self.asked),
                None => Err(passed.fault()),
            },
            _ => Err(passed.fault()),
        }
    }

    fn passed(&mut self, passed: Result<Passed, Failure>) {
        self.passed = Some(passed);
    }
}
