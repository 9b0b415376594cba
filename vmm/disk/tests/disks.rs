//! Disks that are attached, detached and resized, and their geometry.

mod common;

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use common::*;
use husk_disk::{BlockSize, CacheMode, Disk, DiskId, DiskOptions, Engine, EngineKind, Extent, IoRequest};

fn engine(kind: EngineKind, disks: u32) -> Engine {
    Engine::new(kind, 64, disks).unwrap()
}

fn write_then_read(engine: &mut Engine, disks: &[DiskId]) {
    let mut out: Vec<_> = disks
        .iter()
        .map(|disk| pattern(4096, format!("{disk:?}").len() as u8))
        .collect();
    let buffers: Vec<_> = out.iter_mut().map(|bytes| pieces(bytes, 1024)).collect();
    let requests: Vec<_> = disks
        .iter()
        .zip(&buffers)
        .map(|(disk, buffers)| {
            let (offset, durable) = (4096, false);
            let write = IoRequest::Write {
                offset,
                buffers,
                durable,
            };
            (*disk, write)
        })
        .collect();
    assert!(run_on(engine, &requests).iter().all(Result::is_ok));
    let mut back = vec![vec![0; 4096]; disks.len()];
    let buffers: Vec<_> = back.iter_mut().map(|bytes| pieces(bytes, 512)).collect();
    let requests: Vec<_> = disks
        .iter()
        .zip(&buffers)
        .map(|(disk, buffers)| {
            (
                *disk,
                IoRequest::Read {
                    offset: 4096,
                    buffers,
                },
            )
        })
        .collect();
    assert!(run_on(engine, &requests).iter().all(Result::is_ok));
    assert_eq!(out, back);
}

/// Takes the file's lock on an open file description of its own, if nobody has it.
fn lock(file: &File) -> bool {
    // SAFETY: flock takes no pointer.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
}

#[test]
fn disks_attach_and_detach_during_io_on_others() {
    for kind in KINDS {
        let mut engine = engine(kind, 40);
        let images: Vec<_> = (0..40).map(|_| image(MIB)).collect();
        let open_disk = |file| disk(file, 0, reporting());
        let mut ids: Vec<_> = images
            .iter()
            .map(|file| engine.attach(&open_disk(file)).unwrap())
            .collect();
        assert_eq!(
            engine.attach(&open_disk(&images[0])).unwrap_err().kind(),
            io::ErrorKind::QuotaExceeded
        );
        write_then_read(&mut engine, &ids);
        // A slow write, while half of the other disks are detached and new ones attached.
        let big = image(64 * MIB);
        engine.detach(ids.pop().unwrap()).unwrap();
        let busy = engine.attach(&open_disk(&big)).unwrap();
        let mut memory = pattern(48 * MIB as usize, 3);
        let buffers = pieces(&mut memory, 1 << 20);
        let write = IoRequest::Write {
            offset: 0,
            buffers: &buffers,
            durable: true,
        };
        // SAFETY: the memory lives until the request's completion below.
        unsafe { engine.submit(63, busy, write) };
        engine.kick().unwrap();
        for id in ids.drain(..20) {
            engine.detach(id).unwrap();
        }
        ids.extend(
            images[..20]
                .iter()
                .map(|file| engine.attach(&open_disk(file)).unwrap()),
        );
        assert_eq!(
            (engine.in_flight(busy), engine.detach(busy).unwrap_err().kind()),
            (1, io::ErrorKind::ResourceBusy)
        );
        let done = loop {
            match engine.complete() {
                Some(done) => break done,
                None => {
                    engine.kick().unwrap();
                    engine.wait();
                }
            }
        };
        assert_eq!(done.tag, 63);
        done.result.unwrap();
        assert_eq!(engine.in_flight(busy), 0);
        engine.detach(busy).unwrap();
        write_then_read(&mut engine, &ids);
    }
}

#[test]
fn a_detached_disk_is_closed() {
    for kind in KINDS {
        let file = image(MIB);
        let opened = open(file.path(), 0);
        let number = opened.as_raw_fd();
        assert!(lock(&opened));
        let mut engine = engine(kind, 4);
        let other = image(MIB);
        let other = engine.attach(&disk(&other, 0, reporting())).unwrap();
        let disk = Disk::open_raw(opened.into(), reporting()).unwrap();
        let id = engine.attach(&disk).unwrap();
        drop(disk);
        write_then_read(&mut engine, &[other, id]);
        assert!(!lock(file.as_file()), "the engine has it open");
        engine.detach(id).unwrap();
        assert!(lock(file.as_file()), "nobody has it open");
        let link = std::fs::read_link(format!("/proc/self/fd/{number}"));
        assert!(link.is_err() || link.unwrap() != file.path());
        write_then_read(&mut engine, &[other]);
    }
}

#[test]
fn a_thousand_disks_in_one_engine() {
    // The number of open files bounds it; each disk has a descriptor anyway.
    let file = image(MIB);
    for kind in KINDS {
        let mut engine = engine(kind, 4096);
        let disk = disk(&file, 0, reporting());
        let ids: Vec<_> = (0..1000).map(|_| engine.attach(&disk).unwrap()).collect();
        for some in [&ids[..32], &ids[968..]] {
            let requests: Vec<_> = some.iter().map(|id| (*id, IoRequest::Flush)).collect();
            assert!(run_on(&mut engine, &requests).iter().all(Result::is_ok));
        }
        ids.into_iter().for_each(|id| engine.detach(id).unwrap());
    }
}

#[test]
fn a_disk_grows_and_shrinks() {
    for (kind, flags, cache) in [
        (EngineKind::Uring, 0, CacheMode::Writeback),
        (EngineKind::Threads, 0, CacheMode::Writeback),
        (EngineKind::Uring, libc::O_DIRECT, CacheMode::None),
    ] {
        let file = image(MIB);
        let options = DiskOptions { cache, ..reporting() };
        let disk = disk(&file, flags, options);
        let mut served = serve(kind, &disk);
        let mut memory = pattern(4096, 1);
        let buffers = pieces(&mut memory, 4096);
        let mut try_at = |offset| {
            let read = IoRequest::Read {
                offset,
                buffers: &buffers,
            };
            run(&mut served, &[read]).remove(0)
        };
        let kind_of = |result: io::Result<()>| result.err().map(|e| e.kind());
        assert_eq!(kind_of(try_at(MIB)), Some(io::ErrorKind::InvalidInput));
        // A partial block at the end is left out.
        file.as_file().set_len(2 * MIB + 100).unwrap();
        assert_eq!(kind_of(try_at(MIB)), Some(io::ErrorKind::InvalidInput));
        assert_eq!(disk.refresh().unwrap().size, 2 * MIB);
        assert_eq!(kind_of(try_at(2 * MIB - 4096)), None);
        file.as_file().set_len(8192).unwrap();
        assert_eq!(disk.refresh().unwrap().size, 8192);
        assert_eq!(kind_of(try_at(8192)), Some(io::ErrorKind::InvalidInput));
        assert_eq!(kind_of(try_at(4096)), None);
        assert!(disk.reader().read_at(8192, &mut [0]).is_err());
        file.as_file().set_len(100).unwrap();
        assert_eq!(disk.refresh().unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(disk.size(), 8192);
    }
}

#[test]
fn extents_distinguish_holes_and_data() {
    let file = image(MIB);
    file.as_file().write_all_at(&[1; 65536], 65536).unwrap();
    file.as_file().sync_all().unwrap();
    let disk = disk(&file, 0, reporting());
    let extent = |offset, len, allocated| Extent {
        offset,
        len,
        allocated,
    };
    for expected in [
        extent(0, 65536, false),
        extent(512, 65024, false),
        extent(65536, 65536, true),
        extent(66048, 65024, true),
        extent(131_072, MIB - 131_072, false),
        extent(MIB - 512, 512, false),
    ] {
        assert_eq!(disk.extent(expected.offset).unwrap(), expected);
    }
    for beyond in [MIB, u64::MAX] {
        assert_eq!(
            disk.extent(beyond).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    }
    // A truncated volume.
    file.as_file().set_len(4096).unwrap();
    assert_eq!(disk.extent(8192).unwrap(), extent(8192, MIB - 8192, false));
}

#[test]
fn block_sizes_are_default_matched_or_custom() {
    let file = image(MIB);
    let with = |block_size| {
        let options = DiskOptions {
            block_size,
            ..DiskOptions::default()
        };
        Disk::open_raw(open(file.path(), 0).into(), options).map(|disk| {
            let geometry = disk.geometry();
            assert!(geometry.minimum_io >= geometry.physical_block);
            assert!(geometry.discard_granularity >= geometry.physical_block);
            (geometry.logical_block, geometry.physical_block)
        })
    };
    assert_eq!(with(BlockSize::Auto).unwrap(), (512, 4096));
    assert_eq!(with(BlockSize::MatchVolume).unwrap(), (4096, 4096));
    let custom = |logical, physical| with(BlockSize::Custom { logical, physical });
    for (logical, physical) in [(512, 512), (512, 2 << 20), (4096, 4096), (1024, 65536)] {
        assert_eq!(custom(logical, physical).unwrap(), (logical, physical));
    }
    for (logical, physical) in [
        (0, 512),
        (256, 512),
        (513, 4096),
        (4096, 512),
        (8192, 8192),
        (512, 4 << 20),
        (512, 3000),
        (512, u32::MAX),
    ] {
        assert_eq!(
            custom(logical, physical).unwrap_err().kind(),
            io::ErrorKind::InvalidInput,
            "{logical} {physical}"
        );
    }
    file.as_file().set_len(MIB + 512).unwrap();
    assert!(custom(512, 4096).is_ok());
    let error = custom(4096, 4096).unwrap_err().to_string();
    assert_eq!(error, "size 1049088 must be a non-zero multiple of 4096");
}
