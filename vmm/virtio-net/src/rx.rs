//! Frames from the tap to the driver (virtio 1.2, sections 5.1.6.3 and 5.1.6.4).
//!
//! A frame is read directly into the driver's buffers: as many as recent frames needed, followed by a spill buffer of
//! this process for the rest of a longer frame, which is then copied.

use std::io;
use std::sync::Arc;

use husk_devices::GuestMemMmap;
use husk_devices::virtio::ActiveQueue;
use husk_devices::virtio::used_batch::UsedBatch;
use virtio_queue::{Queue, QueueT};

use crate::counters::Counters;
use crate::filter::Filter;
use crate::header::{ETHERNET_LEN, HEADER_LEN, MAX_FRAME, NUM_BUFFERS_OFFSET, VLAN_LEN};
use crate::pass::{BATCH, PassOutcome};
use crate::rx_buffers::{DeviceError, RxBuffers, broken};
use crate::tap::Tap;

/// Bytes of the spill buffer: a header, a frame, and one byte that only an oversized frame fills.
const SPILL: usize = HEADER_LEN + MAX_FRAME + 1;

/// Smallest number of bytes of driver buffers to read into, if available: a frame of the usual MTU.
const LEAST: usize = 2048;

/// Bytes at the start of a frame that the filter needs, with the virtio header.
const PEEK: usize = HEADER_LEN + ETHERNET_LEN + VLAN_LEN;

/// The result of one attempt to receive.
enum Step {
    /// A frame was delivered or dropped.
    Frame,
    /// The tap has no frame.
    Empty,
    /// The driver must add buffers first.
    NoBuffers,
}

/// The receiving half of a pair.
pub(crate) struct Receiver {
    buffers: RxBuffers,
    spill: Box<[u8]>,
    /// Length in bytes of a frame that waits for buffers, and the size of the buffers that already hold its start.
    held: Option<(usize, usize)>,
    /// Bytes of buffers to read into, from the size of recent frames.
    expect: usize,
    used: UsedBatch,
    mergeable: bool,
    mtu: Option<u16>,
    pub counters: Counters,
}

impl Receiver {
    /// Frames are put into several buffers if `mergeable`. Longer ones than the negotiated `mtu` are dropped.
    pub fn new(mergeable: bool, mtu: Option<u16>) -> Self {
        Self {
            buffers: RxBuffers::default(),
            spill: vec![0; SPILL].into(),
            held: None,
            expect: LEAST,
            used: UsedBatch::default(),
            mergeable,
            mtu,
            counters: Counters::default(),
        }
    }

    /// Receives a batch of frames at most.
    pub fn pass(
        &mut self,
        tap: &Tap,
        active: &mut ActiveQueue,
        mem: &Arc<GuestMemMmap>,
        filter: &Filter,
    ) -> Result<PassOutcome, DeviceError> {
        let queue = &mut active.queue;
        queue.disable_notification(&**mem).map_err(broken)?;
        let (mut interrupt, mut last, mut frames) = (false, Step::Frame, 0);
        let before = self.counters.bytes;
        for _ in 0..BATCH {
            last = self.step(tap, queue, mem, filter, &mut interrupt)?;
            if !matches!(last, Step::Frame) {
                break;
            }
            frames += 1;
        }
        interrupt |= self.used.publish(mem, queue).map_err(broken)?;
        let again = match last {
            Step::Frame => true,
            Step::Empty => false,
            Step::NoBuffers => queue.enable_notification(&**mem).map_err(broken)?,
        };
        Ok(PassOutcome {
            frames,
            bytes: (self.counters.bytes - before) as usize,
            again,
            interrupt,
        })
    }

    /// Drops the frame that waits for buffers and returns all buffers to the queue.
    pub fn release(&mut self, queue: &mut Queue) {
        self.counters.dropped += u64::from(self.held.take().is_some());
        self.buffers.give_back(queue);
    }

    fn step(
        &mut self,
        tap: &Tap,
        queue: &mut Queue,
        mem: &Arc<GuestMemMmap>,
        filter: &Filter,
        interrupt: &mut bool,
    ) -> Result<Step, DeviceError> {
        if self.held.is_none() {
            match self.read(tap, queue, mem, filter)? {
                (Step::Frame, Some(held)) => self.held = Some(held),
                (step, _) => return Ok(step),
            }
        }
        let Some((len, direct)) = self.held else {
            return Ok(Step::Frame);
        };
        if len > direct {
            let tried = self.buffers.fill(mem, queue, len)?;
            if self.buffers.room() < len {
                if !tried {
                    return Ok(Step::NoBuffers);
                }
                // The frame does not fit into a full queue of buffers.
                self.held = None;
                self.counters.dropped += 1;
                return Ok(Step::Frame);
            }
            self.buffers.put(direct, &self.spill[..len - direct]);
        }
        self.held = None;
        self.deliver(mem, queue, len, interrupt)?;
        Ok(Step::Frame)
    }

    /// Reads one frame. Returns its length and the size of the buffers read into, unless it is dropped.
    fn read(
        &mut self,
        tap: &Tap,
        queue: &mut Queue,
        mem: &Arc<GuestMemMmap>,
        filter: &Filter,
    ) -> Result<(Step, Option<(usize, usize)>), DeviceError> {
        let want = if self.mergeable { self.expect } else { 1 };
        self.buffers.fill(mem, queue, want)?;
        if self.buffers.room() == 0 {
            return Ok((Step::NoBuffers, None));
        }
        let spill = libc::iovec {
            iov_base: self.spill.as_mut_ptr().cast(),
            iov_len: self.spill.len(),
        };
        let (read, direct) = self.buffers.read_frame(want, spill, |slices| {
            // SAFETY: the slices are of `mem`, which `mem` keeps mapped and the guest writes at any time too, but for
            // the last, which is `self.spill`.
            unsafe { tap.read(slices) }
        });
        let len = match read {
            Ok(len) => len,
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => return Ok((Step::Empty, None)),
                io::ErrorKind::Interrupted => return Ok((Step::Frame, None)),
                _ => {
                    tracing::debug!(%error, "tap not read");
                    self.counters.errors += 1;
                    // A frame that could not be copied to memory is lost, and another may follow. A removed tap has
                    // none.
                    let lost = matches!(error.raw_os_error(), Some(libc::EFAULT | libc::ENOMEM));
                    return Ok((if lost { Step::Frame } else { Step::Empty }, None));
                }
            },
        };
        let frame = len.saturating_sub(HEADER_LEN);
        if frame < ETHERNET_LEN || len == direct + SPILL || frame > MAX_FRAME {
            self.counters.errors += 1;
            return Ok((Step::Frame, None));
        }
        let mut first = [0; PEEK];
        let seen = direct.min(PEEK);
        self.buffers.peek(0, &mut first[..seen]);
        first[seen..].copy_from_slice(&self.spill[..PEEK - seen]);
        let is_not_gso = first[1] == 0;
        if !filter.passes(&first[HEADER_LEN..len.min(PEEK)]) {
            return Ok((Step::Frame, None));
        }
        // Section 5.1.4.1: the MTU does not count the VLAN tag.
        let too_long = is_not_gso
            && self
                .mtu
                .is_some_and(|mtu| frame > usize::from(mtu) + ETHERNET_LEN + VLAN_LEN);
        if too_long || !self.mergeable && len > direct {
            self.counters.dropped += 1;
            return Ok((Step::Frame, None));
        }
        self.expect = len.max(self.expect - self.expect / 8).max(LEAST);
        Ok((Step::Frame, Some((len, direct))))
    }

    /// Puts the buffers with the frame of `len` bytes into the used ring.
    fn deliver(
        &mut self,
        mem: &GuestMemMmap,
        queue: &mut Queue,
        len: usize,
        interrupt: &mut bool,
    ) -> Result<(), DeviceError> {
        let mut count = 0_u16;
        let mut room = 0;
        for buffer in self.buffers.iter() {
            if room >= len {
                break;
            }
            room += buffer.len;
            count += 1;
        }
        self.buffers.put(NUM_BUFFERS_OFFSET, &count.to_le_bytes());
        if self.used.len() + count > queue.size() {
            *interrupt |= self.used.publish(mem, queue).map_err(broken)?;
        }
        let mut rest = len;
        for _ in 0..count {
            let Some(buffer) = self.buffers.pop() else { break };
            let here = rest.min(buffer.len);
            self.used
                .stage(mem, queue, buffer.head, here as u32)
                .map_err(broken)?;
            rest -= here;
        }
        self.counters.packets += 1;
        self.counters.bytes += (len - HEADER_LEN) as u64;
        Ok(())
    }
}
