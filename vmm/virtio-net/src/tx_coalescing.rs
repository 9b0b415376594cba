//! Delayed transmit interrupts.
//!
//! A driver that sends a short frame and waits for the reply requests an interrupt for the sent frame, but also
//! reclaims it when the reply arrives. An interrupt in between would only wake an idle guest once more. So the
//! interrupt is delayed, and raised only if the driver has not looked at the used ring by then.
//!
//! Longer frames belong to streams, whose sender waits for free ring entries: they interrupt at once.

use std::time::Duration;

use husk_devices::GuestMemMmap;
use husk_devices::virtio::used_batch::needs_notification;
use virtio_queue::{Queue, QueueT};

use crate::pass::{PassOutcome, SHORT_FRAME_BYTES};
use crate::rx_buffers::{DeviceError, broken};

/// Longest delay of an interrupt on an idle device.
pub(crate) const MAX_DELAY: Duration = Duration::from_millis(5);

/// Longest delay of an interrupt on a busy device, in passes over the queues.
const MAX_PASSES: u32 = 8;

/// Frames that interrupt at once after a driver did not look at the used ring by itself.
const UNDELAYED_FRAMES: usize = 1024;

/// The delayed interrupt of a transmit queue.
#[derive(Debug, Default)]
pub(crate) struct TxCoalescing {
    /// Index of the used ring at the last interrupt, if an interrupt is delayed.
    pending_since: Option<u16>,
    /// Passes since then.
    passes: u32,
    /// Frames left that interrupt at once.
    undelayed: usize,
}

impl TxCoalescing {
    /// True if an interrupt is delayed.
    pub fn is_pending(&self) -> bool {
        self.pending_since.is_some()
    }

    /// Records a pass over the queue, whose used ring had the index `before`. Returns true if the caller is to
    /// interrupt now.
    ///
    /// # Errors
    /// The queue is not in memory.
    pub fn frames_sent(
        &mut self,
        mem: &GuestMemMmap,
        queue: &Queue,
        before: u16,
        outcome: &PassOutcome,
    ) -> Result<bool, DeviceError> {
        if outcome.frames == 0 {
            return Ok(false);
        }
        if let Some(since) = self.pending_since.take()
            && needs_notification(mem, queue, since, before).map_err(broken)?
        {
            // The driver sends more and has not looked at the used ring.
            self.undelayed = UNDELAYED_FRAMES;
            return Ok(true);
        }
        self.undelayed = self.undelayed.saturating_sub(outcome.frames);
        // Only the event index shows whether the driver has looked.
        let waits = self.undelayed == 0
            && outcome.frames == 1
            && outcome.bytes <= SHORT_FRAME_BYTES
            && outcome.interrupt
            && queue.event_idx_enabled();
        if waits {
            (self.pending_since, self.passes) = (Some(before), 0);
        }
        Ok(outcome.interrupt && !waits)
    }

    /// Records the end of a pass over both queues. Returns true if the delayed interrupt is due.
    pub fn is_overdue(&mut self) -> bool {
        self.passes = self.passes.saturating_add(1);
        self.is_pending() && self.passes > MAX_PASSES
    }

    /// Ends the delay. Returns true if the driver still needs the interrupt.
    pub fn flush(&mut self, mem: &GuestMemMmap, queue: &Queue) -> Result<bool, DeviceError> {
        let Some(since) = self.pending_since.take() else {
            return Ok(false);
        };
        let wanted = needs_notification(mem, queue, since, queue.next_used()).map_err(broken)?;
        if wanted {
            self.undelayed = UNDELAYED_FRAMES;
        }
        Ok(wanted)
    }
}

#[cfg(test)]
mod tests {
    use husk_devices::virtio::testing::{Driver, memory};
    use vm_memory::GuestAddressSpace;

    use super::*;

    struct Sender {
        coalescing: TxCoalescing,
        driver: Driver,
        queue: Queue,
        mem: husk_devices::GuestMem,
    }

    impl Sender {
        fn new() -> Self {
            let mem = memory(&[(0, 0x10000)]);
            let driver = Driver::new(&mem, 0, 16, 0x1000);
            let queue = driver.queue(true).queue;
            Self {
                coalescing: TxCoalescing::default(),
                driver,
                queue,
                mem,
            }
        }

        /// Sends frames; the driver wants an interrupt for the first. Returns true if it is interrupted.
        fn send(&mut self, frames: u16, bytes: usize) -> bool {
            let before = self.queue.next_used();
            self.queue.set_next_used(before.wrapping_add(frames));
            let outcome = PassOutcome {
                frames: frames.into(),
                bytes,
                again: false,
                interrupt: true,
            };
            self.coalescing
                .frames_sent(&self.mem.memory(), &self.queue, before, &outcome)
                .unwrap()
        }

        fn looks(&self) {
            self.driver.set_used_event(self.queue.next_used());
        }

        fn flush(&mut self) -> bool {
            self.coalescing.flush(&self.mem.memory(), &self.queue).unwrap()
        }
    }

    #[test]
    fn a_driver_that_polls_gets_no_interrupt() {
        let mut sender = Sender::new();
        for _ in 0..100_000 {
            sender.looks();
            assert!(!sender.send(1, 60) && sender.coalescing.is_pending());
        }
        sender.looks();
        assert!(!sender.flush() && !sender.coalescing.is_pending());
    }

    #[test]
    fn a_driver_that_does_not_poll_is_interrupted_at_once_from_then_on() {
        let mut sender = Sender::new();
        assert!(!sender.send(1, 60));
        assert!(sender.flush());
        for _ in 1..UNDELAYED_FRAMES {
            sender.looks();
            assert!(sender.send(1, 60));
        }
        sender.looks();
        assert!(!sender.send(1, 60), "perhaps it looks now");
    }

    #[test]
    fn sending_more_without_polling_interrupts() {
        let mut sender = Sender::new();
        assert!(!sender.send(1, 60));
        assert!(sender.send(1, 60) && !sender.coalescing.is_pending());
    }

    #[test]
    fn long_frames_and_several_do_not_wait() {
        let mut sender = Sender::new();
        for (frames, bytes) in [(1, 65_000), (2, 120)] {
            sender.looks();
            assert!(sender.send(frames, bytes) && !sender.coalescing.is_pending());
        }
    }

    #[test]
    fn the_delay_ends_even_if_other_frames_arrive() {
        let mut sender = Sender::new();
        assert!(!sender.send(1, 60));
        let waited = (0..=MAX_PASSES)
            .filter(|_| sender.coalescing.is_overdue())
            .count();
        assert_eq!(waited, 1);
        assert!(sender.flush() && !sender.coalescing.is_overdue());
    }
}
