//! Each request type (virtio 1.2, section 5.2.6), through both engines.

mod guest;

use std::sync::Arc;

use guest::*;
use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::testing::WRITE;
use husk_disk::{BlockSize, CacheMode, Disk, DiskOptions, EngineKind};
use husk_virtio_blk::Blk;
use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};

fn on_both(test: impl Fn(Guest)) {
    for kind in [EngineKind::Uring, EngineKind::Threads] {
        for event_idx in [false, true] {
            test(Guest::new(kind, event_idx));
        }
    }
}

#[test]
fn reads_and_writes() {
    on_both(|mut guest| {
        assert_eq!(guest.request(IN, 3, &[(DATA, 1024, WRITE)]), (OK, 1025));
        assert_eq!(guest.get(DATA, 1024), guest.disk(3 * 512, 1024));
        // Scattered, in segments that are no whole sectors.
        assert_eq!(
            guest.request(IN, 0, &[(DATA, 100, WRITE), (DATA + 4096, 1436, WRITE)]),
            (OK, 1537)
        );
        assert_eq!(
            [guest.get(DATA, 100), guest.get(DATA + 4096, 1436)].concat(),
            guest.disk(0, 1536)
        );
        let bytes = pattern(4096, 0xaa);
        guest.put(DATA, &bytes[..1000]);
        guest.put(BEYOND, &bytes[1000..]);
        assert_eq!(
            guest.request(OUT, SECTORS - 8, &[(DATA, 1000, 0), (BEYOND, 3096, 0)]),
            (OK, 1)
        );
        assert_eq!(guest.disk((SECTORS - 8) * 512, 4096), bytes);
        assert_eq!(guest.request(FLUSH, 0, &[]), (OK, 1));
        assert_eq!(guest.interrupts.reset(), None);
    });
}

#[test]
fn descriptor_boundaries_mean_nothing() {
    on_both(|mut guest| {
        let (header, status) = guest.frame(OUT, 7);
        let bytes = pattern(512, 0x11);
        // The header in three pieces, the last of which holds data too.
        let mut rest = guest.get(header.0 + 9, 7);
        rest.extend(&bytes);
        guest.put(DATA, &rest);
        guest
            .driver
            .add(&[(header.0, 4, 0), (header.0 + 4, 5, 0), (DATA, 519, 0), status]);
        guest.driver.kick();
        assert_eq!(guest.driver.wait().1, 1);
        assert_eq!(
            (guest.get(status.0, 1)[0], guest.disk(7 * 512, 512)),
            (OK, bytes.clone())
        );
        // Data and status in one descriptor, and an empty one after it.
        let (header, status) = guest.frame(IN, 7);
        guest
            .driver
            .add(&[header, (DATA, 513, WRITE), (status.0, 0, WRITE)]);
        guest.driver.kick();
        assert_eq!(guest.driver.wait().1, 513);
        assert_eq!((guest.get(DATA, 512), guest.get(DATA + 512, 1)[0]), (bytes, OK));
    });
}

#[test]
fn indirect_tables() {
    on_both(|mut guest| {
        for round in 0..300u64 {
            let (header, status) = guest.frame(IN, round);
            let data: Vec<_> = (0..32).map(|i| (DATA + i * 4096, 512, WRITE)).collect();
            let chain = [&[header], &data[..], &[status]].concat();
            let head = guest.driver.add_indirect(TABLES, &chain);
            guest.driver.kick();
            assert_eq!(guest.driver.wait(), (head, 32 * 512 + 1));
            assert_eq!(guest.get(status.0, 1)[0], OK);
            let back: Vec<u8> = data.iter().flat_map(|d| guest.get(d.0, 512)).collect();
            assert_eq!(back, guest.disk(round * 512, 32 * 512));
        }
    });
}

#[test]
fn identity() {
    on_both(|mut guest| {
        assert_eq!(guest.request(GET_ID, 0, &[(DATA, 20, WRITE)]), (OK, 21));
        assert_eq!(guest.get(DATA, 20), b"serial-0123456789abc");
        // No room for all, or too much.
        guest.put(DATA, &[0xee; 32]);
        assert_eq!(guest.request(GET_ID, 0, &[(DATA, 3, WRITE)]), (OK, 4));
        assert_eq!(guest.get(DATA, 4), b"ser\xee");
        assert_eq!(
            guest.request(GET_ID, 0, &[(DATA, 8, WRITE), (DATA + 8, 24, WRITE)]),
            (OK, 20)
        );
        assert_eq!(guest.get(DATA, 21), b"serial-0123456789abc\xee");
        assert_eq!(guest.request(GET_ID, 0, &[(BEYOND - 4, 20, WRITE)]).0, IOERR);
    });
}

#[test]
fn discard_and_write_zeroes() {
    on_both(|mut guest| {
        assert_eq!(guest.range(WRITE_ZEROES, 3, 5, 0), OK);
        assert_eq!(guest.range(WRITE_ZEROES, 16, 8, 1), OK);
        assert_eq!(guest.range(DISCARD, 32, 8, 0), OK);
        let mut expected = pattern(64 * 512, 0);
        for (from, to) in [(3, 8), (16, 24), (32, 40)] {
            expected[from * 512..to * 512].fill(0);
        }
        assert_eq!(guest.disk(0, 64 * 512), expected);
        assert_eq!(guest.range(WRITE_ZEROES, 0, 1, 2), UNSUPP, "a flag nobody knows");
        assert_eq!(guest.range(DISCARD, 0, 1, 1), UNSUPP, "unmap is not for discard");
        for (kind, sector, sectors) in [
            (DISCARD, SECTORS, 1),
            (WRITE_ZEROES, SECTORS - 1, 2),
            (WRITE_ZEROES, u64::MAX, 1),
            (DISCARD, u64::MAX / 512, 8),
            (WRITE_ZEROES, 0, u32::MAX),
        ] {
            assert_eq!(guest.range(kind, sector, sectors, 0), IOERR, "{sector}+{sectors}");
        }
        // Two segments, where one was offered; half a segment; none.
        for len in [32, 8, 0] {
            assert_eq!(guest.request(DISCARD, 0, &[(DATA, len, 0)]).0, IOERR);
        }
        assert_eq!(guest.disk(0, 64 * 512), expected);
    });
}

#[test]
fn requests_beyond_the_disk_are_errors() {
    on_both(|mut guest| {
        for (sector, len) in [
            (SECTORS, 512),
            (SECTORS - 1, 1024),
            (u64::MAX, 512),
            (u64::MAX / 512 + 1, 512),
            (0, 0),
            (0, 511),
            (0, 513),
        ] {
            assert_eq!(
                guest.request(OUT, sector, &[(DATA, len, 0)]),
                (IOERR, 1),
                "{sector}+{len}"
            );
            // A failed read writes only the status, at the end.
            let written = u32::from(len == 0);
            assert_eq!(
                guest.request(IN, sector, &[(DATA, len, WRITE)]),
                (IOERR, written),
                "{sector}+{len}"
            );
        }
        // Buffers outside memory: wholly, at the end, across a hole, and at the end of the address space.
        for address in [1 << 40, END as u64 - 256, BEYOND - 256, u64::MAX - 255] {
            assert_eq!(
                guest.request(OUT, 0, &[(address, 512, 0)]).0,
                IOERR,
                "{address:#x}"
            );
            assert_eq!(
                guest.request(IN, 0, &[(address, 512, WRITE)]).0,
                IOERR,
                "{address:#x}"
            );
        }
        assert_eq!(guest.request(99, 0, &[]).0, UNSUPP);
        assert_eq!(guest.disk(0, 512), pattern(512, 0));
        // A header that is too short, or missing.
        for header in [(HEADERS, 15, 0), (1 << 40, 16, 0)] {
            guest.driver.add(&[header, (STATUSES, 1, WRITE)]);
            guest.driver.kick();
            guest.driver.wait();
            assert_eq!(guest.get(STATUSES, 1)[0], IOERR);
        }
        assert_eq!(guest.interrupts.reset(), None);
        assert_eq!(guest.request(IN, 0, &[(DATA, 512, WRITE)]).0, OK);
    });
}

#[test]
fn a_read_only_disk_does_not_change() {
    let read_only = DiskOptions {
        read_only: true,
        ..DiskOptions::default()
    };
    let mut guest = Guest::with(EngineKind::Auto, 1, read_only, true);
    assert_eq!(guest.blk.features() & (1 << 5), 1 << 5, "VIRTIO_BLK_F_RO");
    assert_eq!(guest.blk.features() & (1 << 9 | 1 << 11 | 1 << 13 | 1 << 14), 0);
    assert_eq!(guest.request(OUT, 0, &[(DATA, 512, 0)]).0, IOERR);
    assert_eq!(guest.range(DISCARD, 0, 1, 0), IOERR);
    assert_eq!(guest.range(WRITE_ZEROES, 0, 1, 0), IOERR);
    assert_eq!(guest.request(FLUSH, 0, &[]).0, OK);
    assert_eq!(guest.request(IN, 0, &[(DATA, 512, WRITE)]).0, OK);
    assert_eq!(
        (guest.get(DATA, 512), guest.disk(0, 512)),
        (pattern(512, 0), pattern(512, 0))
    );
}

#[test]
fn a_failing_disk_is_an_error() {
    on_both(|mut guest| {
        guest.file.set_len(4096).unwrap();
        assert_eq!(guest.request(IN, 4, &[(DATA, 4096, WRITE)]), (IOERR, 0));
        assert_eq!(guest.request(IN, 0, &[(DATA, 4096, WRITE)]), (OK, 4097));
    });
}

#[test]
fn bytes_filled_by_the_disk_are_dirty() {
    on_both(|mut guest| {
        let dirty = |guest: &Guest, at: u64| {
            let mem = guest.mem.memory();
            let (region, offset) = mem.to_region_addr(GuestAddress(at)).unwrap();
            region.bitmap().dirty_at(offset.0 as usize)
        };
        guest.request(OUT, 0, &[(DATA, 4096, 0)]);
        assert!(!dirty(&guest, DATA));
        guest.request(IN, 0, &[(DATA + 4096, 4096, WRITE), (BEYOND + 8192, 512, WRITE)]);
        for (at, expected) in [(0, false), (4096, true), (8191, true), (8192, false)] {
            assert_eq!(dirty(&guest, DATA + at), expected, "{at}");
        }
        assert!(dirty(&guest, BEYOND + 8192) && !dirty(&guest, BEYOND + 4096));
    });
}

#[test]
fn logical_blocks_of_4096_bytes() {
    let block_size = BlockSize::Custom {
        logical: 4096,
        physical: 16384,
    };
    let options = DiskOptions {
        block_size,
        ..DiskOptions::default()
    };
    let mut guest = Guest::with(EngineKind::Auto, 1, options, true);
    let mut space = [0; 60];
    guest.blk.read_config(0, &mut space);
    let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| space[at + i]));
    assert_eq!(u32_at(0), SECTORS as u32, "capacity is in sectors all the same");
    assert_eq!(u32_at(20), 4096, "blk_size");
    assert_eq!((space[24], space[26]), (2, 4), "4 blocks in a physical one");
    assert_eq!(u32_at(44), 32, "discard_sector_alignment");
    for (sector, len, status) in [
        (8, 4096, OK),
        (16, 8192, OK),
        (1, 4096, IOERR),
        (0, 512, IOERR),
        (8, 4608, IOERR),
        (SECTORS - 8, 4096, OK),
    ] {
        assert_eq!(guest.request(OUT, sector, &[(DATA, len, 0)]).0, status);
        assert_eq!(guest.request(IN, sector, &[(DATA, len, WRITE)]).0, status);
    }
    assert_eq!(guest.range(DISCARD, 8, 8, 0), OK);
    assert_eq!(guest.range(DISCARD, 8, 1, 0), IOERR);
    assert_eq!(guest.range(WRITE_ZEROES, 1, 8, 0), IOERR);
}

#[test]
fn configuration_space() {
    let open = |size: u64, queues: u16, options: DiskOptions| {
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        file.set_len(size).unwrap();
        let disk = Disk::open_raw(file.into(), options).unwrap();
        blk(disk, queues, EngineKind::Auto, &Arc::default()).0
    };
    let mut blk = open(5 << 30, 2, DiskOptions::default());
    let read = |blk: &Blk, offset: u64, len: usize| {
        let mut bytes = [0; 8];
        blk.read_config(offset, &mut bytes[..len]);
        u64::from_le_bytes(bytes)
    };
    assert_eq!(read(&blk, 0, 8), 5 << 21, "capacity");
    assert_eq!(read(&blk, 12, 4), 254, "seg_max");
    assert_eq!(read(&blk, 20, 4), 512, "blk_size");
    assert_eq!(
        (read(&blk, 24, 1), read(&blk, 25, 1), read(&blk, 26, 2)),
        (3, 0, 8),
        "topology"
    );
    assert_eq!(read(&blk, 34, 2), 2, "num_queues");
    assert_eq!(
        (read(&blk, 36, 4), read(&blk, 40, 4), read(&blk, 44, 4)),
        (1 << 21, 1, 8),
        "discard"
    );
    assert_eq!(
        (read(&blk, 48, 4), read(&blk, 52, 4), read(&blk, 56, 1)),
        (1 << 21, 1, 1),
        "write zeroes"
    );
    assert_eq!(
        (read(&blk, 58, 8), read(&blk, u64::MAX - 1, 8)),
        (0, 0),
        "past the end"
    );
    // Only the cache mode can be written, and a reset restores it.
    assert_eq!(read(&blk, 32, 1), 1);
    blk.write_config(32, &[0]);
    blk.write_config(32, &[1, 1]);
    blk.write_config(0, &[1; 8]);
    assert_eq!((read(&blk, 32, 1), read(&blk, 0, 8)), (0, 5 << 21));
    blk.reset();
    assert_eq!(read(&blk, 32, 1), 1);
    assert_eq!(
        (blk.name(), blk.device_type(), blk.queue_max_sizes()),
        ("blk-test", 2, &[256, 256][..])
    );
    assert_ne!(blk.features() & (1 << 12), 0, "VIRTIO_BLK_F_MQ");
    // Without a cache there is no mode to choose.
    let mut through = open(
        4096,
        1,
        DiskOptions {
            cache: CacheMode::Writethrough,
            ..DiskOptions::default()
        },
    );
    through.write_config(32, &[1]);
    assert_eq!(
        (
            read(&through, 32, 1),
            through.features() & (1 << 9 | 1 << 11 | 1 << 12)
        ),
        (0, 0)
    );
}
