//! Frames between the queues and the tap.

use crate::ring::{Buffer, Ring};
use crate::tap::Tap;
use anyhow::{Context, Result, bail};
use kvm_bindings::kvm_msi;
use kvm_ioctls::VmFd;
use libc::iovec;
use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

/// Bytes of the largest frame with its header.
const LARGEST: usize = 12 + 65_550;
/// Offset of the number of buffers in a header.
const NUM_BUFFERS: u64 = 10;

/// An interrupt that a thread can send.
#[derive(Debug)]
pub struct Interrupt {
    /// The VM.
    pub vm: Arc<VmFd>,
    /// Address and data of the queue's entry in the MSI-X table.
    pub message: kvm_msi,
}

impl Interrupt {
    fn send(&self) -> Result<()> {
        self.vm.signal_msi(self.message).context("KVM_SIGNAL_MSI")?;
        Ok(())
    }
}

/// The transmit queue.
pub struct Sender {
    ring: Ring,
    interrupt: Interrupt,
    tap: Arc<Tap>,
    parts: Vec<iovec>,
}

impl Sender {
    /// A queue whose frames go to the tap.
    pub fn new(ring: Ring, interrupt: Interrupt, tap: Arc<Tap>) -> Self {
        Self {
            ring,
            interrupt,
            tap,
            parts: Vec::new(),
        }
    }

    /// Sends all frames of the queue.
    pub fn send(&mut self) -> Result<()> {
        let mut interrupts = false;
        loop {
            while let Some(Buffer { head, .. }) = self.ring.pop(&mut self.parts)? {
                // SAFETY: the parts are in guest memory, which `ring` keeps mapped.
                unsafe { self.tap.send(&self.parts) };
                self.parts.clear();
                interrupts |= self.ring.give_back(&[(head, 0)])?;
            }
            if !self.ring.wants_notification()? {
                break;
            }
        }
        if interrupts {
            self.interrupt.send()?;
        }
        Ok(())
    }
}

/// The receive queue.
#[derive(Debug)]
pub struct Receiver {
    /// The queue.
    pub ring: Ring,
    /// Sent after a frame.
    pub interrupt: Interrupt,
    /// The tap that it receives frames from.
    pub tap: Arc<Tap>,
    /// Written when the driver adds buffers.
    pub refilled: EventFd,
    /// Guest memory.
    pub memory: GuestMemoryMmap,
}

impl Receiver {
    /// Receives frames for ever. An error ends the program.
    pub fn run(mut self) {
        if let Err(error) = self.receive() {
            eprintln!("husk-floor: {error:#}");
            std::process::exit(1);
        }
    }

    fn receive(&mut self) -> Result<()> {
        let (mut buffers, mut parts) = (Vec::<Buffer>::new(), Vec::new());
        let mut room = 0;
        loop {
            while room < LARGEST {
                if let Some(buffer) = self.ring.pop(&mut parts)? {
                    room += buffer.length;
                    buffers.push(buffer);
                } else if !self.ring.wants_notification()? {
                    self.refilled.read()?;
                }
            }
            // SAFETY: the parts are in guest memory, which `ring` keeps mapped and to which there are no references.
            let size = match unsafe { self.tap.receive(&parts) } {
                Ok(size) => size,
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
                Err(error) => return Err(error).context("cannot read from the tap"),
            };
            let (used, taken) = split(&buffers, size)?;
            if let [first, ..] = buffers.as_slice() {
                let at = GuestAddress(first.start.0 + NUM_BUFFERS);
                self.memory.write_obj(u16::try_from(used.len())?, at)?;
            }
            if self.ring.give_back(&used)? {
                self.interrupt.send()?;
            }
            room -= buffers
                .drain(..used.len())
                .map(|buffer| buffer.length)
                .sum::<usize>();
            parts.drain(..taken);
        }
    }
}

/// Heads and lengths of the buffers that hold a frame of `size` bytes, and the number of their parts.
fn split(buffers: &[Buffer], size: usize) -> Result<(Vec<(u16, u32)>, usize)> {
    let (mut used, mut parts, mut left) = (Vec::new(), 0, size);
    for buffer in buffers {
        let length = left.min(buffer.length);
        used.push((buffer.head, u32::try_from(length)?));
        parts += buffer.parts;
        left -= length;
        if left == 0 {
            return Ok((used, parts));
        }
    }
    bail!("a frame of {size} bytes does not fit")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_takes_as_many_buffers_as_it_needs() {
        let buffer = |head, length| Buffer {
            head,
            start: GuestAddress(0),
            parts: 1,
            length,
        };
        let buffers = [buffer(3, 1000), buffer(9, 1000), buffer(4, 1000)];
        let split = |size| split(&buffers, size).ok();
        assert_eq!(split(1), Some((vec![(3, 1)], 1)));
        assert_eq!(split(1000), Some((vec![(3, 1000)], 1)));
        assert_eq!(split(1001), Some((vec![(3, 1000), (9, 1)], 2)));
        assert_eq!(split(3001), None);
    }
}
