//! Requests as the driver lays them out in memory (virtio 1.2, section 5.2.6).
//!
//! Nothing is assumed about descriptor boundaries (section 2.7.4.1): the readable bytes of a chain, end to end, are
//! header and data; the writable ones are data and, last, the status.

use husk_devices::GuestMemMmap;
use husk_devices::virtio::access;
use husk_devices::virtio::chain::{self, Segment};
use husk_devices::virtio::dma::{HostRange, joined_host_ranges};
use husk_disk::{IoBuffer, IoRequest, SECTOR};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use virtio_queue::Queue;
use vm_memory::{Address, GuestAddress, GuestMemoryBackend};

/// Bytes of a serial number (section 5.2.6).
pub(crate) const SERIAL_LEN: usize = 20;

/// Bytes of `struct virtio_blk_req` before the data.
const HEADER_LEN: usize = 16;

/// Most bytes of a read or write, as of virtio-scsi. Linux sends 1.25 MiB by default. A pause waits for all requests, and
/// a guest may give the same buffer to each.
pub(crate) const MAX_TRANSFER: u64 = 32 << 20;

/// Outcome of a request, as the driver reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlkStatus {
    Ok = VIRTIO_BLK_S_OK as isize,
    IoError = VIRTIO_BLK_S_IOERR as isize,
    Unsupported = VIRTIO_BLK_S_UNSUPP as isize,
}

/// Errors of a chain that is no request. The device cannot report them in a status byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestError {
    #[error(transparent)]
    Chain(#[from] chain::ChainError),
    #[error("request without a status byte in guest memory")]
    Status,
}

/// The parts of a request chain. Reused for the next chain, with its allocations.
#[derive(Debug, Default)]
pub(crate) struct RequestLayout {
    readable: Vec<Segment>,
    writable: Vec<Segment>,
    buffers: Vec<IoBuffer>,
    status: GuestAddress,
}

/// The next step for a chain.
#[derive(Debug)]
pub(crate) enum Action<'a> {
    /// Submit a request to the disk, which fills the segments in `filled`.
    Submit {
        request: IoRequest<'a>,
        filled: Option<&'a mut Vec<Segment>>,
    },
    /// Complete at once, with this number of data bytes written before the status.
    Finish(BlkStatus, u32),
}

impl<'a> Action<'a> {
    /// Submits a request that fills no guest memory.
    fn submit(request: IoRequest<'a>) -> Self {
        Self::Submit {
            request,
            filled: None,
        }
    }
}

/// The properties of the device that limit requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestLimits {
    /// Size of the disk in sectors.
    pub capacity: u64,
    /// Sectors of a logical block, of which requests are multiples.
    pub block: u64,
    /// Most sectors of a discard or write-zeroes request.
    pub max_range: u32,
    pub read_only: bool,
    /// Writes must be on stable storage when they complete.
    pub durable: bool,
    pub serial: [u8; SERIAL_LEN],
}

impl RequestLayout {
    /// Parses the chain at `head` of `queue`. On success it has a writable status byte.
    pub fn parse(&mut self, mem: &GuestMemMmap, queue: &Queue, head: u16) -> Result<(), RequestError> {
        chain::segments(queue, head, mem, &mut self.readable, &mut self.writable)?;
        self.find_status(mem)
    }

    fn find_status(&mut self, mem: &GuestMemMmap) -> Result<(), RequestError> {
        while self.writable.last().is_some_and(|s| s.len == 0) {
            self.writable.pop();
        }
        let last = self.writable.last_mut().ok_or(RequestError::Status)?;
        last.len -= 1;
        self.status = last
            .address
            .checked_add(last.len.into())
            .ok_or(RequestError::Status)?;
        if mem.address_in_range(self.status) {
            Ok(())
        } else {
            Err(RequestError::Status)
        }
    }

    /// Guest-physical address of the status byte.
    pub fn status(&self) -> GuestAddress {
        self.status
    }

    /// Bytes of device-writable data.
    pub fn writable_len(&self) -> u32 {
        // A chain has less than 4 GiB, else its iterator ends early.
        self.writable.iter().map(|s| s.len).fold(0, u32::saturating_add)
    }

    /// The action for the chain parsed last.
    pub fn action<'a>(&'a mut self, mem: &GuestMemMmap, limits: &RequestLimits) -> Action<'a> {
        match self.decode(mem, limits) {
            Ok(action) => action,
            Err(status) => Action::Finish(status, 0),
        }
    }

    fn decode<'a>(&'a mut self, mem: &GuestMemMmap, limits: &RequestLimits) -> Result<Action<'a>, BlkStatus> {
        let mut header = [0; HEADER_LEN];
        self.take(mem, &mut header)?;
        let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
        let sector = u64::from_le_bytes(std::array::from_fn(|i| header[8 + i]));
        let durable = limits.durable;
        match kind {
            VIRTIO_BLK_T_IN => {
                let offset = transfer_offset(&self.writable, sector, limits)?;
                map(mem, &self.writable, &mut self.buffers)?;
                let buffers = &self.buffers;
                Ok(Action::Submit {
                    request: IoRequest::Read { offset, buffers },
                    filled: Some(&mut self.writable),
                })
            }
            VIRTIO_BLK_T_OUT if !limits.read_only => {
                let offset = transfer_offset(&self.readable, sector, limits)?;
                map(mem, &self.readable, &mut self.buffers)?;
                Ok(Action::submit(IoRequest::Write {
                    offset,
                    buffers: &self.buffers,
                    durable,
                }))
            }
            VIRTIO_BLK_T_FLUSH => Ok(Action::submit(IoRequest::Flush)),
            VIRTIO_BLK_T_GET_ID => self.get_id(mem, limits),
            VIRTIO_BLK_T_DISCARD if !limits.read_only => {
                let (offset, len, flags) = self.range(mem, limits)?;
                // The device must refuse the unmap flag of a discard (section 5.2.6.2) and unknown flags.
                if flags != 0 {
                    return Err(BlkStatus::Unsupported);
                }
                Ok(Action::submit(IoRequest::Discard { offset, len, durable }))
            }
            VIRTIO_BLK_T_WRITE_ZEROES if !limits.read_only => {
                let (offset, len, flags) = self.range(mem, limits)?;
                if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 {
                    return Err(BlkStatus::Unsupported);
                }
                Ok(Action::submit(IoRequest::WriteZeroes {
                    offset,
                    len,
                    unmap: flags != 0,
                    durable,
                }))
            }
            VIRTIO_BLK_T_OUT | VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => Err(BlkStatus::IoError),
            _ => Err(BlkStatus::Unsupported),
        }
    }

    fn get_id<'a>(&self, mem: &GuestMemMmap, limits: &RequestLimits) -> Result<Action<'a>, BlkStatus> {
        let mut rest = &limits.serial[..];
        for segment in &self.writable {
            let (now, later) = rest.split_at(rest.len().min(segment.len as usize));
            access::write(mem, segment.address, now).map_err(|_| BlkStatus::IoError)?;
            rest = later;
        }
        Ok(Action::Finish(BlkStatus::Ok, (SERIAL_LEN - rest.len()) as u32))
    }

    /// Offset and length in bytes, and flags, of a discard or write-zeroes request. It has one segment, as offered.
    fn range(&mut self, mem: &GuestMemMmap, limits: &RequestLimits) -> Result<(u64, u64, u32), BlkStatus> {
        let mut bytes = [0; 16];
        self.take(mem, &mut bytes)?;
        let sector = u64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
        let sectors = u32::from_le_bytes(std::array::from_fn(|i| bytes[8 + i]));
        let flags = u32::from_le_bytes(std::array::from_fn(|i| bytes[12 + i]));
        if self.readable.iter().any(|s| s.len != 0) || sectors > limits.max_range {
            return Err(BlkStatus::IoError);
        }
        Ok((
            disk_offset(sector, sectors.into(), limits)?,
            u64::from(sectors) * SECTOR,
            flags,
        ))
    }

    /// Reads and consumes the next device-readable bytes.
    fn take(&mut self, mem: &GuestMemMmap, bytes: &mut [u8]) -> Result<(), BlkStatus> {
        let mut rest = bytes;
        let mut used_up = 0;
        for segment in &mut self.readable {
            let (now, later) = rest.split_at_mut(rest.len().min(segment.len as usize));
            access::read(mem, segment.address, now).map_err(|_| BlkStatus::IoError)?;
            segment.len -= now.len() as u32;
            segment.address = GuestAddress(segment.address.0.wrapping_add(now.len() as u64));
            used_up += usize::from(segment.len == 0);
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        self.readable.drain(..used_up);
        if rest.is_empty() {
            Ok(())
        } else {
            Err(BlkStatus::IoError)
        }
    }
}

/// Offset on the disk, in bytes, of a transfer of the bytes of `segments`.
fn transfer_offset(segments: &[Segment], sector: u64, limits: &RequestLimits) -> Result<u64, BlkStatus> {
    let len: u64 = segments.iter().map(|s| u64::from(s.len)).sum();
    if len == 0 || len > MAX_TRANSFER || !len.is_multiple_of(SECTOR) {
        return Err(BlkStatus::IoError);
    }
    disk_offset(sector, len / SECTOR, limits)
}

fn disk_offset(sector: u64, sectors: u64, limits: &RequestLimits) -> Result<u64, BlkStatus> {
    match sector.checked_add(sectors) {
        Some(end) if end <= limits.capacity && (sector | sectors).is_multiple_of(limits.block) => {
            Ok(sector * SECTOR)
        }
        _ => Err(BlkStatus::IoError),
    }
}

/// The host's view of guest ranges, neighbours joined.
fn map(mem: &GuestMemMmap, segments: &[Segment], buffers: &mut Vec<IoBuffer>) -> Result<(), BlkStatus> {
    buffers.clear();
    let add = |range: HostRange| buffers.push(IoBuffer::new(range.start, range.len));
    joined_host_ranges(mem, segments.iter().copied(), add).map_err(|_| BlkStatus::IoError)
}
