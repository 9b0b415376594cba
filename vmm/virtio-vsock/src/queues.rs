//! The queues: takes packets out of the transmit queue, and fills buffers of the receive queue.

use std::sync::Arc;
use std::time::Instant;

use husk_devices::virtio::chain::{self, Segment};
use husk_devices::virtio::{ActiveQueue, VirtioInterrupt};
use husk_devices::{GuestMem, GuestMemMmap};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddressSpace};

use crate::connections::Connections;
use crate::credit::BUFFER;
use crate::packet::{HEADER_LEN, Header};

/// Reason for which the device needs a reset.
pub(crate) type DeviceError = String;

/// Index of the receive queue.
pub(crate) const RECEIVE: usize = 0;
/// Index of the transmit queue.
pub(crate) const TRANSMIT: usize = 1;

fn broken(error: impl std::fmt::Display) -> DeviceError {
    error.to_string()
}

/// Both queues of packets, and space for one of them.
pub(crate) struct PacketQueues {
    pub receive: ActiveQueue,
    pub transmit: ActiveQueue,
    pub mem: GuestMem,
    pub interrupt: Arc<dyn VirtioInterrupt>,
    /// A packet. Grows when payload is first moved.
    pub packet: Vec<u8>,
    pub readable: Vec<Segment>,
    pub writable: Vec<Segment>,
}

impl PacketQueues {
    /// Takes the guest's packets, as many as the queue has entries at most. Returns true if there may be more that can
    /// be taken now.
    pub fn transmit(&mut self, connections: &mut Connections, now: Instant) -> Result<bool, DeviceError> {
        let mem = self.mem.memory();
        let (mut used, mut more) = (false, true);
        for _ in 0..self.transmit.queue.size() {
            if connections.is_full() {
                more = false;
                break;
            }
            let Some(chain) = self.transmit.queue.iter(&*mem).map_err(broken)?.next() else {
                more = self.transmit.queue.enable_notification(&*mem).map_err(broken)?;
                break;
            };
            let head = chain.head_index();
            chain::segments(
                &self.transmit.queue,
                head,
                &mem,
                &mut self.readable,
                &mut self.writable,
            )
            .map_err(broken)?;
            if let Some(header) = self.read_packet(&mem)? {
                let payload = self.packet.get(HEADER_LEN..HEADER_LEN + header.len as usize);
                connections.take(&header, payload, now);
            }
            self.transmit.queue.add_used(&*mem, head, 0).map_err(broken)?;
            used = true;
        }
        if used && self.transmit.needs_notification(&mem) {
            self.interrupt.signal_queue(self.transmit.index);
        }
        Ok(more)
    }

    /// Tells the driver an event. Returns false if it has no buffer for it.
    pub fn send_event(&mut self, events: &mut ActiveQueue, id: u32) -> Result<bool, DeviceError> {
        let mem = self.mem.memory();
        events.queue.enable_notification(&*mem).map_err(broken)?;
        let Some(chain) = events.queue.iter(&*mem).map_err(broken)?.next() else {
            return Ok(false);
        };
        let head = chain.head_index();
        chain::segments(&events.queue, head, &mem, &mut self.readable, &mut self.writable).map_err(broken)?;
        let bytes = id.to_le_bytes();
        let room: u64 = self.writable.iter().map(|segment| u64::from(segment.len)).sum();
        if room < bytes.len() as u64 {
            return Err(format!(
                "buffer with less than the {} bytes of an event",
                bytes.len()
            ));
        }
        scatter(&mem, &self.writable, &bytes)?;
        let len = bytes.len() as u32;
        events.queue.add_used(&*mem, head, len).map_err(broken)?;
        if events.needs_notification(&mem) {
            self.interrupt.signal_queue(events.index);
        }
        Ok(true)
    }

    /// Reads the packet of the present chain. Its payload is missing if the chain is shorter than the header says, or
    /// the payload longer than any credit. A chain without a whole header is ignored.
    fn read_packet(&mut self, mem: &GuestMemMmap) -> Result<Option<Header>, DeviceError> {
        self.packet.resize(HEADER_LEN, 0);
        if gather(mem, &self.readable, &mut self.packet)? < HEADER_LEN {
            return Ok(None);
        }
        let header = self
            .packet
            .first_chunk()
            .map(Header::from_bytes)
            .ok_or("no header")?;
        if header.len > 0 && header.len <= BUFFER {
            self.packet.resize(HEADER_LEN + header.len as usize, 0);
            let count = gather(mem, &self.readable, &mut self.packet)?;
            self.packet.truncate(count);
        }
        Ok(Some(header))
    }

    /// Fills the guest's buffers, as many as the queue has entries at most. Returns true if there may be more to send
    /// now.
    pub fn receive(&mut self, connections: &mut Connections, now: Instant) -> Result<bool, DeviceError> {
        let mem = self.mem.memory();
        let (mut used, mut more) = (false, false);
        for _ in 0..self.receive.queue.size() {
            more = connections.has_outgoing();
            if !more {
                break;
            }
            let Some(chain) = self.receive.queue.iter(&*mem).map_err(broken)?.next() else {
                more = self.receive.queue.enable_notification(&*mem).map_err(broken)?;
                break;
            };
            let head = chain.head_index();
            chain::segments(
                &self.receive.queue,
                head,
                &mem,
                &mut self.readable,
                &mut self.writable,
            )
            .map_err(broken)?;
            let room: u64 = self.writable.iter().map(|segment| u64::from(segment.len)).sum();
            let room = room.min(HEADER_LEN as u64 + u64::from(BUFFER)) as usize;
            if room <= HEADER_LEN {
                return Err(format!(
                    "buffer without space for more than the {HEADER_LEN} bytes of a header"
                ));
            }
            self.packet.resize(room, 0);
            let Some((header, len)) = connections.next_packet(&mut self.packet[HEADER_LEN..], now) else {
                self.receive.queue.go_to_previous_position();
                continue;
            };
            self.packet[..HEADER_LEN].copy_from_slice(&header.to_bytes());
            let len = HEADER_LEN + len;
            scatter(&mem, &self.writable, &self.packet[..len])?;
            self.receive
                .queue
                .add_used(&*mem, head, len as u32)
                .map_err(broken)?;
            used = true;
        }
        if used && self.receive.needs_notification(&mem) {
            self.interrupt.signal_queue(self.receive.index);
        }
        Ok(more)
    }
}

/// Writes `bytes` to `segments`, which have room for them.
fn scatter(mem: &GuestMemMmap, segments: &[Segment], mut bytes: &[u8]) -> Result<(), DeviceError> {
    for segment in segments {
        let (part, rest) = bytes.split_at(bytes.len().min(segment.len as usize));
        mem.write_slice(part, segment.address).map_err(broken)?;
        bytes = rest;
    }
    Ok(())
}

/// Copies bytes of `segments` to `bytes`, from the start. Returns their number.
fn gather(mem: &GuestMemMmap, segments: &[Segment], bytes: &mut [u8]) -> Result<usize, DeviceError> {
    let mut done = 0;
    for segment in segments {
        let len = (segment.len as usize).min(bytes.len() - done);
        mem.read_slice(&mut bytes[done..done + len], segment.address)
            .map_err(broken)?;
        done += len;
    }
    Ok(done)
}
