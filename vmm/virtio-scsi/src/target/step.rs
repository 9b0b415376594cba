//! Types between a [`Task`](super::Task) and its owner.

use std::ops::Range;

use super::passthrough_device::{DeliveryFailure, PassthroughCommand};

/// A logical unit number below 16,384, with single level peripheral device addressing (below 256) or flat space
/// addressing (SAM-5, section 4.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lun(u16);

impl Lun {
    /// Number of LUNs of one target.
    pub const COUNT: u16 = 1 << 14;

    /// The LUN `number`, if it is below [`Lun::COUNT`].
    #[must_use]
    pub fn new(number: u16) -> Option<Self> {
        (number < Self::COUNT).then_some(Self(number))
    }

    /// The number.
    #[must_use]
    pub fn number(self) -> u16 {
        self.0
    }

    /// The LUN as REPORT LUNS returns it.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 8] {
        let [high, low] = self.0.to_be_bytes();
        let method = if self.0 < 256 { 0 } else { 0x40 };
        [method | high, low, 0, 0, 0, 0, 0, 0]
    }

    /// Parses an 8-byte LUN in either single level addressing method.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 8]) -> Option<Self> {
        let [high, low, rest @ ..] = bytes;
        let number = match high >> 6 {
            0 if high == 0 => low.into(),
            1 => u16::from_be_bytes([high & 0x3f, low]),
            _ => return None,
        };
        rest.iter().all(|&b| b == 0).then_some(Self(number))
    }
}

/// A command from the initiator.
#[derive(Clone, Copy, Debug)]
pub struct ScsiCommand<'a> {
    /// Command descriptor block. An error if it is shorter than its command; extra bytes are ignored, as transports pad
    /// it.
    pub cdb: &'a [u8],
    /// Length of the data-out buffer in bytes.
    pub data_out: u64,
    /// Length of the data-in buffer in bytes.
    pub data_in: u64,
    /// All LUNs of the target, in ascending order, for REPORT LUNS.
    pub luns: &'a [Lun],
}

/// Location of the data of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataLocation {
    /// In the initiator's data-in (reads) or data-out (writes) buffer, from this byte on.
    Initiator(u64),
    /// In [`Task::scratch`](super::Task::scratch), from this byte on.
    Scratch(usize),
}

/// The next action of a task. Offsets and lengths on the medium are in bytes, whole blocks, within its size, not empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Read from the medium.
    Read {
        /// First byte on the medium.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// Destination.
        into: DataLocation,
    },
    /// Write to the medium.
    Write {
        /// First byte on the medium.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// Source.
        from: DataLocation,
        /// The data is on stable storage before the step is settled.
        durable: bool,
    },
    /// Make every write that was settled before stable.
    Flush,
    /// The content of the range is no longer needed; its storage may be freed.
    Discard {
        /// First byte on the medium.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// The change is on stable storage before the step is settled.
        durable: bool,
    },
    /// Make the range read as zeroes.
    WriteZeroes {
        /// First byte on the medium.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// The storage may be freed.
        unmap: bool,
        /// The change is on stable storage before the step is settled.
        durable: bool,
    },
    /// Determine if storage is allocated from `offset` on, and how far. Answer with
    /// [`Task::complete_extent_step`](super::Task::complete_extent_step).
    Extent {
        /// First byte on the medium.
        offset: u64,
        /// Maximum length of the answer in bytes.
        len: u64,
    },
    /// Copy from the initiator's data-out buffer, which has these bytes, to
    /// [`Task::scratch_mut`](super::Task::scratch_mut).
    Pull {
        /// First byte in the data-out buffer.
        offset: u64,
        /// Bytes of the scratch buffer to fill.
        into: Range<usize>,
    },
    /// Send this command to the passthrough device. Answer with
    /// [`Task::complete_passthrough_step`](super::Task::complete_passthrough_step).
    Passthrough(PassthroughCommand),
    /// The task ended.
    Done(ScsiResponse),
}

/// The answer to [`Step::Extent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// True if storage is allocated, or if that is unknown.
    pub allocated: bool,
    /// Length in bytes of the extent from the offset on, at least 1. A longer answer than requested is truncated.
    pub len: u64,
}

/// Status codes (SAM-5, section 5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ScsiStatus {
    /// Success.
    Good = 0x00,
    /// See the sense data.
    CheckCondition = 0x02,
    /// From a passthrough device only.
    ConditionMet = 0x04,
    /// From a passthrough device only.
    Busy = 0x08,
    /// The command conflicts with a reservation.
    ReservationConflict = 0x18,
    /// From a passthrough device only.
    TaskSetFull = 0x28,
    /// From a passthrough device only.
    AcaActive = 0x30,
    /// From a passthrough device only.
    TaskAborted = 0x40,
}

/// The end of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScsiResponse {
    /// Status code.
    pub status: ScsiStatus,
    /// Sense data in fixed or descriptor format, at most 252 bytes; empty unless the status is CHECK CONDITION.
    pub sense: Vec<u8>,
    /// Bytes to copy to the start of the initiator's data-in buffer, which has room. Empty if steps put the data there.
    pub data: Vec<u8>,
    /// Bytes of the initiator's buffer that were not transferred: of the data-out buffer for commands that have one,
    /// else of the data-in buffer.
    pub residual: u64,
    /// The CDB names more data than the initiator's buffers hold. Nothing was done, and the status is CHECK CONDITION.
    /// Transports may have a response of their own for this.
    pub overrun: bool,
    /// The host could not deliver the command to the device, so there is no status of it; the status is CHECK
    /// CONDITION. Transports may have responses of their own for this.
    pub failure: Option<DeliveryFailure>,
}
