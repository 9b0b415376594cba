//! Driver changes, pauses, and drivers that violate the limits.

mod guest;

use std::time::Duration;

use guest::*;
use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::testing::{Driver, INDIRECT, NEXT, WRITE, wait_for};
use husk_disk::{DiskOptions, EngineKind};
use proptest::prelude::*;

const KINDS: [EngineKind; 2] = [EngineKind::Uring, EngineKind::Threads];

fn guest(kind: EngineKind) -> Guest {
    Guest::new(kind, true)
}

#[test]
fn a_second_driver_can_take_over() {
    for kind in KINDS {
        let mut guest = guest(kind);
        for round in 0..5u64 {
            // Leave with requests in flight.
            for i in 0..20 {
                guest.add(OUT, i * 8, &[(DATA + i * 4096, 4096, 0)]);
            }
            guest.driver.kick();
            guest.connect(F_FLUSH);
            guest.blk.reset();
            let before = guest.get(STATUSES, 4096);
            std::thread::sleep(Duration::from_millis(5));
            assert_eq!(guest.get(STATUSES, 4096), before, "memory is the guest's again");
            guest.connect(F_FLUSH);
            assert_eq!(guest.request(IN, round, &[(DATA, 512, WRITE)]).0, OK);
        }
    }
}

#[test]
fn a_pause_loses_nothing() {
    for kind in KINDS {
        let mut guest = guest(kind);
        let mut heads = Vec::new();
        for i in 0..40u64 {
            let bytes = pattern(4096, i as u8);
            guest.put(DATA + i * 4096, &bytes);
            heads.push(guest.add(OUT, i * 8, &[(DATA + i * 4096, 4096, 0)]));
            if i == 10 {
                guest.driver.kick();
            }
            if i % 13 == 12 {
                let queues = guest.blk.quiesce().unwrap();
                assert!(guest.blk.quiesce().is_none());
                guest.activate(F_FLUSH, queues);
            }
        }
        guest.driver.kick();
        let mut used: Vec<u16> = (0..40).map(|_| guest.driver.wait().0).collect();
        used.sort_unstable();
        let mut expected: Vec<u16> = heads.iter().map(|(head, _)| *head).collect();
        expected.sort_unstable();
        assert_eq!((used, guest.driver.used()), (expected, None));
        for (i, (_, status)) in (0..40u64).zip(heads) {
            assert_eq!(
                (guest.get(status, 1)[0], guest.disk(i * 4096, 4096)),
                (OK, pattern(4096, i as u8))
            );
        }
    }
}

#[test]
fn every_queue_has_its_worker() {
    let mut guest = Guest::with(EngineKind::Auto, 3, DiskOptions::default(), false);
    guest.blk.reset();
    let mut drivers =
        [2, 0].map(|index| Driver::new(&guest.mem, index, 16, 0x1000 + 0x1000 * u64::from(index)));
    guest.put(0x1000, &[0; 0x3000]);
    let queues = drivers.iter().map(|driver| driver.queue(false)).collect();
    guest.activate(F_FLUSH, queues);
    for driver in &mut drivers {
        let (header, status) = guest.frame(IN, 9);
        driver.add(&[header, (DATA, 512, WRITE), status]);
        driver.kick();
        assert_eq!(driver.wait().1, 513);
        assert_eq!(guest.get(DATA, 512), guest.disk(9 * 512, 512));
    }
    let mut indices: Vec<_> = guest
        .blk
        .quiesce()
        .unwrap()
        .iter()
        .map(|queue| queue.index)
        .collect();
    indices.sort_unstable();
    assert_eq!(indices, [0, 2]);
}

#[test]
fn queues_share_a_disk_under_load() {
    for kind in KINDS {
        let mut guest = Guest::with(kind, 4, DiskOptions::default(), true);
        guest.blk.reset();
        guest.put(0x1000, &[0; 0x4000]);
        let mut drivers: Vec<_> = (0..4)
            .map(|index| Driver::new(&guest.mem, index, 32, 0x1000 + 0x1000 * u64::from(index)))
            .collect();
        let queues = drivers.iter().map(|driver| driver.queue(true)).collect();
        guest.activate(F_FLUSH, queues);
        for round in 0..20u64 {
            for (index, driver) in (0u64..).zip(&mut drivers) {
                for slot in 0..8 {
                    let at = DATA + (index * 8 + slot) * 4096;
                    let sector = (index * 8 + slot) * 8;
                    guest.put(at, &pattern(4096, (round ^ sector) as u8));
                    let (header, status) = guest.frame(OUT, sector);
                    driver.add(&[header, (at, 4096, 0), status]);
                }
                driver.kick();
            }
            for driver in &mut drivers {
                for _ in 0..8 {
                    assert_eq!(driver.wait().1, 1);
                }
            }
            if round % 7 == 6 {
                let queues = guest.blk.quiesce().unwrap();
                guest.activate(F_FLUSH, queues);
            }
            for sector in (0..256).step_by(8) {
                let expected = pattern(4096, (round ^ sector) as u8);
                assert_eq!(guest.disk(sector * 512, 4096), expected);
            }
        }
    }
}

/// A disk that stops, because its image is truncated for a while.
fn short(kind: EngineKind) -> (Guest, u16, u64) {
    let mut guest = Guest::with(kind, 1, DiskOptions::default(), true);
    guest.file.set_len(4096).unwrap();
    let (head, status) = guest.add(IN, 8, &[(DATA, 4096, WRITE)]);
    guest.driver.kick();
    wait_for("the owner's call", || guest.stops.lock().unwrap().pop());
    // The others go on.
    assert_eq!(guest.request(IN, 0, &[(DATA, 4096, WRITE)]).0, OK);
    assert_eq!(guest.get(status, 1)[0], 0xff);
    (guest, head, status)
}

#[test]
fn a_held_request_continues_after_a_pause() {
    for kind in KINDS {
        let (mut guest, head, status) = short(kind);
        for _ in 0..2 {
            let queues = guest.blk.quiesce().unwrap();
            guest.activate(F_FLUSH, queues);
            wait_for("another call", || guest.stops.lock().unwrap().pop());
        }
        let queues = guest.blk.quiesce().unwrap();
        assert_eq!(guest.driver.used(), None);
        guest.file.set_len(SECTORS * 512).unwrap();
        guest.activate(F_FLUSH, queues);
        assert_eq!(guest.driver.wait(), (head, 4097));
        assert_eq!(
            (guest.get(status, 1)[0], guest.get(DATA, 4096)),
            (OK, vec![0; 4096])
        );
        assert!(guest.stops.lock().unwrap().is_empty());
    }
}

#[test]
fn a_reset_forgets_a_held_request() {
    for kind in KINDS {
        for paused in [false, true] {
            let (mut guest, ..) = short(kind);
            if paused {
                guest.blk.quiesce().unwrap();
            }
            guest.connect(F_FLUSH);
            guest.file.set_len(SECTORS * 512).unwrap();
            for _ in 0..3 {
                assert_eq!(guest.request(IN, 8, &[(DATA, 512, WRITE)]), (OK, 513));
            }
            assert_eq!(guest.driver.used(), None);
            // The disk stops again.
            guest.file.set_len(4096).unwrap();
            guest.add(IN, 8, &[(DATA, 512, WRITE)]);
            guest.driver.kick();
            wait_for("the owner's call", || guest.stops.lock().unwrap().pop());
        }
    }
}

#[test]
fn a_new_size_reaches_driver_and_workers() {
    for kind in KINDS {
        let mut guest = guest(kind);
        let capacity = |guest: &Guest| {
            let mut bytes = [0; 8];
            guest.blk.read_config(0, &mut bytes);
            u64::from_le_bytes(bytes)
        };
        assert_eq!(capacity(&guest), SECTORS);
        guest.file.set_len(2 * SECTORS * 512).unwrap();
        assert_eq!(guest.request(IN, SECTORS, &[(DATA, 512, WRITE)]).0, IOERR);
        assert_eq!(guest.handle.resize().unwrap(), 2 * SECTORS * 512);
        assert_eq!((capacity(&guest), guest.interrupts.config()), (2 * SECTORS, 1));
        assert_eq!(guest.request(IN, SECTORS, &[(DATA, 512, WRITE)]).0, OK);
        guest.file.set_len(4096).unwrap();
        guest.handle.resize().unwrap();
        assert_eq!((capacity(&guest), guest.interrupts.config()), (8, 2));
        assert_eq!(guest.request(IN, 8, &[(DATA, 512, WRITE)]).0, IOERR);
        assert_eq!(guest.request(IN, 7, &[(DATA, 512, WRITE)]).0, OK);
        guest.file.set_len(0).unwrap();
        assert!(guest.handle.resize().is_err());
        assert_eq!((capacity(&guest), guest.interrupts.config()), (8, 2));
        // There is no driver to notify.
        guest.blk.reset();
        guest.file.set_len(8192).unwrap();
        guest.handle.resize().unwrap();
        assert_eq!((capacity(&guest), guest.interrupts.config()), (16, 2));
    }
}

/// Does `damage`; the device must ask for a reset, and serve the next driver.
fn breaks(what: &str, damage: impl Fn(&mut Guest)) {
    let mut guest = guest(EngineKind::Auto);
    assert_eq!(guest.request(IN, 0, &[(DATA, 512, WRITE)]).0, OK);
    damage(&mut guest);
    guest.driver.kick();
    wait_for(what, || guest.interrupts.reset());
    guest.connect(F_FLUSH);
    assert_eq!(guest.request(IN, 1, &[(DATA, 512, WRITE)]), (OK, 513), "{what}");
    assert_eq!(guest.get(DATA, 512), guest.disk(512, 512));
}

#[test]
fn a_chain_without_room_for_a_status_sets_device_needs_reset() {
    breaks("no writable descriptor", |guest| {
        guest.driver.add(&[(HEADERS, 16, 0)]);
    });
    breaks("an empty status", |guest| {
        guest.driver.add(&[(HEADERS, 16, 0), (STATUSES, 0, WRITE)]);
    });
    for address in [1 << 40, END as u64, BEYOND - 1, u64::MAX] {
        breaks("a status outside of memory", |guest| {
            guest.driver.add(&[(HEADERS, 16, 0), (address, 1, WRITE)]);
        });
    }
    breaks("a status past the last address", |guest| {
        guest.driver.add(&[(HEADERS, 16, 0), (u64::MAX - 1, 16, WRITE)]);
    });
    breaks("readable after writable", |guest| {
        guest.driver.add(&[(STATUSES, 1, WRITE), (HEADERS, 16, 0)]);
    });
}

#[test]
fn a_broken_ring_sets_device_needs_reset() {
    breaks("a loop", |guest| {
        guest.driver.put(100, (HEADERS, 16, NEXT), 101);
        guest.driver.put(101, (STATUSES, 1, NEXT | WRITE), 101);
        guest.driver.offer(100);
    });
    breaks("a head outside of the table", |guest| {
        guest.driver.offer(QUEUE_SIZE)
    });
    breaks("a next outside of the table", |guest| {
        guest.driver.put(100, (STATUSES, 1, NEXT | WRITE), QUEUE_SIZE);
        guest.driver.offer(100);
    });
    breaks("an available index that ran away", |guest| {
        guest.driver.set_available(0x4000)
    });
    for (address, len) in [(TABLES, 0), (TABLES, 17), (1 << 40, 32), (u64::MAX - 7, 32)] {
        breaks("a bad indirect table", |guest| {
            guest.driver.add(&[(address, len, INDIRECT)]);
        });
    }
    breaks("an indirect table in an indirect table", |guest| {
        guest
            .driver
            .add_indirect(TABLES, &[(TABLES + 0x1000, 32, INDIRECT)]);
    });
    breaks("an indirect loop", |guest| {
        guest
            .driver
            .add_indirect(TABLES, &[(HEADERS, 16, 0), (STATUSES, 1, WRITE | NEXT)]);
    });
    breaks("an endless indirect table", |guest| {
        let chain: Vec<_> = (0..4000).map(|_| (STATUSES, 1, WRITE)).collect();
        guest.driver.add_indirect(DATA, &chain);
    });
}

#[test]
fn requests_before_the_breach_are_answered() {
    let mut guest = guest(EngineKind::Auto);
    let (head, status) = guest.add(OUT, 0, &[(DATA, 0x10_0000, 0)]);
    guest.driver.offer(QUEUE_SIZE);
    guest.driver.kick();
    assert_eq!(guest.driver.wait().0, head);
    assert_eq!(guest.get(status, 1)[0], OK);
    wait_for("a reset", || guest.interrupts.reset());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// With any content of the rings, the device stops on request.
    #[test]
    fn hostile_rings_are_survived(
        table in prop::collection::vec((0u64..0x50_0000, 0u32..0x2_0000, 0u16..8, 0u16..270), 270),
        heads in prop::collection::vec(0u16..260, 0..300),
        jump: Option<u16>,
        threads: bool,
    ) {
        let mut guest = guest(if threads { EngineKind::Threads } else { EngineKind::Uring });
        let table: Vec<_> = table.into_iter().map(|(a, l, f, n)| (a.max(0x8000), l, f, n)).collect();
        for (at, &(address, len, flags, next)) in (0..).zip(&table) {
            let descriptor = (address, len, flags);
            if at < QUEUE_SIZE {
                guest.driver.put(at, descriptor, next);
            }
            // The memory of indirect tables and headers.
            let bytes = [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()];
            let bytes = bytes.concat();
            guest.put(address.min(0x3f_0000), &bytes);
            guest.put(HEADERS + 16 * u64::from(at), &[u8::from(at % 3 == 0), 0, 0, 0, 0, 0, 0, 0, at as u8, 0, 0, 0, 0, 0, 0, 0]);
        }
        for head in heads {
            guest.driver.offer(head);
        }
        if let Some(jump) = jump {
            guest.driver.set_available(jump);
        }
        guest.driver.kick();
        std::thread::sleep(Duration::from_millis(2));
        guest.blk.reset();
        guest.connect(F_FLUSH);
        prop_assert_eq!(guest.request(IN, 0, &[(DATA, 512, WRITE)]).0, OK);
    }

    /// Requests split into descriptors anywhere have their effect and no other.
    #[test]
    fn any_layout_is_served(
        requests in prop::collection::vec(
            (any::<bool>(), 0u64..SECTORS - 16, 1usize..16, prop::collection::vec(1usize..3000, 0..6)), 1..20),
        event_idx: bool,
    ) {
        let mut guest = Guest::new(EngineKind::Auto, event_idx);
        let mut disk = pattern((SECTORS * 512) as usize, 0);
        for (seed, (write, sector, sectors, cuts)) in (1u8..).zip(requests) {
            let len = sectors * 512;
            let range = sector as usize * 512..sector as usize * 512 + len;
            let (header, _) = guest.frame(if write { OUT } else { IN }, sector);
            let arena = vec![0xcc; 0x1_0000];
            guest.put(DATA, &arena);
            // Header and data to write, or data to read and status, one after the other with gaps.
            let header = guest.get(header.0, 16);
            let data = pattern(len, seed);
            let readable = if write { [&header[..], &data[..]].concat() } else { header };
            let writable = if write { 1 } else { len + 1 };
            let (mut chain, mut expected, mut at, mut cuts) = (Vec::new(), arena, 16usize, cuts.into_iter());
            let mut place = |total: usize, flags: u16, bytes: Option<&[u8]>, chain: &mut Vec<_>| {
                let (mut done, mut places) = (0, Vec::new());
                while done < total {
                    let piece = cuts.next().unwrap_or(usize::MAX).min(total - done);
                    if let Some(bytes) = bytes {
                        guest.put(DATA + at as u64, &bytes[done..done + piece]);
                    }
                    chain.push((DATA + at as u64, piece as u32, flags));
                    places.push((at, done, piece));
                    at += piece + 32;
                    done += piece;
                }
                places
            };
            for (at, done, piece) in place(readable.len(), 0, Some(&readable), &mut chain) {
                expected[at..at + piece].copy_from_slice(&readable[done..done + piece]);
            }
            let places = place(writable, WRITE, None, &mut chain);
            let mut answer = if write { Vec::new() } else { disk[range.clone()].to_vec() };
            answer.push(OK);
            for (at, done, piece) in places {
                expected[at..at + piece].copy_from_slice(&answer[done..done + piece]);
            }
            if write {
                disk[range].copy_from_slice(&data);
            }
            guest.driver.add(&chain);
            guest.driver.kick();
            prop_assert_eq!(guest.driver.wait().1 as usize, answer.len());
            prop_assert!(guest.get(DATA, 0x1_0000) == expected);
        }
        prop_assert!(guest.disk(0, disk.len()) == disk);
    }
}
