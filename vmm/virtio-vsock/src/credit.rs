//! Flow control of a connection (virtio 1.3, section 5.10.6.3): how much each side may send before the other has taken
//! it. All counters are modulo 2^32.

use std::collections::VecDeque;

use crate::packet::Header;

/// Bytes of a connection that the device holds for the host at most: `buf_alloc` of its packets.
pub(crate) const BUFFER: u32 = 64 << 10;

/// Bytes of the guest's buffer that each packet uses up, however small it is. Linux since 059b7dbd20a6 drops packets
/// when its bookkeeping for them, 576 bytes for each, exceeds the buffer.
const PACKET_SHARE: u32 = 1024;
/// Most packets under way, however large the guest's buffer: each takes memory here.
const MAX_PACKETS: u32 = 4096;

/// The counters of both directions.
#[derive(Clone, Debug, Default)]
pub(crate) struct Credit {
    /// Bytes that the guest has sent.
    received: u32,
    /// Bytes of those that the host has taken.
    forwarded: u32,
    /// The value of `forwarded` in the last packet to the guest.
    last_fwd_cnt: u32,
    /// Bytes that were sent to the guest.
    sent: u32,
    /// The value of `sent` after each packet of which the guest has not taken all bytes yet.
    packets: VecDeque<u32>,
    guest_buf_alloc: u32,
    guest_fwd_cnt: u32,
}

impl Credit {
    /// Takes the guest's counters from a packet.
    pub fn update(&mut self, header: &Header) {
        (self.guest_buf_alloc, self.guest_fwd_cnt) = (header.buf_alloc, header.fwd_cnt);
        let under_way = self.under_way();
        while let Some(end) = self.packets.front()
            && self.sent.wrapping_sub(*end) >= under_way
        {
            self.packets.pop_front();
        }
    }

    fn under_way(&self) -> u32 {
        self.sent.wrapping_sub(self.guest_fwd_cnt)
    }

    /// Bytes that may be sent to the guest in a packet.
    pub fn guest_room(&self) -> u32 {
        match self.packets.len() < self.most_packets() {
            true => self.byte_room(),
            false => 0,
        }
    }

    fn byte_room(&self) -> u32 {
        self.guest_buf_alloc.saturating_sub(self.under_way())
    }

    fn most_packets(&self) -> usize {
        (self.guest_buf_alloc / PACKET_SHARE).clamp(1, MAX_PACKETS) as usize
    }

    /// True if there is room for bytes, but not for another packet. The guest does not know this limit: Linux sends a
    /// credit update only after it has read many bytes, so the device must ask.
    pub fn is_full_of_packets(&self) -> bool {
        self.guest_room() == 0 && self.byte_room() > 0
    }

    /// Counts a packet with payload.
    pub fn sent(&mut self, bytes: u32) {
        self.sent = self.sent.wrapping_add(bytes);
        self.packets.push_back(self.sent);
    }

    /// Counts bytes from the guest. Returns false if it had no credit for them.
    #[must_use]
    pub fn receive(&mut self, bytes: u32) -> bool {
        let held = self.received.wrapping_sub(self.forwarded);
        let fits = bytes <= BUFFER - held;
        if fits {
            self.received = self.received.wrapping_add(bytes);
        }
        fits
    }

    /// Counts bytes that have left the buffer.
    pub fn forward(&mut self, bytes: u32) {
        self.forwarded = self.forwarded.wrapping_add(bytes);
    }

    /// True if the guest believes that less than half of the buffer is free, and more is.
    pub fn is_update_due(&self) -> bool {
        self.forwarded != self.last_fwd_cnt && self.received.wrapping_sub(self.last_fwd_cnt) > BUFFER / 2
    }

    /// Writes the counters into the header of a packet to the guest.
    pub fn write_header(&mut self, header: &mut Header) {
        (header.buf_alloc, header.fwd_cnt) = (BUFFER, self.forwarded);
        self.last_fwd_cnt = self.forwarded;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_guest_may_fill_the_buffer_and_no_more() {
        let mut credit = Credit::default();
        assert!(credit.receive(BUFFER));
        assert!(!credit.receive(1));
        assert!(!credit.is_update_due(), "nothing is free");
        credit.forward(10);
        assert!(credit.is_update_due());
        credit.write_header(&mut Header::default());
        assert!(!credit.is_update_due());
        assert!(credit.receive(10) && !credit.receive(1));
    }

    #[test]
    fn a_guest_that_has_taken_more_than_was_sent_gets_nothing() {
        let mut credit = Credit::default();
        let guest = |buf_alloc, fwd_cnt| Header {
            buf_alloc,
            fwd_cnt,
            ..Header::default()
        };
        credit.update(&guest(10_000, 0));
        credit.sent(6000);
        assert_eq!(credit.guest_room(), 4000);
        credit.update(&guest(10_000, 6001));
        assert_eq!(credit.guest_room(), 0);
        credit.update(&guest(3000, 0));
        assert_eq!(credit.guest_room(), 0, "a buffer that shrinks");
        credit.update(&guest(10_000, 6000));
        assert_eq!(credit.guest_room(), 10_000);
    }

    #[test]
    fn packets_leave_with_the_last_byte_that_the_guest_takes() {
        let mut credit = Credit {
            sent: u32::MAX - 1000,
            ..Credit::default()
        };
        let guest = |taken: u32| Header {
            buf_alloc: 4 * PACKET_SHARE,
            fwd_cnt: (u32::MAX - 1000).wrapping_add(taken),
            ..Header::default()
        };
        credit.update(&guest(0));
        (0..4).for_each(|_| credit.sent(300));
        assert_eq!(credit.guest_room(), 0);
        assert!(credit.is_full_of_packets());
        credit.update(&guest(299));
        assert_eq!(credit.guest_room(), 0);
        credit.update(&guest(300));
        assert_eq!(credit.guest_room(), 4 * PACKET_SHARE - 900);
        credit.update(&guest(1201));
        assert_eq!(
            (credit.packets.len(), credit.guest_room()),
            (3, 0),
            "more than was sent"
        );
        credit.update(&guest(1200));
        assert_eq!(credit.packets.len(), 0);
        for _ in 0..3 * MAX_PACKETS {
            credit.update(&Header {
                buf_alloc: u32::MAX,
                ..guest(1200)
            });
            if credit.guest_room() > 0 {
                credit.sent(1);
            }
        }
        assert_eq!(credit.packets.len(), MAX_PACKETS as usize);
    }

    proptest! {
        /// Two sides that obey never stall, beyond 2^32 bytes too.
        #[test]
        fn an_obedient_sender_is_never_refused(
            start: u32,
            steps in prop::collection::vec((0..2 * BUFFER, 0..2 * BUFFER), 1..200),
        ) {
            let mut device = Credit { received: start, forwarded: start, last_fwd_cnt: start, ..Credit::default() };
            let mut guest = Credit { sent: start, ..Credit::default() };
            let mut held = 0;
            let mut header = Header::default();
            device.write_header(&mut header);
            guest.update(&header);
            for (send, take) in steps {
                let send = send.min(guest.guest_room());
                if send > 0 {
                    guest.sent(send);
                }
                prop_assert!(device.receive(send));
                held += send;
                let take = take.min(held);
                held -= take;
                device.forward(take);
                if device.is_update_due() || guest.is_full_of_packets() {
                    device.write_header(&mut header);
                    guest.update(&header);
                }
                prop_assert!(held > 0 || guest.guest_room() > 0);
            }
        }
    }
}
