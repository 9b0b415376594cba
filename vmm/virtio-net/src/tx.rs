//! Frames from the driver to the tap (virtio 1.2, section 5.1.6.2), written directly from the driver's buffers.

use std::io;

use husk_devices::GuestMemMmap;
use husk_devices::virtio::ActiveQueue;
use husk_devices::virtio::chain::{self, Segment};
use husk_devices::virtio::dma::host_ranges;
use husk_devices::virtio::used_batch::UsedBatch;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{Address, Bytes};

use crate::counters::Counters;
use crate::header::{FrameError, HEADER_LEN, Header};
use crate::pass::{BATCH, PassOutcome};
use crate::rx_buffers::{DeviceError, MAX_SLICES, broken};
use crate::tap::Tap;

/// The sending half of a pair.
pub(crate) struct Transmitter {
    features: u64,
    readable: Vec<Segment>,
    writable: Vec<Segment>,
    slices: Vec<libc::iovec>,
    used: UsedBatch,
    pub counters: Counters,
}

/// The result of sending a frame.
enum Sent {
    Done,
    /// The tap is full.
    Full,
}

impl Transmitter {
    /// A transmitter for a driver with these negotiated features.
    pub fn new(features: u64) -> Self {
        Self {
            features,
            readable: Vec::new(),
            writable: Vec::new(),
            slices: Vec::new(),
            used: UsedBatch::default(),
            counters: Counters::default(),
        }
    }

    /// Sends at most one batch of frames. Without a tap they are dropped. Sets `full` if the tap accepts no more
    /// frames for now.
    pub fn pass(
        &mut self,
        tap: Option<&Tap>,
        active: &mut ActiveQueue,
        mem: &GuestMemMmap,
        full: &mut bool,
    ) -> Result<PassOutcome, DeviceError> {
        let queue = &mut active.queue;
        queue.disable_notification(mem).map_err(broken)?;
        let (mut exhausted, mut interrupt, mut frames) = (false, false, 0);
        let before = self.counters.bytes;
        for _ in 0..BATCH {
            let Some(chain) = queue.iter(mem).map_err(broken)?.next() else {
                exhausted = true;
                break;
            };
            let head = chain.head_index();
            chain::segments(queue, head, mem, &mut self.readable, &mut self.writable).map_err(broken)?;
            match self.send(tap, mem) {
                Ok(Sent::Full) => {
                    queue.go_to_previous_position();
                    *full = true;
                    break;
                }
                Ok(Sent::Done) => {}
                Err(refused) => {
                    tracing::debug!(%refused, "frame not sent");
                    self.counters.errors += 1;
                }
            }
            if self.used.len() == queue.size() {
                interrupt |= self.used.publish(mem, queue).map_err(broken)?;
            }
            self.used.stage(mem, queue, head, 0).map_err(broken)?;
            frames += 1;
        }
        interrupt |= self.used.publish(mem, queue).map_err(broken)?;
        let again = if exhausted {
            queue.enable_notification(mem).map_err(broken)?
        } else {
            !*full
        };
        Ok(PassOutcome {
            frames,
            bytes: (self.counters.bytes - before) as usize,
            again,
            interrupt,
        })
    }

    /// Sends the frame in the chain parsed last.
    fn send(&mut self, tap: Option<&Tap>, mem: &GuestMemMmap) -> Result<Sent, FrameError> {
        if !self.writable.is_empty() {
            return Err(FrameError::Writable);
        }
        let mut header = [0; HEADER_LEN];
        self.take_header(mem, &mut header)?;
        // A chain has less than 4 GiB, else its iterator ends early.
        let len: usize = self.readable.iter().map(|segment| segment.len as usize).sum();
        let mut header = Header::parse(header).admit(self.features, len)?.bytes();
        let Some(tap) = tap else {
            self.counters.dropped += 1;
            return Ok(Sent::Done);
        };
        self.slices.clear();
        self.slices.push(libc::iovec {
            iov_base: header.as_mut_ptr().cast(),
            iov_len: HEADER_LEN,
        });
        for segment in self.readable.iter().filter(|segment| segment.len != 0) {
            host_ranges(mem, *segment, |_, range| self.slices.push(range.into()))
                .map_err(|_| FrameError::Buffers)?;
        }
        if self.slices.len() > MAX_SLICES {
            return Err(FrameError::Buffers);
        }
        loop {
            // SAFETY: the first slice is `header`, the others are of `mem`, which stays mapped.
            match unsafe { tap.write(&self.slices) } {
                Ok(_) => {
                    self.counters.packets += 1;
                    self.counters.bytes += len as u64;
                    return Ok(Sent::Done);
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(Sent::Full),
                    io::ErrorKind::Interrupted => {}
                    _ => {
                        tracing::debug!(%error, "tap refused a frame");
                        self.counters.errors += 1;
                        return Ok(Sent::Done);
                    }
                },
            }
        }
    }

    /// Reads and consumes the header from the readable segments.
    fn take_header(&mut self, mem: &GuestMemMmap, header: &mut [u8; HEADER_LEN]) -> Result<(), FrameError> {
        let mut done = 0;
        for segment in &mut self.readable {
            let here = (HEADER_LEN - done).min(segment.len as usize);
            mem.read_slice(&mut header[done..done + here], segment.address)
                .map_err(|_| FrameError::Buffers)?;
            done += here;
            segment.len -= here as u32;
            segment.address = segment
                .address
                .checked_add(here as u64)
                .ok_or(FrameError::Buffers)?;
            if done == HEADER_LEN {
                return Ok(());
            }
        }
        Err(FrameError::Short)
    }
}
