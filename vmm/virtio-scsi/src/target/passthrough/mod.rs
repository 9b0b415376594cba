//! Logical units that pass commands through to a device of the host (KubeVirt: `lun`).
//!
//! A guest may send the commands in [`allowed_commands`]; all others end with INVALID COMMAND OPERATION CODE. The CDB
//! gives a command's data length, in blocks of the device; it must fit the initiator's buffers and the host's limits.
//! The guest gets the device's own answer, except where it would be wrong in the guest: maximum transfer length, write
//! protection, supported commands.

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

/// Executes SCSI commands on a device of the host. Several threads call it at a time.
pub trait PassthroughDevice: Debug + Send + Sync {
    /// Sends a command and waits for its end, at most for `timeout`.
    ///
    /// # Errors
    /// The command has no status, see [`DeliveryFailure`].
    fn execute(
        &self,
        cdb: &[u8],
        data: PassthroughData<'_>,
        timeout: Duration,
    ) -> Result<CommandResult, DeliveryFailure>;
}

/// Data buffer of a command (SAM-5).
#[derive(Debug)]
pub enum PassthroughData<'a> {
    /// No data.
    None,
    /// Data-in buffer.
    In(&'a mut [u8]),
    /// Data-out buffer.
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

/// Reason why a command has no status (SAM-5: SERVICE DELIVERY OR TARGET FAILURE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryFailure {
    /// The host does not accept this command.
    Refused,
    /// The device is gone.
    Gone,
    /// The command was aborted, perhaps after its timeout.
    Aborted,
    /// The device or its bus was reset.
    Reset,
    /// Temporarily busy: a retry may succeed.
    Busy,
    /// The transport was disrupted.
    Transport,
    /// The target failed.
    Target,
    /// The I_T nexus was lost.
    Nexus,
    /// Any other failure.
    Other,
}

/// Limits of a passthrough device and of its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassthroughLimits {
    /// Logical block length in bytes; updated when the device reports another.
    pub block_size: u32,
    /// Number of logical blocks, 0 if unknown; updated when the device reports another.
    pub blocks: u64,
    /// Maximum transfer on the host in bytes, at least 4096. At most 512 KiB are used.
    pub max_transfer: u32,
    /// The guest may not write.
    pub read_only: bool,
    /// The privileged helper executes COMPARE AND WRITE, SYNCHRONIZE CACHE (16) and persistent reservations.
    pub privileged: bool,
    /// The guest may use persistent reservations.
    pub reservation: bool,
}

/// Maximum transfer of one command: the size of a worker's buffer.
const MAX_TRANSFER: u32 = 512 << 10;

/// Maximum data of a command that the privileged helper executes.
const MAX_PRIVILEGED: u32 = 64 << 10;

/// Maximum length of sense data.
const MAX_SENSE: usize = 252;

impl PassthroughLimits {
    /// Updates the limits from READ CAPACITY (10) data.
    pub fn update_from_capacity10(&mut self, answer: &[u8]) {
        response_filter::update_from_capacity10(self, answer);
    }

    /// Updates the limits from READ CAPACITY (16) data.
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

/// A command for the device, without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassthroughCommand {
    cdb: [u8; 16],
    len: u8,
    /// Data to transfer.
    pub transfer: Transfer,
    /// Maximum time.
    pub timeout: Duration,
}

impl PassthroughCommand {
    /// The CDB.
    #[must_use]
    pub fn cdb(&self) -> &[u8] {
        &self.cdb[..self.len.into()]
    }
}

/// Data of a passthrough command, in bytes: at most 512 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// No data.
    None,
    /// From the device to the start of the initiator's data-in buffer, which is large enough.
    In(u32),
    /// From the start of the initiator's data-out buffer, which is long enough, to the device.
    Out(u32),
    /// From the device to the response filter.
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

/// The end of a passthrough command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PassthroughResult {
    /// The device's answer.
    pub outcome: CommandResult,
    /// Data for [`Transfer::Internal`].
    pub data: Vec<u8>,
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
