//! The receive filter (virtio 1.2, sections 5.1.6.5.1 to 5.1.6.5.3).

use crate::header::ETHERNET_LEN;
use crate::mac::Mac;
use crate::tap::TapFilter;

const BROADCAST: Mac = [0xff; 6];

const ETHERTYPE_VLAN: [u8; 2] = [0x81, 0x00];

/// Addresses of one kind, multicast or not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Table {
    /// Sorted.
    pub addresses: Vec<Mac>,
    /// The driver set more addresses than the table keeps.
    pub overflow: bool,
}

impl Table {
    pub fn new(mut addresses: Vec<Mac>, overflow: bool) -> Self {
        addresses.sort_unstable();
        Self { addresses, overflow }
    }

    fn has(&self, address: &Mac) -> bool {
        self.overflow || self.addresses.binary_search(address).is_ok()
    }
}

/// Receive modes that the driver switches on and off (section 5.1.6.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Promiscuous,
    AllMulticast,
    AllUnicast,
    NoMulticast,
    NoUnicast,
    NoBroadcast,
}

impl Mode {
    /// The bits of all modes.
    pub const ALL: u8 = (1 << (Self::NoBroadcast as u8 + 1)) - 1;

    fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// The VLANs whose frames are received, a bit for each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Vlans(pub [u64; 64]);

impl Vlans {
    fn place(id: u16) -> (usize, u64) {
        (usize::from(id >> 6) & 63, 1 << (id & 63))
    }

    fn has(&self, id: u16) -> bool {
        let (word, bit) = Self::place(id);
        self.0[word] & bit != 0
    }
}

/// The receive filter of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Filter {
    pub mac: Mac,
    /// A bit for each [`Mode`].
    pub modes: u8,
    pub unicast: Table,
    pub multicast: Table,
    /// `None` if VLANs are not filtered.
    pub vlans: Option<Box<Vlans>>,
}

impl Filter {
    /// The initial filter: promiscuous, with no VLAN if the driver can add VLANs.
    pub fn new(mac: Mac, filters_vlans: bool) -> Self {
        Self {
            mac,
            modes: Mode::Promiscuous.bit(),
            unicast: Table::default(),
            multicast: Table::default(),
            vlans: filters_vlans.then(|| Box::new(Vlans([0; 64]))),
        }
    }

    pub fn set_mac(&mut self, mac: Mac) {
        self.mac = mac;
    }

    pub fn set_mode(&mut self, mode: Mode, on: bool) {
        self.modes = if on {
            self.modes | mode.bit()
        } else {
            self.modes & !mode.bit()
        };
    }

    pub fn set_tables(&mut self, unicast: Table, multicast: Table) {
        (self.unicast, self.multicast) = (unicast, multicast);
    }

    /// Adds or removes the VLAN `id`, below 4096.
    pub fn set_vlan(&mut self, id: u16, on: bool) {
        let (word, bit) = Vlans::place(id);
        if let Some(vlans) = &mut self.vlans {
            if on {
                vlans.0[word] |= bit;
            } else {
                vlans.0[word] &= !bit;
            }
        }
    }

    fn is(&self, mode: Mode) -> bool {
        self.modes & mode.bit() != 0
    }

    /// True if every frame passes.
    pub fn is_open(&self) -> bool {
        self.is(Mode::Promiscuous)
    }

    /// True if a frame that starts with `frame` is received. 18 bytes suffice.
    pub fn passes(&self, frame: &[u8]) -> bool {
        if self.is_open() {
            return true;
        }
        let Some((address, rest)) = frame.split_first_chunk::<6>() else {
            return false;
        };
        if frame.len() < ETHERNET_LEN || !self.passes_vlan(&rest[6..]) {
            return false;
        }
        if *address == BROADCAST {
            !self.is(Mode::NoBroadcast)
        } else if address[0] & 1 != 0 {
            !self.is(Mode::NoMulticast) && (self.is(Mode::AllMulticast) || self.multicast.has(address))
        } else {
            let ours = *address == self.mac || self.is(Mode::AllUnicast) || self.unicast.has(address);
            !self.is(Mode::NoUnicast) && ours
        }
    }

    /// `rest` starts at the Ethernet type. A tag with VLAN 0 carries only a priority.
    fn passes_vlan(&self, rest: &[u8]) -> bool {
        match (&self.vlans, rest) {
            (Some(vlans), [a, b, high, low, ..]) if [*a, *b] == ETHERTYPE_VLAN => {
                let id = u16::from_be_bytes([*high, *low]) & 0xfff;
                id == 0 || vlans.has(id)
            }
            _ => true,
        }
    }

    /// The part of the filter that the tap can apply. It passes every frame that this filter passes, and perhaps
    /// more.
    pub fn for_tap(&self) -> TapFilter {
        if self.is_open() || self.is(Mode::AllUnicast) || self.unicast.overflow {
            return TapFilter::default();
        }
        let unicast = std::iter::once(self.mac).chain(self.unicast.addresses.iter().copied());
        let exact: Vec<_> = std::iter::once(BROADCAST).chain(unicast).collect();
        TapFilter::new(
            &exact,
            &self.multicast.addresses,
            self.is(Mode::AllMulticast) || self.multicast.overflow,
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAC: Mac = [0x02, 0, 0, 0, 0, 1];
    const OTHER: Mac = [0x02, 0, 0, 0, 0, 2];
    const GROUP: Mac = [0x33, 0x33, 0, 0, 0, 1];

    fn frame(to: Mac, vlan: Option<u16>) -> Vec<u8> {
        let mut frame = [to, [4; 6]].concat();
        if let Some(tag) = vlan {
            frame.extend([0x81, 0, (tag >> 8) as u8, tag as u8]);
        }
        frame.extend([8, 0, 0, 0]);
        frame
    }

    fn closed() -> Filter {
        let mut filter = Filter::new(MAC, true);
        filter.set_mode(Mode::Promiscuous, false);
        filter
    }

    fn received(filter: &Filter) -> [bool; 4] {
        [MAC, OTHER, GROUP, BROADCAST].map(|to| filter.passes(&frame(to, None)))
    }

    #[test]
    fn a_new_driver_receives_everything() {
        let filter = Filter::new(MAC, true);
        assert_eq!(received(&filter), [true; 4]);
        assert!(filter.passes(&frame(OTHER, Some(7))));
    }

    #[test]
    fn modes_and_tables_choose() {
        assert_eq!(received(&closed()), [true, false, false, true]);
        for (mode, expected) in [
            (Mode::Promiscuous, [true; 4]),
            (Mode::AllMulticast, [true, false, true, true]),
            (Mode::AllUnicast, [true, true, false, true]),
            (Mode::NoBroadcast, [true, false, false, false]),
            (Mode::NoUnicast, [false, false, false, true]),
        ] {
            let mut filter = closed();
            filter.set_mode(mode, true);
            assert_eq!(received(&filter), expected, "{mode:?}");
            filter.set_mode(mode, false);
            assert_eq!(filter, closed());
        }
        let mut filter = closed();
        filter.set_tables(Table::new(vec![OTHER], false), Table::new(vec![GROUP], false));
        assert_eq!(received(&filter), [true; 4]);
        filter.set_mode(Mode::NoMulticast, true);
        assert_eq!(received(&filter), [true, true, false, true]);
        filter.set_mac(GROUP);
        filter.set_tables(Table::new(vec![], true), Table::new(vec![], true));
        filter.set_mode(Mode::NoMulticast, false);
        assert_eq!(received(&filter), [true; 4]);
    }

    #[test]
    fn vlans_are_received_as_they_are_added() {
        let mut filter = closed();
        for id in [0, 1, 63, 64, 4095] {
            assert_eq!(filter.passes(&frame(MAC, Some(id))), id == 0);
            filter.set_vlan(id, true);
            assert!(filter.passes(&frame(MAC, Some(0xf000 | id))));
            filter.set_vlan(id, false);
        }
        assert_eq!(filter, closed());
    }

    #[test]
    fn a_truncated_frame_is_dropped() {
        assert!(!closed().passes(&frame(MAC, None)[..13]));
        assert!(!closed().passes(&[]));
    }

    proptest! {
        #[test]
        fn the_tap_drops_nothing_that_is_wanted(
            modes in 0u8..64,
            tables: (Vec<Mac>, Vec<Mac>),
            overflows: (bool, bool),
            to: Mac,
            pick: prop::sample::Index,
        ) {
            let mut filter = Filter::new(MAC, false);
            filter.modes = modes;
            let known: Vec<_> = [MAC, BROADCAST, to].into_iter()
                .chain(tables.0.iter().copied())
                .chain(tables.1.iter().copied())
                .collect();
            filter.set_tables(Table::new(tables.0, overflows.0), Table::new(tables.1, overflows.1));
            let to = known[pick.index(known.len())];
            if filter.passes(&frame(to, None)) {
                prop_assert!(filter.for_tap().passes(&to), "{:?}", filter.for_tap());
            }
        }
    }
}
