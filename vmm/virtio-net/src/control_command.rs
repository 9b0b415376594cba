//! Parser of control queue commands (virtio 1.2, section 5.1.6.5).

use husk_devices::GuestMemMmap;
use husk_devices::virtio::chain::Segment;
use virtio_bindings::virtio_net as net;
use vm_memory::{Address, Bytes};

use crate::filter::{Mode, Table};
use crate::mac::{MAC_TABLE_SIZE, Mac};

/// A command of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ControlCommand {
    /// Section 5.1.6.5.1.
    Mode(Mode, bool),
    /// Section 5.1.6.5.2: the addresses to receive beside the device's own, not multicast and multicast.
    Tables(Table, Table),
    /// Section 5.1.6.5.2: the device's own address.
    Address(Mac),
    /// Section 5.1.6.5.3, of a VLAN below 4096.
    Vlan(u16, bool),
    /// Section 5.1.6.5.4.
    Announced,
    /// Section 5.1.6.5.5.
    Pairs(u16),
    /// Section 5.1.6.5.8, by feature bit.
    Offloads(u64),
}

/// The device-readable bytes of a chain, independent of its descriptor boundaries (section 2.7.4.1).
#[derive(Debug)]
pub(crate) struct Payload<'a> {
    mem: &'a GuestMemMmap,
    segments: &'a [Segment],
    /// Bytes consumed of the first segment.
    taken: u32,
}

impl<'a> Payload<'a> {
    pub fn new(mem: &'a GuestMemMmap, segments: &'a [Segment]) -> Self {
        Self {
            mem,
            segments,
            taken: 0,
        }
    }

    /// Consumes the next `len` bytes and calls `piece` with the offset and range of each piece. Returns `None` if
    /// there are fewer.
    fn advance(&mut self, len: u64, mut piece: impl FnMut(u64, Segment) -> Option<()>) -> Option<()> {
        let mut done = 0;
        while done < len {
            let (first, rest) = self.segments.split_first()?;
            let here = u64::from(first.len - self.taken).min(len - done) as u32;
            let address = first.address.checked_add(self.taken.into())?;
            piece(done, Segment { address, len: here })?;
            done += u64::from(here);
            self.taken += here;
            if self.taken == first.len {
                (self.segments, self.taken) = (rest, 0);
            }
        }
        Some(())
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        let mem = self.mem;
        self.advance(N as u64, |at, piece| {
            let place = &mut bytes[at as usize..][..piece.len as usize];
            mem.read_slice(place, piece.address).ok()
        })?;
        Some(bytes)
    }

    fn word(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    /// `struct virtio_net_ctrl_mac`. Reads only as many addresses as the table keeps.
    fn table(&mut self) -> Option<Table> {
        let entries = u32::from_le_bytes(self.take()?) as usize;
        let kept = entries.min(MAC_TABLE_SIZE);
        let addresses = (0..kept).map(|_| self.take()).collect::<Option<_>>()?;
        self.advance((entries - kept) as u64 * 6, |_, _| Some(()))?;
        Some(Table::new(addresses, kept < entries))
    }
}

/// Parses a command. Returns `None` if it is incomplete or the negotiated `features` do not allow it. Extra bytes are
/// ignored.
pub(crate) fn parse(mut payload: Payload<'_>, features: u64) -> Option<ControlCommand> {
    let [class, command] = payload.take()?.map(u32::from);
    let has = |bit: u32| features & 1 << bit != 0;
    match (class, command) {
        (net::VIRTIO_NET_CTRL_RX, mode) => {
            let (mode, feature) = match mode {
                net::VIRTIO_NET_CTRL_RX_PROMISC => (Mode::Promiscuous, net::VIRTIO_NET_F_CTRL_RX),
                net::VIRTIO_NET_CTRL_RX_ALLMULTI => (Mode::AllMulticast, net::VIRTIO_NET_F_CTRL_RX),
                net::VIRTIO_NET_CTRL_RX_ALLUNI => (Mode::AllUnicast, net::VIRTIO_NET_F_CTRL_RX_EXTRA),
                net::VIRTIO_NET_CTRL_RX_NOMULTI => (Mode::NoMulticast, net::VIRTIO_NET_F_CTRL_RX_EXTRA),
                net::VIRTIO_NET_CTRL_RX_NOUNI => (Mode::NoUnicast, net::VIRTIO_NET_F_CTRL_RX_EXTRA),
                net::VIRTIO_NET_CTRL_RX_NOBCAST => (Mode::NoBroadcast, net::VIRTIO_NET_F_CTRL_RX_EXTRA),
                _ => return None,
            };
            let [on] = payload.take()?;
            has(feature).then_some(ControlCommand::Mode(mode, on != 0))
        }
        (net::VIRTIO_NET_CTRL_MAC, net::VIRTIO_NET_CTRL_MAC_TABLE_SET) => {
            let tables = (payload.table()?, payload.table()?);
            has(net::VIRTIO_NET_F_CTRL_RX).then_some(ControlCommand::Tables(tables.0, tables.1))
        }
        (net::VIRTIO_NET_CTRL_MAC, net::VIRTIO_NET_CTRL_MAC_ADDR_SET) => {
            let address = payload.take()?;
            has(net::VIRTIO_NET_F_CTRL_MAC_ADDR).then_some(ControlCommand::Address(address))
        }
        (
            net::VIRTIO_NET_CTRL_VLAN,
            command @ (net::VIRTIO_NET_CTRL_VLAN_ADD | net::VIRTIO_NET_CTRL_VLAN_DEL),
        ) => {
            let id = payload.word().filter(|id| *id < 4096)?;
            let add = command == net::VIRTIO_NET_CTRL_VLAN_ADD;
            has(net::VIRTIO_NET_F_CTRL_VLAN).then_some(ControlCommand::Vlan(id, add))
        }
        (net::VIRTIO_NET_CTRL_ANNOUNCE, net::VIRTIO_NET_CTRL_ANNOUNCE_ACK) => {
            has(net::VIRTIO_NET_F_GUEST_ANNOUNCE).then_some(ControlCommand::Announced)
        }
        (net::VIRTIO_NET_CTRL_MQ, net::VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET) => {
            let pairs = payload.word()?;
            has(net::VIRTIO_NET_F_MQ).then_some(ControlCommand::Pairs(pairs))
        }
        (net::VIRTIO_NET_CTRL_GUEST_OFFLOADS, net::VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET) => {
            let offloads = u64::from_le_bytes(payload.take()?);
            has(net::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS).then_some(ControlCommand::Offloads(offloads))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use husk_devices::virtio::testing::memory;
    use proptest::prelude::*;
    use vm_memory::{GuestAddress, GuestAddressSpace};

    use super::*;

    const END: u64 = 0x10_0000;

    /// Parses `bytes` in pieces of `size`.
    fn parse_in(bytes: &[u8], size: usize, features: u64) -> Option<ControlCommand> {
        let mem = memory(&[(0, END as usize)]);
        let mut segments = Vec::new();
        for (at, piece) in (1..).zip(bytes.chunks(size)) {
            let address = GuestAddress(at * 0x100);
            mem.memory().write_slice(piece, address).unwrap();
            segments.push(Segment { address, len: 0 });
            segments.push(Segment {
                address,
                len: piece.len() as u32,
            });
        }
        parse(Payload::new(&mem.memory(), &segments), features)
    }

    #[test]
    fn commands_are_read_whatever_their_pieces() {
        let mac = [2, 0, 0, 0, 0, 9];
        let table = [&[1, 0, 1, 0, 0, 0][..], &mac, &[0; 4]].concat();
        let tables = ControlCommand::Tables(Table::new(vec![mac], false), Table::default());
        for (bytes, expected) in [
            (&[0, 0, 1][..], ControlCommand::Mode(Mode::Promiscuous, true)),
            (&[0, 5, 0], ControlCommand::Mode(Mode::NoBroadcast, false)),
            (&table, tables),
            (&[1, 1, 2, 0, 0, 0, 0, 9], ControlCommand::Address(mac)),
            (&[2, 0, 0xff, 0x0f], ControlCommand::Vlan(4095, true)),
            (&[2, 1, 7, 0], ControlCommand::Vlan(7, false)),
            (&[3, 0], ControlCommand::Announced),
            (&[4, 0, 2, 1], ControlCommand::Pairs(258)),
            (
                &[5, 0, 2, 0, 0, 0, 0, 0, 0, 1],
                ControlCommand::Offloads(1 << 56 | 2),
            ),
        ] {
            for size in [1, 2, 3, 100] {
                assert_eq!(parse_in(bytes, size, u64::MAX), Some(expected.clone()));
                assert_eq!(parse_in(&bytes[..bytes.len() - 1], size, u64::MAX), None);
                assert_eq!(parse_in(bytes, size, 0), None, "needs a feature");
            }
        }
        for unknown in [&[0, 6, 1][..], &[6, 0, 1, 1], &[4, 1, 1, 0], &[2, 0, 0, 0x10]] {
            assert_eq!(parse_in(unknown, 100, u64::MAX), None);
        }
    }

    #[test]
    fn a_table_longer_than_is_kept_overflows() {
        let entries = MAC_TABLE_SIZE as u32 + 1;
        let table = [&entries.to_le_bytes()[..], &vec![2; entries as usize * 6]].concat();
        let bytes = [&[1, 0][..], &table, &[0; 4]].concat();
        let overflown = Table::new(vec![[2; 6]; MAC_TABLE_SIZE], true);
        let expected = Some(ControlCommand::Tables(overflown, Table::default()));
        assert_eq!(parse_in(&bytes, 100, u64::MAX), expected);
        assert_eq!(
            parse_in(&[1, 0, 0xff, 0xff, 0xff, 0xff, 0, 0], 100, u64::MAX),
            None
        );
    }

    proptest! {
        #[test]
        fn nothing_a_driver_sends_is_trusted(
            bytes in prop::collection::vec(any::<u8>(), 0..600),
            class in 0u8..7,
            command in 0u8..7,
            size in 1usize..64,
            features: u64,
        ) {
            let bytes = [&[class, command][..], &bytes].concat();
            if let Some(ControlCommand::Vlan(id, _)) = parse_in(&bytes, size, features) {
                prop_assert!(id < 4096);
            }
        }

        #[test]
        fn segments_outside_of_memory_are_no_command(
            segments in prop::collection::vec((any::<u64>(), any::<u32>()), 0..5),
            near in 0..2 * END,
        ) {
            let mem = memory(&[(0, END as usize)]);
            let mut segments: Vec<_> = segments.into_iter()
                .map(|(address, len)| Segment { address: GuestAddress(address), len })
                .collect();
            segments.push(Segment { address: GuestAddress(near), len: u32::MAX });
            let _ = parse(Payload::new(&mem.memory(), &segments), u64::MAX);
        }
    }
}
