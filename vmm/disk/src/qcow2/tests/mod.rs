//! Images through an engine, compared with a model.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use proptest::prelude::*;

use super::*;
use crate::{CacheMode, Disk, DiskId, Engine, EngineKind, IoBuffer, IoRequest, SECTOR};

mod check;
mod harness;
mod hostile;
mod overlay;
mod reader;

use harness::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn an_image_returns_the_data_of_earlier_writes(
        (cluster, size) in prop_oneof![
            Just((512, (5 << 20) + 512)),
            Just((4096, (1 << 20) + 512)),
            Just((CLUSTER, (4 << 20) + 1536)),
            Just((2 << 20, (8 << 20) + 512)),
        ],
        kind in 0..3u8,
        base_size in prop_oneof![Just(1u64 << 20), Just((2 << 20) + 512), Just(9 << 20)],
        uring in any::<bool>(),
        batches in prop::collection::vec(ops(48), 1..5),
    ) {
        let file = image(size, cluster);
        let base = base(kind, base_size);
        let mut model = vec![0; size as usize];
        if let Some((_, content)) = &base {
            let len = content.len().min(model.len());
            model[..len].copy_from_slice(&content[..len]);
        }
        let base_file = base.as_ref().map(|(file, _)| file);
        let disk = open(&file, base_file);
        let kind = if uring { EngineKind::Uring } else { EngineKind::Threads };
        let mut engine = Engine::new(kind, 64, 1).unwrap();
        let id = engine.attach(&disk).unwrap();
        prop_assert!(all(&disk) == model);
        for ops in batches {
            batch(&mut engine, id, &apart(ops, size), &mut model, cluster);
            prop_assert!(all(&disk) == model);
        }
        engine.detach(id).unwrap();
        drop(disk);
        check::check(&file);
        let disk = open(&file, base_file);
        prop_assert!(all(&disk) == model, "what is read when it is opened again");
        if let Some(((file, ImageFormat::Raw), content)) = &base {
            let mut now = vec![0; content.len()];
            file.read_exact_at(&mut now, 0).unwrap();
            prop_assert!(&now == content, "the base is not written to");
        }
    }
}

#[test]
fn writes_into_one_cluster_do_not_undo_each_other() {
    const ROUNDS: u64 = 40;
    let size = ROUNDS * CLUSTER as u64;
    let file = image(size, CLUSTER);
    let base = base(1, size).unwrap();
    let mut model = base.1.clone();
    let disk = open(&file, Some(&base.0));
    let mut engine = Engine::new(EngineKind::Uring, 128, 1).unwrap();
    let id = engine.attach(&disk).unwrap();
    for round in 0..ROUNDS {
        // Every sector of a cluster at once; the last few by zeroing them.
        let ops: Vec<_> = (0..128)
            .map(|i| Op {
                kind: if i < 120 { 1 } else { 3 },
                sector: round * 128 + (i * 37) % 128,
                sectors: 1,
                step: 512,
                fill: (i + 1) as u8,
            })
            .collect();
        batch(&mut engine, id, &ops, &mut model, CLUSTER);
    }
    assert!(all(&disk) == model);
}

#[test]
fn an_engine_serves_files_and_images_at_once() {
    for kind in [EngineKind::Uring, EngineKind::Threads] {
        let size = 8 << 20;
        let raw = tempfile::tempfile_in("/var/tmp").unwrap();
        raw.set_len(size).unwrap();
        let raw = Disk::open_raw(raw.into(), options()).unwrap();
        let images = [image(size, CLUSTER), image(size, 4096)];
        let [first, second] = images.each_ref().map(|file| open(file, None));
        let mut engine = Engine::new(kind, 64, 4).unwrap();
        let disks = [&raw, &first, &second].map(|disk| (engine.attach(disk).unwrap(), disk));
        let mut memory = [
            vec![1; size as usize],
            vec![2; size as usize],
            vec![3; size as usize],
        ];
        let mut write = |engine: &mut Engine, disks: &[(DiskId, &Disk)]| {
            for (tag, ((id, _), memory)) in disks.iter().zip(&mut memory).enumerate() {
                let buffers = &buffers(memory, 1 << 20);
                let (offset, durable) = (0, true);
                // SAFETY: the memory outlives the completions below, and the engine.
                unsafe {
                    engine.submit(
                        tag as u16,
                        *id,
                        IoRequest::Write {
                            offset,
                            buffers,
                            durable,
                        },
                    )
                };
            }
        };
        write(&mut engine, &disks);
        for _ in disks {
            complete(&mut engine).result.unwrap();
        }
        for (fill, (_, disk)) in (1..).zip(disks) {
            assert!(all(disk) == vec![fill; size as usize]);
        }
        engine.detach(disks[1].0).unwrap();
        write(&mut engine, &disks[..1]);
        complete(&mut engine).result.unwrap();
        // Dropped with requests in flight, which the memory outlives.
        engine.detach(disks[0].0).unwrap();
        write(&mut engine, &disks[2..]);
        engine.kick().unwrap();
        drop(engine);
    }
}

#[test]
fn a_flush_writes_all_tables_to_the_file() {
    let size = 16 << 20;
    let file = image(size, 4096);
    let disk = open(&file, None);
    let mut engine = Engine::new(EngineKind::Threads, 8, 1).unwrap();
    let id = engine.attach(&disk).unwrap();
    let mut model = vec![0; size as usize];
    let op = |kind, sector, fill| Op {
        kind,
        sector,
        sectors: 64,
        step: 4096,
        fill,
    };
    batch(
        &mut engine,
        id,
        &[op(1, 100, 9), op(1, 9000, 7)],
        &mut model,
        4096,
    );
    batch(&mut engine, id, &[op(4, 0, 1)], &mut model, 4096);
    // A copy of the file, as after a power failure.
    let copy = tempfile::tempfile_in("/var/tmp").unwrap();
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    copy.write_all_at(&bytes, 0).unwrap();
    check::check(&copy);
    assert!(all(&open(&copy, None)) == model);
}

#[test]
fn discarded_clusters_free_storage() {
    use std::os::unix::fs::MetadataExt;
    let size = 16 << 20;
    let file = image(size, CLUSTER);
    let disk = open(&file, None);
    let mut engine = Engine::new(EngineKind::Threads, 8, 1).unwrap();
    let id = engine.attach(&disk).unwrap();
    let mut model = vec![0; size as usize];
    let op = |kind| Op {
        kind,
        sector: 0,
        sectors: size / SECTOR,
        step: 1 << 20,
        fill: 5,
    };
    let stored = || file.metadata().unwrap().blocks() * 512;
    batch(&mut engine, id, &[op(1)], &mut model, CLUSTER);
    assert!(stored() >= size);
    batch(&mut engine, id, &[op(2)], &mut model, CLUSTER);
    assert!(stored() < size / 4, "{}", stored());
    let extent = disk.extent(0).unwrap();
    assert_eq!((extent.allocated, extent.len), (false, size));
    batch(&mut engine, id, &[op(1)], &mut model, CLUSTER);
    assert!(
        file.metadata().unwrap().len() < size + (1 << 20),
        "clusters are used again"
    );
    assert!(disk.extent(0).unwrap().allocated);
    assert!(all(&disk) == model);
}

#[test]
fn a_cluster_that_the_base_fills_in_part_is_discarded_whole() {
    // (kind and size of the base, cluster, first and last byte)
    for (kind, base_size, cluster, range) in [
        (1, (2 << 20) + 512, CLUSTER, (1 << 20)..(2 << 20) + CLUSTER as u64),
        (2, 4 << 20, 2 << 20, 0..2 << 20),
        (2, 4 << 20, 2 << 20, (1 << 20)..4 << 20),
    ] {
        let size = 8 << 20;
        let file = image(size, cluster);
        let (base, content) = base(kind, base_size).unwrap();
        let mut model = vec![0; size as usize];
        model[..content.len()].copy_from_slice(&content);
        let disk = open(&file, Some(&base));
        let mut engine = Engine::new(EngineKind::Threads, 8, 1).unwrap();
        let id = engine.attach(&disk).unwrap();
        let discard = Op {
            kind: 2,
            sector: range.start / SECTOR,
            sectors: (range.end - range.start) / SECTOR,
            step: 512,
            fill: 1,
        };
        batch(&mut engine, id, &[discard], &mut model, cluster);
        assert!(all(&disk) == model, "{range:?} of clusters of {cluster} bytes");
    }
}

#[test]
fn a_buffer_may_appear_twice_in_a_request() {
    let file = image(1 << 20, CLUSTER);
    let disk = open(&file, None);
    let mut engine = Engine::new(EngineKind::Threads, 8, 1).unwrap();
    let id = engine.attach(&disk).unwrap();
    let mut model = vec![0; 1 << 20];
    let write = Op {
        kind: 1,
        sector: 8,
        sectors: 8,
        step: 512,
        fill: 3,
    };
    batch(&mut engine, id, &[write], &mut model, CLUSTER);
    let mut memory = vec![9; 4096];
    let start = memory.as_mut_ptr();
    let same = [IoBuffer::new(start, 4096), IoBuffer::new(start, 4096)];
    let read = IoRequest::Read {
        offset: 0,
        buffers: &same,
    };
    // SAFETY: the memory outlives the completion.
    unsafe { engine.submit(0, id, read) };
    complete(&mut engine).result.unwrap();
    assert_eq!(memory, [3; 4096], "the later part stays");
}

#[test]
fn version_2_works_without_zero_clusters() {
    let file = image(1 << 20, 4096);
    file.write_all_at(&2u32.to_be_bytes(), 4).unwrap();
    let disk = open(&file, None);
    let mut served = Served::new(&disk);
    let mut model = vec![0; 1 << 20];
    for offset in [0, 4096, 8192, 65536] {
        served.write(offset, &mut [3; 4096]).unwrap();
        model[offset as usize..][..4096].fill(3);
    }
    let durable = false;
    let (offset, len) = (65536, 4096);
    served.run(IoRequest::Discard { offset, len, durable }).unwrap();
    for (unmap, offset) in [(false, 512), (true, 5120)] {
        served.zero(offset, 4096, unmap).unwrap();
        model[offset as usize..][..4096].fill(0);
    }
    assert!(all(&disk) == model);
    drop((served, disk));
    check::check(&file);
    assert!(all(&open(&file, None)) == model);
}

#[test]
fn parts_of_a_disk_below_one_cluster_are_zeroed() {
    let file = image(8192, CLUSTER);
    let disk = open(&file, None);
    let mut served = Served::new(&disk);
    served.write(0, &mut [3; 8192]).unwrap();
    for (unmap, offset) in [(false, 0), (true, 2048)] {
        served.zero(offset, 1024, unmap).unwrap();
    }
    let (offset, len, durable) = (4096, 1024, false);
    served.run(IoRequest::Discard { offset, len, durable }).unwrap();
    let model = |at: usize| if at % 2048 < 1024 && at < 4096 { 0 } else { 3 };
    let model: Vec<u8> = (0..8192).map(model).collect();
    assert!(all(&disk) == model);
    drop((served, disk));
    check::check(&file);
    assert!(all(&open(&file, None)) == model);
}

#[test]
fn geometry_and_access_match_the_image() {
    let file = image((4 << 20) + 512, CLUSTER);
    let disk = open(&file, None);
    let geometry = disk.geometry();
    assert_eq!((geometry.size, geometry.logical_block), ((4 << 20) + 512, 512));
    assert_eq!(geometry.discard_granularity, CLUSTER as u32);
    assert_eq!(disk.refresh().unwrap_err().kind(), io::ErrorKind::Unsupported);
    assert!(!disk.needs_one_engine());
    drop(disk);
    let disk = Disk::open_qcow2(fd(&file), None, reading()).unwrap();
    assert!(disk.geometry().read_only);
    let mut engine = Engine::new(EngineKind::Threads, 8, 1).unwrap();
    let id = engine.attach(&disk).unwrap();
    for (request, expected) in [
        (
            IoRequest::Discard {
                offset: 0,
                len: 512,
                durable: false,
            },
            Some(io::ErrorKind::PermissionDenied),
        ),
        (IoRequest::Flush, None),
    ] {
        // SAFETY: there are no buffers.
        unsafe { engine.submit(0, id, request) };
        assert_eq!(complete(&mut engine).result.err().map(|e| e.kind()), expected);
    }
}

#[test]
fn unsuitable_files_are_refused() {
    let file = image(1 << 20, CLUSTER);
    let kind = |result: io::Result<Disk>| result.unwrap_err().kind();
    let cache = CacheMode::None;
    let direct = DiskOptions { cache, ..options() };
    assert_eq!(
        kind(Disk::open_qcow2(fd(&file), None, direct)),
        io::ErrorKind::InvalidInput
    );
    let itself = Some((fd(&file), ImageFormat::Qcow2));
    assert_eq!(
        kind(Disk::open_qcow2(fd(&file), itself, options())),
        io::ErrorKind::InvalidInput
    );
    for size in [0, 1000] {
        let empty = tempfile::tempfile().unwrap();
        assert_eq!(
            Disk::create_overlay(empty.into(), size).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    }
    assert_eq!(
        Disk::create_overlay(fd(&file), 512).unwrap_err().kind(),
        io::ErrorKind::InvalidInput
    );
    let empty = tempfile::tempfile().unwrap();
    assert!(Disk::create_overlay(fd(&empty), 1 << 40).is_ok());
    assert_eq!(
        Disk::open_qcow2(empty.into(), None, options()).unwrap().size(),
        1 << 40
    );
}
