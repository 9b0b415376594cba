//! A port: moves bytes between its queues and the host's socket.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;

use husk_devices::GuestMemMmap;
use husk_devices::virtio::ActiveQueue;
use husk_devices::virtio::chain::{self, Segment};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{Address, Bytes};

use crate::control::PortControl;

/// Reason for which the device needs a reset.
pub(crate) type DeviceError = String;

/// Bytes copied at a time.
const CHUNK: usize = 4096;
/// Most bytes sent to the host in a pass, after which other ports are served.
const TRANSMIT_BUDGET: usize = 64 << 10;

pub(crate) fn broken(error: impl std::fmt::Display) -> DeviceError {
    error.to_string()
}

/// The result of a pass over a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PassOutcome {
    /// Buffers were used.
    pub used: bool,
    /// There is more to do without waiting.
    pub again: bool,
}

/// A port, by the number that the driver uses.
#[derive(Debug)]
pub(crate) struct Port {
    pub name: String,
    /// `None` if the host has closed its end, and for port 0.
    host: Option<Arc<File>>,
    pub control: PortControl,
    /// The guest has opened the port.
    pub guest_open: bool,
    /// Reading or writing the socket may not block.
    readable: bool,
    writable: bool,
    /// The host's end is closed. There may still be bytes to read.
    hung_up: bool,
    /// A write to the host has failed. There may still be bytes to read.
    write_failed: bool,
    /// Bytes of the first available transmit buffer that the host has taken already.
    pub taken: u64,
    /// The driver may have to notify the device of receive buffers.
    receive_notified: bool,
}

impl Port {
    /// A port over a nonblocking socket, as a new driver finds it.
    pub fn new(name: String, host: Option<Arc<File>>) -> Self {
        Self {
            name,
            host,
            control: PortControl::default(),
            guest_open: false,
            readable: true,
            writable: true,
            hung_up: false,
            write_failed: false,
            taken: 0,
            receive_notified: true,
        }
    }

    pub fn host(&self) -> Option<&File> {
        self.host.as_deref()
    }

    pub fn host_is_open(&self) -> bool {
        self.host.is_some()
    }

    /// Notes that the socket may be ready, and whether its other end is closed.
    pub fn host_event(&mut self, hung_up: bool) {
        (self.readable, self.writable) = (true, true);
        self.hung_up |= hung_up;
        self.follow_hangup();
    }

    pub fn set_guest_open(&mut self, open: bool) {
        self.guest_open = open;
        self.follow_hangup();
    }

    /// An open port first gets the bytes that the host sent before it closed its end.
    fn follow_hangup(&mut self) {
        if self.hung_up && !self.guest_open {
            self.close_host();
        }
    }

    /// Discards what the guest sends from now on. A guest that has opened the port still reads what the host sent before.
    fn stop_writing(&mut self) {
        self.write_failed = true;
        self.hung_up = true;
        self.follow_hangup();
    }

    fn close_host(&mut self) {
        if self.host.take().is_some() {
            self.control.host_changed();
        }
    }

    /// Sends the guest's buffers to the host. A buffer that the host takes in part stays available, and the rest
    /// follows later. Buffers for a closed host are discarded: the next reader would take their content for its own,
    /// and a driver that does not look at PORT_OPEN would wait for ever.
    pub fn transmit(
        &mut self,
        active: &mut ActiveQueue,
        mem: &GuestMemMmap,
    ) -> Result<PassOutcome, DeviceError> {
        let (mut readable, mut writable) = (Vec::new(), Vec::new());
        let (mut budget, mut used) = (TRANSMIT_BUDGET, false);
        for _ in 0..active.queue.size() {
            if self.host.is_some() && !self.writable && !self.write_failed {
                return Ok(PassOutcome { used, again: false });
            }
            let Some(chain) = active.queue.iter(mem).map_err(broken)?.next() else {
                return Ok(PassOutcome { used, again: false });
            };
            let head = chain.head_index();
            chain::segments(&active.queue, head, mem, &mut readable, &mut writable).map_err(broken)?;
            if !self.send(mem, &readable, &mut budget)? {
                active.queue.go_to_previous_position();
                let again = self.writable;
                return Ok(PassOutcome { used, again });
            }
            self.taken = 0;
            active.queue.add_used(mem, head, 0).map_err(broken)?;
            used = true;
        }
        Ok(PassOutcome { used, again: true })
    }

    /// Sends the bytes of a buffer that the host has not taken. Returns false if some are left.
    fn send(
        &mut self,
        mem: &GuestMemMmap,
        readable: &[Segment],
        budget: &mut usize,
    ) -> Result<bool, DeviceError> {
        let mut bytes = [0; CHUNK];
        let mut skip = self.taken;
        for segment in readable {
            let len = u64::from(segment.len);
            let mut at = skip.min(len);
            skip -= at;
            while at < len {
                let Some(mut host) = self.host.as_deref().filter(|_| !self.write_failed) else {
                    return Ok(true);
                };
                if *budget == 0 {
                    return Ok(false);
                }
                let part = &mut bytes[..(len - at).min(CHUNK as u64) as usize];
                let address = segment.address.checked_add(at);
                let address = address.ok_or("buffer outside of guest memory")?;
                mem.read_slice(part, address).map_err(broken)?;
                match host.write(part) {
                    Ok(0) => self.stop_writing(),
                    Ok(count) => {
                        at += count as u64;
                        self.taken += count as u64;
                        *budget = budget.saturating_sub(count);
                    }
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    Err(e) if e.kind() == ErrorKind::WouldBlock => {
                        self.writable = false;
                        return Ok(false);
                    }
                    Err(_) => self.stop_writing(),
                }
            }
        }
        Ok(true)
    }

    /// Fills the guest's buffers with bytes of the host. The host's bytes wait in the socket while the guest has not
    /// opened the port or offers no buffer.
    pub fn receive(
        &mut self,
        active: &mut ActiveQueue,
        mem: &GuestMemMmap,
    ) -> Result<PassOutcome, DeviceError> {
        let (mut readable, mut writable) = (Vec::new(), Vec::new());
        let mut bytes = [0; CHUNK];
        let mut used = false;
        for _ in 0..active.queue.size() {
            let Some(host) = self.host.clone().filter(|_| self.guest_open && self.readable) else {
                return Ok(PassOutcome { used, again: false });
            };
            let Some(chain) = active.queue.iter(mem).map_err(broken)?.next() else {
                if self.notify_receive(active, mem, true)? {
                    continue;
                }
                return Ok(PassOutcome { used, again: false });
            };
            self.notify_receive(active, mem, false)?;
            let head = chain.head_index();
            chain::segments(&active.queue, head, mem, &mut readable, &mut writable).map_err(broken)?;
            let room = room(&writable).min(CHUNK as u64) as usize;
            if room == 0 {
                return Err("receive buffer without space".into());
            }
            match (&*host).read(&mut bytes[..room]) {
                Ok(count @ 1..) => {
                    scatter(mem, &writable, &bytes[..count])?;
                    active.queue.add_used(mem, head, count as u32).map_err(broken)?;
                    used = true;
                    continue;
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => self.readable = false,
                Ok(0) | Err(_) => self.close_host(),
            }
            active.queue.go_to_previous_position();
        }
        Ok(PassOutcome { used, again: true })
    }

    /// Has the driver notify the device of receive buffers, or not. A driver gives each buffer back when it has read it,
    /// and the device waits for one only while it has none. Returns true if there is a buffer after all.
    fn notify_receive(
        &mut self,
        active: &mut ActiveQueue,
        mem: &GuestMemMmap,
        wanted: bool,
    ) -> Result<bool, DeviceError> {
        if wanted {
            self.receive_notified = true;
            return active.queue.enable_notification(mem).map_err(broken);
        }
        if self.receive_notified {
            self.receive_notified = false;
            active.queue.disable_notification(mem).map_err(broken)?;
        }
        Ok(false)
    }
}

/// Sum of the lengths of `segments`.
pub(crate) fn room(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}

/// Writes `bytes` to `segments`, which have room for them.
pub(crate) fn scatter(mem: &GuestMemMmap, segments: &[Segment], mut bytes: &[u8]) -> Result<(), DeviceError> {
    for segment in segments {
        let (part, rest) = bytes.split_at(bytes.len().min(segment.len as usize));
        mem.write_slice(part, segment.address).map_err(broken)?;
        bytes = rest;
    }
    Ok(())
}

/// Copies bytes of `segments` to `bytes`, from the start. Returns their number.
pub(crate) fn gather(
    mem: &GuestMemMmap,
    segments: &[Segment],
    bytes: &mut [u8],
) -> Result<usize, DeviceError> {
    let mut done = 0;
    for segment in segments {
        let len = (segment.len as usize).min(bytes.len() - done);
        mem.read_slice(&mut bytes[done..done + len], segment.address)
            .map_err(broken)?;
        done += len;
    }
    Ok(done)
}
