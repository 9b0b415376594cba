//! A device of the host that executes SCSI commands: its limits, commands and answers.

use std::fmt::Debug;
use std::time::Duration;

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
pub(crate) const MAX_TRANSFER: u32 = 512 << 10;

/// Maximum data of a command that the privileged helper executes.
pub(crate) const MAX_PRIVILEGED: u32 = 64 << 10;

impl PassthroughLimits {
    /// Updates the limits from READ CAPACITY (10) data.
    pub fn update_from_capacity10(&mut self, answer: &[u8]) {
        update_from_capacity10(self, answer);
    }

    /// Updates the limits from READ CAPACITY (16) data.
    pub fn update_from_capacity16(&mut self, answer: &[u8]) {
        update_from_capacity16(self, answer);
    }

    pub(crate) fn max_transfer(&self) -> u32 {
        self.max_transfer.clamp(4096, MAX_TRANSFER)
    }

    pub(crate) fn max_transfer_blocks(&self) -> u32 {
        (self.max_transfer() / self.block_size.max(1)).max(1)
    }
}

/// A command for the device, without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassthroughCommand {
    pub(crate) cdb: [u8; 16],
    pub(crate) len: u8,
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

fn update_from_capacity10(limits: &mut PassthroughLimits, data: &[u8]) {
    if let Some((&last, rest)) = data.split_first_chunk::<4>()
        && let Some(size) = rest.first_chunk()
    {
        follow(limits, u32::from_be_bytes(last).into(), *size);
    }
}

fn update_from_capacity16(limits: &mut PassthroughLimits, data: &[u8]) {
    if let Some((&last, rest)) = data.split_first_chunk::<8>()
        && let Some(size) = rest.first_chunk()
    {
        follow(limits, u64::from_be_bytes(last), *size);
    }
}

/// Updates the limits from the last block and the block length, if they are possible.
fn follow(limits: &mut PassthroughLimits, last: u64, size: [u8; 4]) {
    let size = u32::from_be_bytes(size);
    if size.is_power_of_two() && (256..=1 << 16).contains(&size) {
        limits.block_size = size;
        // All ones: the device has more blocks than the command can report.
        if last != u64::from(u32::MAX) {
            limits.blocks = last.saturating_add(1);
        }
    }
}
