//! Events that wait for a buffer on the event queue (virtio 1.2, section 5.6.6.3).
//!
//! They are kept for each logical unit, not in order of time: a driver that is slow to return buffers still gets the
//! events of every unit, and only those that are still true. Memory is bounded. Beyond the bound,
//! [`EVENTS_MISSED`](VIRTIO_SCSI_T_EVENTS_MISSED) makes the driver scan.

use std::collections::{HashMap, HashSet, VecDeque};

use virtio_bindings::virtio_scsi::{
    VIRTIO_SCSI_EVT_RESET_REMOVED, VIRTIO_SCSI_EVT_RESET_RESCAN, VIRTIO_SCSI_F_CHANGE, VIRTIO_SCSI_F_HOTPLUG,
    VIRTIO_SCSI_T_ASYNC_NOTIFY, VIRTIO_SCSI_T_EVENTS_MISSED, VIRTIO_SCSI_T_NO_EVENT,
    VIRTIO_SCSI_T_PARAM_CHANGE, VIRTIO_SCSI_T_TRANSPORT_RESET,
};

use crate::UnitAddress;
use crate::config::EVENT_SIZE;

/// Maximum logical units with pending events.
const MAX_PENDING: usize = 4096;

/// Asynchronous event MEDIA CHANGE.
pub(crate) const MEDIA_CHANGE: u32 = 1 << 4;

/// CAPACITY DATA HAS CHANGED: additional sense code, and its qualifier in the upper byte.
const CAPACITY_CHANGED: u32 = 0x2a | 0x09 << 8;

/// An event of a logical unit, in the order of delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnitEvent {
    Removed,
    Added,
    CapacityChanged,
    MediaChanged,
}

const ORDER: [UnitEvent; 4] = [
    UnitEvent::Removed,
    UnitEvent::Added,
    UnitEvent::CapacityChanged,
    UnitEvent::MediaChanged,
];

/// An event for the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DriverEvent {
    /// An event of a unit.
    Unit(UnitAddress, UnitEvent),
    /// Events were lost.
    Missed,
}

impl DriverEvent {
    /// `struct virtio_scsi_event`.
    pub fn to_bytes(self) -> [u8; EVENT_SIZE] {
        let (event, lun, reason) = match self {
            Self::Missed => (VIRTIO_SCSI_T_NO_EVENT | VIRTIO_SCSI_T_EVENTS_MISSED, [0; 8], 0),
            Self::Unit(address, what) => {
                let (event, reason) = match what {
                    UnitEvent::Removed => (VIRTIO_SCSI_T_TRANSPORT_RESET, VIRTIO_SCSI_EVT_RESET_REMOVED),
                    UnitEvent::Added => (VIRTIO_SCSI_T_TRANSPORT_RESET, VIRTIO_SCSI_EVT_RESET_RESCAN),
                    UnitEvent::CapacityChanged => (VIRTIO_SCSI_T_PARAM_CHANGE, CAPACITY_CHANGED),
                    UnitEvent::MediaChanged => (VIRTIO_SCSI_T_ASYNC_NOTIFY, MEDIA_CHANGE),
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

/// The pending events of all units.
#[derive(Debug, Default)]
pub(crate) struct PendingEvents {
    /// Features of the driver, `None` without a driver.
    features: Option<u64>,
    /// A bit for each [`UnitEvent`]; never 0.
    pending: HashMap<UnitAddress, u8>,
    /// The keys of `pending` in order of arrival.
    order: VecDeque<UnitAddress>,
    missed: bool,
}

impl PendingEvents {
    /// A driver activated the device, or continues after a pause.
    pub fn begin(&mut self, features: u64) {
        self.features = Some(features);
    }

    /// The driver is gone. The next one scans.
    pub fn end(&mut self) {
        *self = Self::default();
    }

    fn has(&self, bit: u32) -> bool {
        self.features.is_some_and(|features| features & 1 << bit != 0)
    }

    /// True if there is a driver that gets events of hotplug.
    pub fn hotplug(&self) -> bool {
        self.has(VIRTIO_SCSI_F_HOTPLUG)
    }

    /// True if there is a driver.
    pub fn driver(&self) -> bool {
        self.features.is_some()
    }

    /// True if an event is pending.
    pub fn is_pending(&self) -> bool {
        self.missed || !self.order.is_empty()
    }

    /// Adds an event if the driver negotiated it. A removal replaces the other pending events of its unit.
    pub fn post(&mut self, address: UnitAddress, what: UnitEvent) {
        let is_negotiated = match what {
            UnitEvent::Removed | UnitEvent::Added => self.hotplug(),
            UnitEvent::CapacityChanged => self.has(VIRTIO_SCSI_F_CHANGE),
            // The driver subscribed to it.
            UnitEvent::MediaChanged => self.driver(),
        };
        if !is_negotiated {
            return;
        }
        let bit = 1 << what as u8;
        if let Some(bits) = self.pending.get_mut(&address) {
            *bits = if what == UnitEvent::Removed {
                bit
            } else {
                *bits | bit
            };
            return;
        }
        if self.pending.len() >= MAX_PENDING {
            self.overflow();
        }
        self.pending.insert(address, bit);
        self.order.push_back(address);
    }

    /// The pending events in order, a bit for each [`UnitEvent`], and whether events were lost.
    pub fn save(&self) -> (Vec<(UnitAddress, u8)>, bool) {
        let bits = |address: &UnitAddress| self.pending.get(address).copied().unwrap_or_default();
        let pending = self.order.iter().map(|address| (*address, bits(address)));
        (pending.collect(), self.missed)
    }

    /// True if these can be pending events.
    pub fn are_possible(pending: &[(UnitAddress, u8)]) -> bool {
        let known = (1 << ORDER.len()) - 1;
        let addresses: HashSet<_> = pending.iter().map(|(address, _)| address).collect();
        let each_once = addresses.len() == pending.len();
        each_once
            && pending.len() <= MAX_PENDING
            && pending.iter().all(|(_, bits)| (1..=known).contains(bits))
    }

    /// Restores the result of [`PendingEvents::save`], for which [`PendingEvents::are_possible`] is true.
    pub fn restore(&mut self, pending: Vec<(UnitAddress, u8)>, missed: bool) {
        self.order = pending.iter().map(|(address, _)| *address).collect();
        self.pending = pending.into_iter().collect();
        self.missed = missed;
    }

    /// Replaces pending hotplug events with EVENTS_MISSED: the driver asks every unit if it still exists, and scans. It
    /// does not ask for sizes.
    fn overflow(&mut self) {
        let found_by_scan = 1 << UnitEvent::Removed as u8 | 1 << UnitEvent::Added as u8;
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

    /// Takes the next event.
    pub fn next(&mut self) -> Option<DriverEvent> {
        if std::mem::take(&mut self.missed) {
            return Some(DriverEvent::Missed);
        }
        let address = *self.order.front()?;
        let bits = self.pending.get_mut(&address)?;
        let what = ORDER.into_iter().find(|what| *bits & 1 << *what as u8 != 0)?;
        *bits &= !(1 << what as u8);
        if *bits == 0 {
            self.pending.remove(&address);
            self.order.pop_front();
        }
        Some(DriverEvent::Unit(address, what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Lun;

    const BOTH: u64 = 1 << VIRTIO_SCSI_F_HOTPLUG | 1 << VIRTIO_SCSI_F_CHANGE;

    fn at(number: u16) -> UnitAddress {
        let lun = Lun::new(number % Lun::COUNT).unwrap();
        let target = (number / Lun::COUNT) as u8;
        UnitAddress { target, lun }
    }

    fn events(features: u64) -> PendingEvents {
        let mut events = PendingEvents::default();
        events.begin(features);
        events
    }

    fn all(events: &mut PendingEvents) -> Vec<DriverEvent> {
        std::iter::from_fn(|| events.next()).collect()
    }

    #[test]
    fn events_as_linux_reads_them() {
        let bytes = DriverEvent::Unit(at(300), UnitEvent::Removed).to_bytes();
        assert_eq!(bytes, [1, 0, 0, 0, 1, 0, 0x41, 0x2c, 0, 0, 0, 0, 2, 0, 0, 0]);
        let bytes = DriverEvent::Unit(at(7), UnitEvent::CapacityChanged).to_bytes();
        assert_eq!(bytes, [3, 0, 0, 0, 1, 0, 0, 7, 0, 0, 0, 0, 0x2a, 0x09, 0, 0]);
        assert_eq!(DriverEvent::Missed.to_bytes()[..4], [0, 0, 0, 0x80]);
    }

    #[test]
    fn units_take_turns_and_each_event_is_sent_once() {
        let mut events = events(BOTH);
        for (number, what) in [
            (1, UnitEvent::Added),
            (2, UnitEvent::CapacityChanged),
            (1, UnitEvent::CapacityChanged),
            (1, UnitEvent::Added),
            (2, UnitEvent::CapacityChanged),
        ] {
            events.post(at(number), what);
        }
        assert_eq!(
            all(&mut events),
            [
                DriverEvent::Unit(at(1), UnitEvent::Added),
                DriverEvent::Unit(at(1), UnitEvent::CapacityChanged),
                DriverEvent::Unit(at(2), UnitEvent::CapacityChanged),
            ]
        );
        assert!(!events.is_pending());
    }

    #[test]
    fn only_the_last_hotplug_event_of_a_unit_is_sent() {
        let mut events = events(BOTH);
        for what in [UnitEvent::Added, UnitEvent::CapacityChanged, UnitEvent::Removed] {
            events.post(at(1), what);
        }
        assert_eq!(all(&mut events), [DriverEvent::Unit(at(1), UnitEvent::Removed)]);
        for what in [UnitEvent::Removed, UnitEvent::Added] {
            events.post(at(1), what);
        }
        let both = [UnitEvent::Removed, UnitEvent::Added].map(|what| DriverEvent::Unit(at(1), what));
        assert_eq!(all(&mut events), both);
    }

    #[test]
    fn events_that_were_not_negotiated_are_not_sent() {
        for (features, expected) in [
            (0, vec![]),
            (
                1 << VIRTIO_SCSI_F_HOTPLUG,
                vec![DriverEvent::Unit(at(1), UnitEvent::Added)],
            ),
            (
                1 << VIRTIO_SCSI_F_CHANGE,
                vec![DriverEvent::Unit(at(1), UnitEvent::CapacityChanged)],
            ),
        ] {
            let mut events = events(features);
            events.post(at(1), UnitEvent::Added);
            events.post(at(1), UnitEvent::CapacityChanged);
            assert_eq!(all(&mut events), expected);
        }
        let mut events = PendingEvents::default();
        events.post(at(1), UnitEvent::Added);
        assert!(!events.is_pending());
    }

    #[test]
    fn too_many_events_become_events_missed() {
        let mut events = events(BOTH);
        events.post(at(5), UnitEvent::CapacityChanged);
        for number in 0..MAX_PENDING as u16 + 10 {
            events.post(at(number), UnitEvent::Added);
        }
        let pending = all(&mut events);
        assert_eq!(
            pending[..2],
            [
                DriverEvent::Missed,
                DriverEvent::Unit(at(5), UnitEvent::CapacityChanged)
            ]
        );
        assert_eq!(pending.len(), 2 + 10);
        // For any number of changed sizes.
        for number in 0..MAX_PENDING as u16 + 1 {
            events.post(at(number), UnitEvent::CapacityChanged);
        }
        assert_eq!(all(&mut events)[0], DriverEvent::Missed);
    }

    #[test]
    fn a_new_driver_has_no_pending_events() {
        let mut events = events(BOTH);
        events.post(at(1), UnitEvent::Added);
        events.end();
        assert!(!events.is_pending() && !events.driver());
        events.begin(BOTH);
        assert_eq!(events.next(), None);
    }
}
