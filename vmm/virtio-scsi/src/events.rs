//! What the driver is still to be told on the event queue (section 5.6.6.3).
//!
//! Kept for each logical unit, not in order of time: a driver that gives buffers back slowly still hears of every unit,
//! and only of what is true of it now. Memory is bounded; beyond that, [`EVENTS_MISSED`](VIRTIO_SCSI_T_EVENTS_MISSED)
//! has the driver look for itself.

use std::collections::{HashMap, VecDeque};

use virtio_bindings::virtio_scsi::{
    VIRTIO_SCSI_EVT_RESET_REMOVED, VIRTIO_SCSI_EVT_RESET_RESCAN, VIRTIO_SCSI_F_CHANGE, VIRTIO_SCSI_F_HOTPLUG,
    VIRTIO_SCSI_T_ASYNC_NOTIFY, VIRTIO_SCSI_T_EVENTS_MISSED, VIRTIO_SCSI_T_NO_EVENT,
    VIRTIO_SCSI_T_PARAM_CHANGE, VIRTIO_SCSI_T_TRANSPORT_RESET,
};

use crate::Address;
use crate::config::EVENT_SIZE;

/// Logical units about which there is something to tell.
const MAX_PENDING: usize = 4096;

/// Asynchronous event MEDIA CHANGE.
pub(crate) const MEDIA_CHANGE: u32 = 1 << 4;

/// CAPACITY DATA HAS CHANGED: additional sense code and, above it, qualifier.
const CAPACITY_CHANGED: u32 = 0x2a | 0x09 << 8;

/// Something that happened to a logical unit, in the order in which the driver is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Removed,
    Added,
    CapacityChanged,
    MediaChanged,
}

const ORDER: [What; 4] = [
    What::Removed,
    What::Added,
    What::CapacityChanged,
    What::MediaChanged,
];

/// An event for the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Something about a unit.
    Unit(Address, What),
    /// Events were lost.
    Missed,
}

impl Event {
    /// `struct virtio_scsi_event`.
    pub fn to_bytes(self) -> [u8; EVENT_SIZE] {
        let (event, lun, reason) = match self {
            Self::Missed => (VIRTIO_SCSI_T_NO_EVENT | VIRTIO_SCSI_T_EVENTS_MISSED, [0; 8], 0),
            Self::Unit(address, what) => {
                let (event, reason) = match what {
                    What::Removed => (VIRTIO_SCSI_T_TRANSPORT_RESET, VIRTIO_SCSI_EVT_RESET_REMOVED),
                    What::Added => (VIRTIO_SCSI_T_TRANSPORT_RESET, VIRTIO_SCSI_EVT_RESET_RESCAN),
                    What::CapacityChanged => (VIRTIO_SCSI_T_PARAM_CHANGE, CAPACITY_CHANGED),
                    What::MediaChanged => (VIRTIO_SCSI_T_ASYNC_NOTIFY, MEDIA_CHANGE),
                };
                (event, address.to_field(), reason)
            }
        };
        let mut bytes = [0; EVENT_SIZE];
        bytes[..4].copy_from_slice(&event.to_le_bytes());
        bytes[4..12].copy_from_slice(&lun);
        bytes[12..].copy_from_slice(&reason.to_le_bytes());
        bytes
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// The driver's features, while there is a driver.
    features: Option<u64>,
    /// A bit for each [`What`], never none.
    pending: HashMap<Address, u8>,
    /// The keys of `pending`, in the order in which they came.
    order: VecDeque<Address>,
    missed: bool,
}

impl Events {
    /// A driver came, or goes on.
    pub fn begin(&mut self, features: u64) {
        self.features = Some(features);
    }

    /// There is no driver any more. The next one will look for itself.
    pub fn end(&mut self) {
        *self = Self::default();
    }

    fn has(&self, bit: u32) -> bool {
        self.features.is_some_and(|features| features & 1 << bit != 0)
    }

    /// Whether there is a driver, which hears of units that come and go.
    pub fn hotplug(&self) -> bool {
        self.has(VIRTIO_SCSI_F_HOTPLUG)
    }

    /// Whether there is a driver.
    pub fn driver(&self) -> bool {
        self.features.is_some()
    }

    /// Whether there is something to tell.
    pub fn is_pending(&self) -> bool {
        self.missed || !self.order.is_empty()
    }

    /// Takes note of something the driver can be told. What was not told yet of a unit that goes is not told any more.
    pub fn post(&mut self, address: Address, what: What) {
        let told = match what {
            What::Removed | What::Added => self.hotplug(),
            What::CapacityChanged => self.has(VIRTIO_SCSI_F_CHANGE),
            // Subscribed to.
            What::MediaChanged => self.driver(),
        };
        if !told {
            return;
        }
        let bit = 1 << what as u8;
        if let Some(bits) = self.pending.get_mut(&address) {
            *bits = if what == What::Removed { bit } else { *bits | bit };
            return;
        }
        if self.pending.len() >= MAX_PENDING {
            self.overflow();
        }
        self.pending.insert(address, bit);
        self.order.push_back(address);
    }

    /// Lets the driver find out by itself who came and went: it asks every unit it knows whether it is still there, and
    /// scans. Sizes it does not ask for.
    fn overflow(&mut self) {
        let found_by_scan = 1 << What::Removed as u8 | 1 << What::Added as u8;
        self.pending.retain(|_, bits| {
            *bits &= !found_by_scan;
            *bits != 0
        });
        if self.pending.len() >= MAX_PENDING {
            self.pending.clear();
        }
        self.order.retain(|address| self.pending.contains_key(address));
        self.missed = true;
    }

    /// The next event, which is told thereby.
    pub fn next(&mut self) -> Option<Event> {
        if std::mem::take(&mut self.missed) {
            return Some(Event::Missed);
        }
        let address = *self.order.front()?;
        let bits = self.pending.get_mut(&address)?;
        let what = ORDER.into_iter().find(|what| *bits & 1 << *what as u8 != 0)?;
        *bits &= !(1 << what as u8);
        if *bits == 0 {
            self.pending.remove(&address);
            self.order.pop_front();
        }
        Some(Event::Unit(address, what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Lun;

    const BOTH: u64 = 1 << VIRTIO_SCSI_F_HOTPLUG | 1 << VIRTIO_SCSI_F_CHANGE;

    fn at(number: u16) -> Address {
        let lun = Lun::new(number % Lun::COUNT).unwrap();
        let target = (number / Lun::COUNT) as u8;
        Address { target, lun }
    }

    fn events(features: u64) -> Events {
        let mut events = Events::default();
        events.begin(features);
        events
    }

    fn all(events: &mut Events) -> Vec<Event> {
        std::iter::from_fn(|| events.next()).collect()
    }

    #[test]
    fn events_as_linux_reads_them() {
        let bytes = Event::Unit(at(300), What::Removed).to_bytes();
        assert_eq!(bytes, [1, 0, 0, 0, 1, 0, 0x41, 0x2c, 0, 0, 0, 0, 2, 0, 0, 0]);
        let bytes = Event::Unit(at(7), What::CapacityChanged).to_bytes();
        assert_eq!(bytes, [3, 0, 0, 0, 1, 0, 0, 7, 0, 0, 0, 0, 0x2a, 0x09, 0, 0]);
        assert_eq!(Event::Missed.to_bytes()[..4], [0, 0, 0, 0x80]);
    }

    #[test]
    fn units_are_told_of_in_turn_and_each_thing_once() {
        let mut events = events(BOTH);
        for (number, what) in [
            (1, What::Added),
            (2, What::CapacityChanged),
            (1, What::CapacityChanged),
            (1, What::Added),
            (2, What::CapacityChanged),
        ] {
            events.post(at(number), what);
        }
        assert_eq!(
            all(&mut events),
            [
                Event::Unit(at(1), What::Added),
                Event::Unit(at(1), What::CapacityChanged),
                Event::Unit(at(2), What::CapacityChanged),
            ]
        );
        assert!(!events.is_pending());
    }

    #[test]
    fn only_the_last_of_a_unit_that_comes_and_goes_is_told() {
        let mut events = events(BOTH);
        for what in [What::Added, What::CapacityChanged, What::Removed] {
            events.post(at(1), what);
        }
        assert_eq!(all(&mut events), [Event::Unit(at(1), What::Removed)]);
        for what in [What::Removed, What::Added] {
            events.post(at(1), what);
        }
        let both = [What::Removed, What::Added].map(|what| Event::Unit(at(1), what));
        assert_eq!(all(&mut events), both);
    }

    #[test]
    fn nothing_is_told_that_was_not_negotiated() {
        for (features, told) in [
            (0, vec![]),
            (1 << VIRTIO_SCSI_F_HOTPLUG, vec![Event::Unit(at(1), What::Added)]),
            (
                1 << VIRTIO_SCSI_F_CHANGE,
                vec![Event::Unit(at(1), What::CapacityChanged)],
            ),
        ] {
            let mut events = events(features);
            events.post(at(1), What::Added);
            events.post(at(1), What::CapacityChanged);
            assert_eq!(all(&mut events), told);
        }
        let mut events = Events::default();
        events.post(at(1), What::Added);
        assert!(!events.is_pending());
    }

    #[test]
    fn too_much_to_keep_makes_the_driver_look_for_itself() {
        let mut events = events(BOTH);
        events.post(at(5), What::CapacityChanged);
        for number in 0..MAX_PENDING as u16 + 10 {
            events.post(at(number), What::Added);
        }
        let told = all(&mut events);
        assert_eq!(
            told[..2],
            [Event::Missed, Event::Unit(at(5), What::CapacityChanged)]
        );
        assert_eq!(told.len(), 2 + 10);
        // However many sizes change.
        for number in 0..MAX_PENDING as u16 + 1 {
            events.post(at(number), What::CapacityChanged);
        }
        assert_eq!(all(&mut events)[0], Event::Missed);
    }

    #[test]
    fn a_new_driver_starts_afresh() {
        let mut events = events(BOTH);
        events.post(at(1), What::Added);
        events.end();
        assert!(!events.is_pending() && !events.driver());
        events.begin(BOTH);
        assert_eq!(events.next(), None);
    }
}
