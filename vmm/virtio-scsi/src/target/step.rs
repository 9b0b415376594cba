//! The language between a [`Task`](super::Task) and its owner.

use std::ops::Range;

use super::passthrough::{DeliveryFailure, PassthroughCommand};

/// A logical unit number below 16,384: one level, in peripheral device (below 256) or flat space addressing (SAM-5,
/// section 4.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lun(u16);

impl Lun {
    /// Logical unit numbers of one target.
    pub const COUNT: u16 = 1 << 14;

    /// `number`, if it is below [`Lun::COUNT`].
    #[must_use]
    pub fn new(number: u16) -> Option<Self> {
        (number < Self::COUNT).then_some(Self(number))
    }

    /// The number.
    #[must_use]
    pub fn number(self) -> u16 {
        self.0
    }

    /// As in the parameter data of REPORT LUNS.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 8] {
        let [high, low] = self.0.to_be_bytes();
        let method = if self.0 < 256 { 0 } else { 0x40 };
        [method | high, low, 0, 0, 0, 0, 0, 0]
    }

    /// The number in the first level of an 8-byte LUN, if it is a single-level one in either addressing method.
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

/// A command as the initiator sends it.
#[derive(Clone, Copy, Debug)]
pub struct ScsiCommand<'a> {
    /// Command descriptor block of any length. One that is shorter than its command is an error; bytes after the
    /// command's own length are not looked at, as transports pad it.
    pub cdb: &'a [u8],
    /// Bytes the initiator has for the unit.
    pub data_out: u64,
    /// Bytes the initiator has room for.
    pub data_in: u64,
    /// All logical units of the target, in ascending order, as REPORT LUNS is to tell.
    pub luns: &'a [Lun],
}

/// Where the bytes of a transfer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataLocation {
    /// In the initiator's data-in (reads) or data-out (writes) buffer, from this byte on.
    Initiator(u64),
    /// In [`Task::scratch`](super::Task::scratch), from this byte on.
    Scratch(usize),
}

/// What a task wants done. Offsets and lengths on the medium are bytes, whole blocks, within its size, not empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Read from the medium.
    Read {
        /// First byte on the medium.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Where to.
        into: DataLocation,
    },
    /// Write to the medium.
    Write {
        /// First byte on the medium.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Where from.
        from: DataLocation,
        /// On stable storage before it is settled.
        durable: bool,
    },
    /// Make stable every write settled before.
    Flush,
    /// The content of the range does not matter any more; it may be given back.
    Discard {
        /// First byte on the medium.
        offset: u64,
        /// Bytes.
        len: u64,
        /// On stable storage before it is settled.
        durable: bool,
    },
    /// Make the range read as zeroes.
    WriteZeroes {
        /// First byte on the medium.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Its storage may be given back.
        unmap: bool,
        /// On stable storage before it is settled.
        durable: bool,
    },
    /// Find out whether storage is allocated from `offset` on, and how far that goes; answered by
    /// [`Task::settle_extent`](super::Task::settle_extent).
    Extent {
        /// First byte on the medium.
        offset: u64,
        /// Bytes that are asked about; what lies behind need not be looked at.
        len: u64,
    },
    /// Copy from the initiator's data-out buffer, where these bytes exist, to
    /// [`Task::scratch_mut`](super::Task::scratch_mut).
    Pull {
        /// First byte in the data-out buffer.
        offset: u64,
        /// Bytes of the scratch buffer to fill.
        into: Range<usize>,
    },
    /// Send this to the device of the host; answered by [`Task::settle_passthrough`](super::Task::settle_passthrough).
    Passthrough(PassthroughCommand),
    /// The task ended.
    Done(ScsiResponse),
}

/// An answer to [`Step::Extent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Whether storage is allocated; yes if that cannot be known.
    pub allocated: bool,
    /// Bytes from the offset asked about that are alike, at least 1. More than was asked about is ignored.
    pub len: u64,
}

/// Status codes (SAM-5, section 5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ScsiStatus {
    /// Done.
    Good = 0x00,
    /// Not done, or not without remark: sense data says why.
    CheckCondition = 0x02,
    /// Of a device of the host: what was asked about is so.
    ConditionMet = 0x04,
    /// Of a device of the host: not now.
    Busy = 0x08,
    /// Against a reservation.
    ReservationConflict = 0x18,
    /// Of a device of the host: not now, there are too many.
    TaskSetFull = 0x28,
    /// Of a device of the host: not before what it waits for.
    AcaActive = 0x30,
    /// Of a device of the host: another initiator aborted it.
    TaskAborted = 0x40,
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScsiResponse {
    /// Status code.
    pub status: ScsiStatus,
    /// Sense data, fixed or descriptor format, at most 252 bytes; empty unless the status is CHECK CONDITION.
    pub sense: Vec<u8>,
    /// Bytes to copy to the start of the initiator's data-in buffer, where they fit. Empty if steps put them there.
    pub data: Vec<u8>,
    /// Bytes of the initiator's buffer that were not transferred (from the data-out buffer for commands that have
    /// one, else the data-in buffer).
    pub residual: u64,
    /// The CDB names more data than the initiator has buffers for: nothing was done, and the status is CHECK
    /// CONDITION. For transports that have a response of their own for this.
    pub overrun: bool,
    /// There is no status, because the host could not have its device do it. For transports that have responses of
    /// their own for this; the status is CHECK CONDITION.
    pub failure: Option<DeliveryFailure>,
}
