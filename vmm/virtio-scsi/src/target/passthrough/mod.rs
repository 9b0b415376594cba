//! Logical units that are devices of the host, to which commands are passed on.
//!
//! What a guest may send is a [table](allowed): all else ends here, as an operation code that is not known. A command's
//! length is what its CDB says, in the units of the device, and neither the initiator's buffers nor the host's limits
//! are exceeded. The answer is the device's own, but for what would be wrong in the guest: how much can be transferred
//! at once, what cannot be written, which commands there are.

mod allowed_commands;
mod forwarded_command;
mod response_filter;

#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::time::Duration;

use super::sense::{Sense, SenseKey};
use super::step::ScsiStatus;
use super::task::CommandError;

pub(crate) use forwarded_command::begin;

/// A device of the host, as far as it takes SCSI commands. Called from several threads at a time.
pub trait PassthroughDevice: Debug + Send + Sync {
    /// Sends a command and waits for its end, which `timeout` brings about if nothing else does.
    ///
    /// # Errors
    /// There is no status: see [`DeliveryFailure`].
    fn execute(
        &self,
        cdb: &[u8],
        data: PassthroughData<'_>,
        timeout: Duration,
    ) -> Result<CommandResult, DeliveryFailure>;
}

/// The data of a command.
#[derive(Debug)]
pub enum PassthroughData<'a> {
    /// None at all.
    None,
    /// Room for what the device sends.
    In(&'a mut [u8]),
    /// What the device is sent.
    Out(&'a [u8]),
}

/// A command that ended with a status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandResult {
    /// The device's status code.
    pub status: u8,
    /// The device's sense data.
    pub sense: Vec<u8>,
    /// Bytes that were not transferred.
    pub residual: usize,
}

/// Why a command has no status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryFailure {
    /// The host does not take this command from us.
    Refused,
    /// The device is not there any more.
    Gone,
    /// It was aborted, perhaps for its time limit.
    Aborted,
    /// The device or its bus was reset.
    Reset,
    /// Somebody is busy: worth another try.
    Busy,
    /// The way to the device was disrupted.
    Transport,
    /// The device failed.
    Target,
    /// The initiator lost the device.
    Nexus,
    /// Anything else.
    Other,
}

/// What a host's device is and may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassthroughLimits {
    /// Bytes of a logical block. Followed when the device tells another.
    pub block_size: u32,
    /// Logical blocks; 0 if unknown. Followed when the device tells another.
    pub blocks: u64,
    /// Most bytes the host transfers at once, at least 4096; at most 512 KiB are used.
    pub max_transfer: u32,
    /// Nothing may be changed.
    pub read_only: bool,
    /// Commands the host takes from the privileged are sent by somebody who is: COMPARE AND WRITE, SYNCHRONIZE CACHE
    /// (16), persistent reservations.
    pub privileged: bool,
    /// Persistent reservations are passed on.
    pub reservation: bool,
}

/// Most bytes one command transfers: what a worker has room for.
const MAX_TRANSFER: u32 = 512 << 10;

/// Most bytes of a command that only the privileged send.
const MAX_PRIVILEGED: u32 = 64 << 10;

/// Longest sense data passed on.
const MAX_SENSE: usize = 252;

impl PassthroughLimits {
    /// Takes over what a device answered READ CAPACITY (10).
    pub fn update_from_capacity10(&mut self, answer: &[u8]) {
        response_filter::update_from_capacity10(self, answer);
    }

    /// Takes over what a device answered READ CAPACITY (16).
    pub fn update_from_capacity16(&mut self, answer: &[u8]) {
        response_filter::update_from_capacity16(self, answer);
    }

    fn max_transfer(&self) -> u32 {
        self.max_transfer.clamp(4096, MAX_TRANSFER)
    }

    fn max_transfer_blocks(&self) -> u32 {
        (self.max_transfer() / self.block_size.max(1)).max(1)
    }
}

/// A command for the device, with all that belongs to it but the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassthroughCommand {
    cdb: [u8; 16],
    len: u8,
    /// What to transfer.
    pub transfer: Transfer,
    /// When to give it up.
    pub timeout: Duration,
}

impl PassthroughCommand {
    /// The CDB.
    #[must_use]
    pub fn cdb(&self) -> &[u8] {
        &self.cdb[..self.len.into()]
    }
}

/// The data of a command that is passed on, in bytes: at most 512 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// None.
    None,
    /// From the device to the start of the initiator's data-in buffer, which has room.
    In(u32),
    /// From the start of the initiator's data-out buffer, which has as many, to the device.
    Out(u32),
    /// From the device to whoever settles the step.
    Internal(u32),
}

impl Transfer {
    /// Bytes that move from or to the initiator's buffers.
    pub(crate) fn moves(self) -> u64 {
        match self {
            Self::In(bytes) | Self::Out(bytes) => bytes.into(),
            Self::None | Self::Internal(_) => 0,
        }
    }
}

/// How a command that was passed on ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PassthroughResult {
    /// As the device said it.
    pub outcome: CommandResult,
    /// Of [`Transfer::Internal`]: what the device sent.
    pub data: Vec<u8>,
}

impl PassthroughResult {
    fn good(&self) -> bool {
        self.outcome.status == ScsiStatus::Good as u8
    }

    /// ILLEGAL REQUEST, in either format of sense data.
    fn refused(&self) -> bool {
        let sense = &self.outcome.sense;
        let key = match sense.first().map(|code| code & 0x7f) {
            Some(0x70) => sense.get(2),
            Some(0x72) => sense.get(1),
            _ => None,
        };
        key.is_some_and(|key| key & 0xf == SenseKey::IllegalRequest as u8)
    }

    /// What the initiator is told, as far as it is not [`ScsiStatus::Good`].
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
            // CHECK CONDITION, and what there is not.
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
