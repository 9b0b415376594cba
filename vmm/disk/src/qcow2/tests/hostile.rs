//! Hostile images.

use super::*;

/// Offsets and the bytes to write there.
type Edits<'a> = &'a [(u64, &'a [u8])];

fn edited(edits: Edits<'_>) -> File {
    let file = image(8 << 20, 4096);
    for (at, bytes) in edits {
        file.write_all_at(bytes, *at).unwrap();
    }
    file
}

fn refusal(file: &File, options: DiskOptions) -> Option<String> {
    match Disk::open_qcow2(fd(file), None, options) {
        Ok(_) => None,
        Err(error) => {
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
            Some(error.to_string())
        }
    }
}

fn word(file: &File, at: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at).unwrap();
    u64::from_be_bytes(bytes)
}

/// Seconds of processor time this thread has used: others may keep it waiting.
fn busy() -> libc::time_t {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: one timespec is written.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(result, 0);
    time.tv_sec
}

#[test]
fn refusals_name_the_reason() {
    let mut data_file = [0; 24];
    data_file[..4].copy_from_slice(b"DATA");
    data_file[7] = 5;
    data_file[8..13].copy_from_slice(b"other");
    let mut names = [0; 64];
    names[..4].copy_from_slice(&0x6803_f857u32.to_be_bytes());
    names[7] = 49;
    let cases: [(Edits<'_>, &str); 25] = [
        (&[(0, b"RAWS")], "not a qcow2 image"),
        (&[(4, &4u32.to_be_bytes())], "version 4"),
        (&[(8, &500u64.to_be_bytes()), (19, &[5])], "backing file"),
        (&[(104, &data_file)], "data file"),
        (&[(104, &names)], "feature names"),
        (&[(104, &[5, 0x37, 0xbe, 0x77, 0, 0, 0, 0])], "encrypted"),
        (&[(32, &2u32.to_be_bytes())], "encrypted"),
        (&[(72, &1u64.to_be_bytes())], "dirty"),
        (&[(72, &2u64.to_be_bytes())], "corrupt"),
        (&[(72, &4u64.to_be_bytes())], "another file"),
        (&[(72, &8u64.to_be_bytes())], "zlib"),
        (&[(72, &16u64.to_be_bytes())], "extended L2"),
        (&[(72, &(1u64 << 63).to_be_bytes())], "feature 63"),
        (&[(60, &3u32.to_be_bytes())], "3 internal snapshots"),
        (&[(20, &8u32.to_be_bytes())], "2^8"),
        (&[(20, &u32::MAX.to_be_bytes())], "cluster size of"),
        (&[(24, &0u64.to_be_bytes())], "size of 0"),
        (&[(24, &(u64::MAX - 511).to_be_bytes())], "too large"),
        (&[(24, &(1u64 << 50).to_be_bytes())], "L1 table has"),
        (&[(36, &u32::MAX.to_be_bytes())], "not in the file"),
        (&[(40, &0u64.to_be_bytes())], "invalid offset"),
        (&[(48, &(1u64 << 40).to_be_bytes())], "not in the file"),
        (&[(56, &u32::MAX.to_be_bytes())], "not in the file"),
        (&[(96, &7u32.to_be_bytes())], "2^7 bits"),
        (&[(100, &u32::MAX.to_be_bytes())], "header length of"),
    ];
    for (edits, expected) in cases {
        let why = refusal(&edited(edits), options());
        assert!(
            why.as_ref().is_some_and(|why| why.contains(expected)),
            "{expected}: {why:?}"
        );
    }
    assert_eq!(refusal(&edited(&[(60, &3u32.to_be_bytes())]), reading()), None);
}

#[test]
fn a_chain_is_refused_and_errors_of_a_base_name_the_base() {
    let upper = image(1 << 20, 4096);
    let why = |base: File, format| {
        let error = Disk::open_qcow2(fd(&upper), Some((base.into(), format)), options()).unwrap_err();
        (error.kind(), error.to_string())
    };
    for (edits, expected) in [
        (
            &[(8, &500u64.to_be_bytes()[..])],
            "its base: qcow2: it names a backing file",
        ),
        (
            &[(32, &1u32.to_be_bytes()[..])],
            "its base: qcow2: it is encrypted",
        ),
        (
            &[(72, &4u64.to_be_bytes()[..])],
            "its base: qcow2: its data is in another file",
        ),
    ] {
        assert_eq!(
            why(edited(edits), ImageFormat::Qcow2),
            (io::ErrorKind::InvalidData, expected.into())
        );
    }
    assert_eq!(
        why(upper.try_clone().unwrap(), ImageFormat::Raw),
        (
            io::ErrorKind::InvalidInput,
            "its base: it is the image itself".into()
        )
    );
    for (path, format) in [
        ("/dev/zero", ImageFormat::Raw),
        ("/", ImageFormat::Raw),
        ("/", ImageFormat::Qcow2),
    ] {
        let (kind, _) = why(File::open(path).unwrap(), format);
        assert_eq!(kind, io::ErrorKind::InvalidInput, "{path} as {format:?}");
    }
}

#[test]
fn tables_in_one_place_are_refused() {
    let file = edited(&[]);
    let (l1, counts) = (word(&file, 40), word(&file, 48));
    for (at, entry) in [
        (l1, (1 << 63) | l1),
        (l1, (1 << 63) | counts),
        (counts, counts),
        (counts + 8, word(&file, counts)),
        (40, counts),
    ] {
        let file = edited(&[(at, &entry.to_be_bytes())]);
        let why = refusal(&file, options()).unwrap();
        assert!(why.contains("two tables"), "{why}");
    }
    for entry in [1u64 << 50, 512, u64::MAX] {
        let file = edited(&[(l1, &entry.to_be_bytes())]);
        assert!(refusal(&file, reading()).unwrap().contains("not in the file"));
    }
}

#[test]
fn an_image_whose_header_is_not_counted_is_refused() {
    let counts = word(&edited(&[]), 48);
    let block = word(&edited(&[]), counts);
    for at in [counts, block] {
        let file = edited(&[(at, &[0; 8])]);
        let why = refusal(&file, options()).unwrap();
        assert!(why.contains("its header as free"), "{why}");
        assert_eq!(refusal(&file, reading()), None);
    }
}

#[test]
fn memory_and_time_are_bounded() {
    // A disk of 60 GiB in clusters of 512 bytes, and in a sparse file: a table for every 32 KiB.
    let file = edited(&[]);
    file.set_len(1 << 40).unwrap();
    let edits: Edits<'_> = &[
        (20, &9u32.to_be_bytes()),
        (24, &(120u64 << 30).to_be_bytes()),
        (36, &(4u32 << 20).to_be_bytes()),
        (40, &(1u64 << 30).to_be_bytes()),
    ];
    for (at, bytes) in edits {
        file.write_all_at(bytes, *at).unwrap();
    }
    assert!(refusal(&file, reading()).unwrap().contains("memory"));
    // A hundred thousand blocks of counts, for 200 million clusters.
    let file = edited(&[]);
    let counts = 1u64 << 30;
    file.set_len(1 << 40).unwrap();
    file.write_all_at(&counts.to_be_bytes(), 48).unwrap();
    file.write_all_at(&512u32.to_be_bytes(), 56).unwrap();
    for i in 0..100_000u64 {
        let block = (2 << 30) + i * 4096;
        file.write_all_at(&block.to_be_bytes(), counts + i * 8).unwrap();
    }
    let began = busy();
    assert!(refusal(&file, options()).unwrap().contains("clusters, more than"));
    assert!(busy() - began < 10);
}

/// An image of 1 MiB in clusters of 4096 bytes, the first `clusters` of which hold something, and where the table of
/// its clusters is.
fn mapped(clusters: u64) -> (File, u64) {
    let file = image(1 << 20, 4096);
    let mut served = Served::new(&open(&file, None));
    for i in 0..clusters {
        served.write(i * 4096, &mut [1; 4096]).unwrap();
    }
    drop(served);
    let l2 = word(&file, word(&file, 40)) & !(1 << 63);
    (file, l2)
}

#[test]
fn cluster_offsets_may_point_anywhere() {
    // Beyond any file; where the count of the neighbour would need a large table; and in the tables.
    for place in [0x00ff_ffff_ffff_f000u64, 1 << 43, 0, 4096, 8192] {
        let (file, l2) = mapped(1);
        file.write_all_at(&(1 << 63 | place).to_be_bytes(), l2).unwrap();
        let disk = open(&file, None);
        let mut served = Served::new(&disk);
        let mut memory = [7; 3 * 4096];
        // The second and third cluster would be behind the first.
        let _ = served.write(0, &mut memory);
        let _ = served.read(0, &mut memory);
        for unmap in [false, true] {
            let (offset, len, durable) = (0, 8192, true);
            let _ = served.run(IoRequest::WriteZeroes {
                offset,
                len,
                unmap,
                durable,
            });
        }
        let _ = served.run(IoRequest::Flush);
        if place > 8192 {
            // The rest of the image still works.
            served.write(16384, &mut [8; 4096]).unwrap();
            served.read(16384, &mut memory[..4096]).unwrap();
            assert_eq!(memory[..4096], [8; 4096]);
        }
        drop(served);
        drop(disk);
        let _ = Disk::open_qcow2(fd(&file), None, options());
    }
}

/// Refusal of an image and of a disk with that image as its base, both opened for reading.
fn refusals(file: &File) -> [Option<String>; 2] {
    let upper = image(1 << 20, 4096);
    let base = Some((fd(file), ImageFormat::Qcow2));
    let based = Disk::open_qcow2(fd(&upper), base, reading()).err();
    [refusal(file, reading()), based.map(|error| error.to_string())]
}

#[test]
fn an_image_that_is_cut_off_is_refused() {
    let (file, _) = mapped(64);
    let whole = file.metadata().unwrap().len();
    assert_eq!(refusals(&file), [None, None]);
    // In the last cluster, in the middle, and before the first data cluster.
    for len in [whole - 1, whole - 4096, whole / 2, 6 * 4096] {
        let (file, _) = mapped(64);
        file.set_len(len).unwrap();
        for why in refusals(&file) {
            let why = why.unwrap();
            assert!(why.contains("cut off") && why.contains(&len.to_string()), "{why}");
        }
    }
    // In the tables.
    for len in [4096, 3 * 4096, 4 * 4096] {
        let (file, _) = mapped(64);
        file.set_len(len).unwrap();
        for why in refusals(&file) {
            assert!(why.unwrap().contains("not in the file"));
        }
    }
}

#[test]
fn a_compressed_image_that_is_cut_off_is_refused() {
    let entry = |place| 8 << 58 | place;
    let (file, _) = packed(entry);
    let (l1, l2) = (word(&file, 40), word(&file, word(&file, 40)) & !(1 << 63));
    let place = word(&file, l2) & ((1 << 58) - 1);
    assert!(place > l1 && place.is_multiple_of(512));
    // The last of nine sectors need not be whole.
    file.set_len(place + 8 * 512 + 1).unwrap();
    assert_eq!(refusals(&file), [None, None]);
    file.set_len(place + 8 * 512).unwrap();
    for why in refusals(&file) {
        assert!(why.unwrap().contains("cut off"));
    }
}

#[test]
fn an_image_written_by_this_crate_is_complete() {
    for (version, size) in [(3, 1 << 20), (3, (1 << 20) + 512), (2, 1 << 20)] {
        let file = image(size, 4096);
        file.write_all_at(&u32::to_be_bytes(version), 4).unwrap();
        let mut served = Served::new(&open(&file, None));
        // A part of a cluster, zeroes where version 2 has no zero clusters, and the end of the disk.
        served.write(512, &mut [1; 512]).unwrap();
        let (offset, len, durable) = (8192, 4096, false);
        let zeroes = IoRequest::WriteZeroes {
            offset,
            len,
            unmap: false,
            durable,
        };
        served.run(zeroes).unwrap();
        served.write(size - 512, &mut [1; 512]).unwrap();
        served.run(IoRequest::Flush).unwrap();
        assert_eq!(refusals(&file), [None, None], "version {version}, {size} bytes");
        drop(served);
        assert_eq!(refusals(&file), [None, None]);
    }
}

/// An image whose first cluster is compressed: the L2 entry, and the content.
fn packed(entry: impl Fn(u64) -> u64) -> (File, Vec<u8>) {
    let (file, l2) = mapped(3);
    let place = word(&file, l2 + 8) & !(1 << 63);
    let content: Vec<u8> = (0..4096u32).map(|i| (i % 251) as u8).collect();
    // Deflate's way to store bytes as they are: a last block, its length, and that again, inverted.
    let stored = [&[1, 0x00, 0x10, 0xff, 0xef], &content[..]].concat();
    file.write_all_at(&stored, place).unwrap();
    // It takes the clusters of the other two.
    for (i, entry) in [1 << 62 | entry(place), 0, 0].into_iter().enumerate() {
        file.write_all_at(&entry.to_be_bytes(), l2 + i as u64 * 8)
            .unwrap();
    }
    (file, content)
}

#[test]
fn compressed_clusters_can_be_read_and_overwritten() {
    // Sectors, but for the first, above 58 bits of a place.
    let (file, mut content) = packed(|place| 8 << 58 | place);
    let mut served = Served::new(&open(&file, None));
    let mut memory = [0; 4096];
    served.read(0, &mut memory).unwrap();
    assert_eq!(memory[..], content);
    served.write(512, &mut [6; 512]).unwrap();
    content[512..1024].fill(6);
    served.read(0, &mut memory).unwrap();
    assert_eq!(memory[..], content);
}

#[test]
fn a_cluster_that_does_not_inflate_is_an_error() {
    // Cut off; from the middle of it; where the file has nothing.
    let cut = |place| place;
    let middle = |place| 8 << 58 | (place + 700);
    let nowhere = |_| 15 << 58 | 1 << 50;
    let cases: [&dyn Fn(u64) -> u64; 3] = [&cut, &middle, &nowhere];
    for entry in cases {
        let (file, _) = packed(entry);
        let mut served = Served::new(&open(&file, None));
        let mut memory = [0; 4096];
        let errno = |result: io::Result<()>| result.unwrap_err().raw_os_error();
        assert_eq!(errno(served.read(0, &mut memory)), Some(libc::EIO));
        // A partial write needs the rest of the cluster.
        assert_eq!(errno(served.write(0, &mut [5; 512])), Some(libc::EIO));
        served.write(0, &mut [5; 4096]).unwrap();
        served.read(0, &mut memory).unwrap();
        assert_eq!(memory, [5; 4096]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Any bytes anywhere in an image cause an error or work, in bounded time and without a panic of this crate.
    #[test]
    fn no_image_is_fatal(
        edits in prop::collection::vec((0..0x8000u64, prop_oneof![
            any::<u64>(), 0..64u64, Just(u64::MAX), Just(1 << 63), (0..16u64).prop_map(|i| (1 << 63) | (i << 12)),
            any::<u64>().prop_map(|v| v | (1 << 62)),
        ], 0..3u8), 0..12),
        cut in prop::option::weighted(0.1, 0..0x50000u64),
        writable in any::<bool>(),
        work in ops(24),
    ) {
        let file = image(4 << 20, 4096);
        {
            let disk = open(&file, None);
            let mut engine = Engine::new(EngineKind::Threads, 64, 1).unwrap();
            let id = engine.attach(&disk).unwrap();
            let op = |sector| Op { kind: 1, sector, sectors: 32, step: 4096, fill: 1 };
            batch(&mut engine, id, &[op(0), op(6000)], &mut vec![0; 4 << 20], 4096);
        }
        let l2 = word(&file, word(&file, 40)) & !(1 << 63);
        for (at, value, kind) in edits {
            let at = match kind {
                0 => at,
                1 => at & !7,
                // One of the clusters that most requests use.
                _ => l2 + at % 64 * 8,
            };
            file.write_all_at(&value.to_be_bytes(), at).unwrap();
        }
        if let Some(len) = cut {
            file.set_len(len).unwrap();
        }
        let options = DiskOptions { read_only: !writable, ..options() };
        if let Ok(disk) = Disk::open_qcow2(fd(&file), None, options) {
            let size = disk.size();
            let mut engine = Engine::new(EngineKind::Threads, 64, 1).unwrap();
            let id = engine.attach(&disk).unwrap();
            let work = apart(work, size);
            let mut memory: Vec<_> = work.iter().map(|op| vec![2; op.range().len()]).collect();
            for (tag, (op, memory)) in work.iter().zip(&mut memory).enumerate() {
                let pieces = buffers(memory, op.step);
                let (offset, len, durable) = (op.sector * SECTOR, op.sectors * SECTOR, false);
                let request = match op.kind {
                    0 => IoRequest::Read { offset, buffers: &pieces },
                    1 => IoRequest::Write { offset, buffers: &pieces, durable },
                    2 => IoRequest::Discard { offset, len, durable },
                    3 => IoRequest::WriteZeroes { offset, len, unmap: true, durable },
                    _ => IoRequest::Flush,
                };
                // SAFETY: the memory lives, unmoved, until the completions below.
                unsafe { engine.submit(tag as u16, id, request) };
            }
            for _ in &work {
                complete(&mut engine);
            }
        }
    }
}
