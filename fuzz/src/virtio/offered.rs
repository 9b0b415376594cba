//! What a driver has made available, and what the device may do with it.

use std::collections::HashMap;

use husk_devices::virtio::testing::{Descriptor, WRITE};

use super::{BUFFERS, DATA, SLOT_COUNT, SLOTS};

/// The chains of a driver that have not been used yet, as long as the driver keeps the rules.
pub struct Offered {
    /// The driver may have overwritten a ring or a chain.
    unknown: bool,
    size: u16,
    slots: u64,
    /// Some slots have tables of descriptors, and the device may write to some.
    has_tables: bool,
    writes_slots: bool,
    queues: Vec<Queue>,
}

#[derive(Clone, Default)]
struct Queue {
    entries: usize,
    /// Bytes that the device may write, by head.
    rooms: HashMap<u16, u64>,
}

impl Offered {
    /// Nothing is available in `queues` queues of `size` entries.
    pub fn new(queues: usize, size: u16) -> Self {
        Self {
            unknown: false,
            size,
            slots: 0,
            has_tables: false,
            writes_slots: false,
            queues: vec![Queue::default(); queues],
        }
    }

    /// The driver breaks the rules: from now on all is allowed.
    pub fn forget(&mut self) {
        self.unknown = true;
    }

    /// A slot is used for a request, or for its table.
    pub fn take_slot(&mut self) {
        self.slots += 1;
        // From here on it may be that of another request.
        self.unknown |= self.slots > SLOT_COUNT;
    }

    /// A chain is made available, with `indirect` by a table in a slot.
    pub fn add(&mut self, queue: usize, head: u16, chain: &[Descriptor], indirect: bool) {
        let entries = if indirect { 1 } else { chain.len() };
        let written = || chain.iter().filter(|part| part.2 & WRITE != 0);
        self.unknown |= written().any(|part| part.0 < BUFFERS);
        self.writes_slots |= written().any(reaches_slots);
        self.has_tables |= indirect;
        self.unknown |= self.writes_slots && self.has_tables;
        let queue = &mut self.queues[queue];
        queue.entries += entries;
        self.unknown |= entries == 0 || queue.entries > usize::from(self.size);
        let room = written().map(|part| u64::from(part.1)).sum();
        queue.rooms.insert(head, room);
    }

    /// The device has used a chain, and has written this many bytes.
    pub fn used(&mut self, queue: usize, head: u16, len: u32) {
        if !self.unknown {
            let room = self.queues[queue].rooms.remove(&head);
            let room = room.expect("a used chain is one that is available");
            assert!(u64::from(len) <= room, "{len} bytes in buffers of {room}");
        }
    }
}

fn reaches_slots((at, len, _): &Descriptor) -> bool {
    *at < DATA && at.saturating_add(u64::from(*len)) > SLOTS
}
