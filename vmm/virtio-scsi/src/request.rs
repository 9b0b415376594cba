//! Requests as the driver lays them out in memory (virtio 1.2, section 5.6.6.1).
//!
//! Descriptor boundaries have no meaning (section 2.7.4.1): the readable bytes of a chain are header and data-out
//! buffer, the writable bytes are response and data-in buffer.

use husk_devices::GuestMemMmap;
use husk_devices::virtio::access::OutsideMemory;
use husk_devices::virtio::chain::{self, Segment};
use virtio_queue::Queue;

use crate::config::Sizes;
use crate::memory::{self, DataBuffer};
use crate::target::{DeliveryFailure, LONGEST_CDB};

/// Bytes of `struct virtio_scsi_req_cmd` before the CDB.
const HEADER_LEN: usize = 19;

/// Bytes of a response before the sense data.
const RESPONSE_LEN: usize = 12;

/// Maximum bytes of a response that are written; no sense data is longer.
const WRITTEN: usize = RESPONSE_LEN + Sizes::DEFAULT.sense as usize;

/// Segments that a chain keeps allocated for the next request.
const KEPT_SEGMENTS: usize = 64;

/// Error of a chain that has no place for a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MalformedRequest {
    #[error(transparent)]
    Chain(#[from] chain::ChainError),
    #[error("a request without room for its response")]
    NoResponseBuffer,
    #[error(transparent)]
    OutsideMemory(#[from] OutsideMemory),
}

/// Values of the `response` field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ResponseCode {
    Ok = 0,
    Overrun = 1,
    Aborted = 2,
    BadTarget = 3,
    Reset = 4,
    Busy = 5,
    TransportFailure = 6,
    TargetFailure = 7,
    NexusFailure = 8,
    Failure = 9,
    FunctionSucceeded = 10,
    FunctionRejected = 11,
    IncorrectLun = 12,
}

impl ResponseCode {
    /// The response code for a passthrough command without a status.
    pub fn of(failure: DeliveryFailure) -> Self {
        match failure {
            DeliveryFailure::Gone => Self::BadTarget,
            DeliveryFailure::Aborted => Self::Aborted,
            DeliveryFailure::Reset => Self::Reset,
            DeliveryFailure::Busy => Self::Busy,
            DeliveryFailure::Transport => Self::TransportFailure,
            DeliveryFailure::Target => Self::TargetFailure,
            DeliveryFailure::Nexus => Self::NexusFailure,
            DeliveryFailure::Refused | DeliveryFailure::Other => Self::Failure,
        }
    }
}

/// Task attributes with an effect: ordered and head of queue. All others are simple.
pub(crate) const ORDERED: u8 = 1;
pub(crate) const HEAD_OF_QUEUE: u8 = 2;

/// Fields of a request before its data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandHeader {
    pub lun: [u8; 8],
    /// Identifier from the driver.
    pub id: u64,
    pub attribute: u8,
    bytes: [u8; HEADER_LEN + LONGEST_CDB],
    end: usize,
}

impl CommandHeader {
    /// The CDB field as far as commands use it.
    pub fn cdb(&self) -> &[u8] {
        &self.bytes[HEADER_LEN..self.end]
    }
}

/// A chain: header and data-out buffer, response and data-in buffer. Reused for the next request, with its allocations.
#[derive(Debug, Default)]
pub(crate) struct RequestChain {
    readable: Vec<Segment>,
    writable: Vec<Segment>,
    /// Bytes of the header and of the response.
    header_len: u64,
    response_len: u64,
    /// Bytes of the data-out and of the data-in buffer.
    pub data_out_len: u64,
    pub data_in_len: u64,
}

/// Fields of a response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResponseFields<'a> {
    pub code: ResponseCode,
    /// SCSI status.
    pub status: u8,
    pub residual: u64,
    pub sense: &'a [u8],
}

impl ResponseFields<'_> {
    /// A response without a SCSI status.
    pub fn code(code: ResponseCode, residual: u64) -> Self {
        ResponseFields {
            code,
            status: 0,
            residual,
            sense: &[],
        }
    }
}

impl RequestChain {
    /// Reads the chain at `head` of `queue`, except the header. Afterwards there is room for a response.
    pub fn parse(
        &mut self,
        mem: &GuestMemMmap,
        queue: &Queue,
        head: u16,
        sizes: Sizes,
    ) -> Result<(), MalformedRequest> {
        chain::segments(queue, head, mem, &mut self.readable, &mut self.writable)?;
        self.header_len = (HEADER_LEN + usize::from(sizes.cdb)) as u64;
        self.response_len = (RESPONSE_LEN + usize::from(sizes.sense)) as u64;
        self.data_out_len = memory::len(&self.readable).saturating_sub(self.header_len);
        let Some(data_in_len) = memory::len(&self.writable).checked_sub(self.response_len) else {
            return Err(MalformedRequest::NoResponseBuffer);
        };
        self.data_in_len = data_in_len;
        // The whole response must be in guest memory before the command starts.
        let there = memory::part(&self.writable, 0, self.response_len).all(|s| {
            use vm_memory::GuestMemoryBackend;
            mem.check_range(s.address, s.len as usize)
        });
        if there { Ok(()) } else { Err(OutsideMemory.into()) }
    }

    /// Reads the header. `None` if the chain is too short for it, or if it is not in guest memory.
    pub fn header(&self, mem: &GuestMemMmap) -> Option<CommandHeader> {
        let mut bytes = [0; HEADER_LEN + LONGEST_CDB];
        let end = bytes.len().min(self.header_len as usize);
        if memory::len(&self.readable) < self.header_len {
            return None;
        }
        memory::read(mem, &self.readable, 0, &mut bytes[..end]).ok()?;
        Some(CommandHeader {
            lun: std::array::from_fn(|i| bytes[i]),
            id: u64::from_le_bytes(std::array::from_fn(|i| bytes[8 + i])),
            attribute: bytes[16],
            bytes,
            end,
        })
    }

    /// The data-out buffer.
    pub fn data_out(&self) -> DataBuffer<'_> {
        DataBuffer::new(&self.readable, self.header_len)
    }

    /// The data-in buffer.
    pub fn data_in(&self) -> DataBuffer<'_> {
        DataBuffer::new(&self.writable, self.response_len)
    }

    /// Writes a response and the data for the data-in buffer, of which `filled` bytes were written already. Returns the
    /// number of bytes written from the start of the writable part without a gap (section 2.7.8.2).
    pub fn respond(
        &self,
        mem: &GuestMemMmap,
        reply: &ResponseFields<'_>,
        data: &[u8],
        filled: u64,
    ) -> Result<u32, OutsideMemory> {
        let mut bytes = [0; WRITTEN];
        let sense = &reply.sense[..reply.sense.len().min(WRITTEN - RESPONSE_LEN)];
        let room = self.response_len;
        let sense_length = (sense.len() as u64).min(room - RESPONSE_LEN as u64) as u32;
        bytes[..4].copy_from_slice(&sense_length.to_le_bytes());
        let residual = u32::try_from(reply.residual).unwrap_or(u32::MAX);
        bytes[4..8].copy_from_slice(&residual.to_le_bytes());
        bytes[10] = reply.status;
        bytes[11] = reply.code as u8;
        bytes[RESPONSE_LEN..][..sense.len()].copy_from_slice(sense);
        let data = self.data_in().write(mem, data)? as u64;
        let written = bytes.len().min(room as usize);
        let response = memory::write(mem, &self.writable, 0, &bytes[..written])? as u64;
        let len = if response == room {
            response + filled.max(data)
        } else {
            response
        };
        // A chain has less than 4 GiB, else its iterator ends early.
        Ok(u32::try_from(len).unwrap_or(u32::MAX))
    }

    /// Clears the request.
    pub fn clear(&mut self) {
        for list in [&mut self.readable, &mut self.writable] {
            list.clear();
            list.shrink_to(KEPT_SEGMENTS);
        }
    }
}
