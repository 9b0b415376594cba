//! Several disks in one engine.

use std::fs::File;
use std::io;

use super::kernel::{BLOCKS, NONE, bench, bench_of, buffers, drain, geometry};
use crate::{Disk, DiskOptions, ErrorPolicy, Geometry, IoRequest};

#[test]
fn a_slot_is_reused_but_its_old_id_is_not() {
    let mut bench = bench(NONE, 1, true);
    let disk = Disk::without_image(geometry(NONE), ErrorPolicy::Report);
    let second = bench.engine.attach(&disk).unwrap();
    assert_eq!(
        bench.engine.attach(&disk).unwrap_err().kind(),
        io::ErrorKind::QuotaExceeded
    );
    bench.engine.detach(bench.disk).unwrap();
    let third = bench.engine.attach(&disk).unwrap();
    assert!(third != bench.disk && third != second);
    assert!(bench.engine.disk(bench.disk).is_none() && bench.engine.disk(third).is_some());
    assert_eq!(
        bench.engine.detach(bench.disk).unwrap_err().kind(),
        io::ErrorKind::NotFound
    );
    assert!(
        bench
            .engine
            .set_error_policy(bench.disk, ErrorPolicy::Stop)
            .is_err()
    );
    bench.engine.retry_held(bench.disk);
    bench.engine.fail_held(bench.disk);
    // SAFETY: a flush has no buffers.
    unsafe { bench.engine.submit(0, bench.disk, IoRequest::Flush) };
    let done = drain(&mut bench.engine);
    assert_eq!(
        done[0].result.as_ref().unwrap_err().kind(),
        io::ErrorKind::NotFound
    );
    assert_eq!(
        [bench.disk, third].map(|disk| bench.engine.in_flight(disk)),
        [0, 0]
    );
}

#[test]
fn the_backend_for_files_knows_how_many_disks_there_are() {
    let mut bench = bench(NONE, 1, true);
    let disks = |bench: &super::kernel::Bench| bench.kernel.lock().unwrap().disks;
    assert_eq!(disks(&bench), 1);
    // One that it does not serve itself.
    let file = tempfile::NamedTempFile::new().unwrap();
    let open = || File::options().read(true).write(true).open(file.path()).unwrap();
    Disk::create_overlay(open().into(), 1 << 20).unwrap();
    let overlay = Disk::open_qcow2(open().into(), None, DiskOptions::default()).unwrap();
    let second = bench.engine.attach(&overlay).unwrap();
    assert_eq!(disks(&bench), 2);
    assert!(bench.engine.attach(&overlay).is_err(), "no more than two");
    assert_eq!(disks(&bench), 2);
    bench.engine.detach(bench.disk).unwrap();
    assert_eq!(disks(&bench), 1);
    bench.engine.detach(second).unwrap();
    assert_eq!(disks(&bench), 0);
    bench.engine.attach(&overlay).unwrap();
    assert_eq!(disks(&bench), 1);
}

#[test]
fn blocks_rewritten_on_one_disk_do_not_hold_up_another() {
    let mut bench = bench(BLOCKS, 1, true);
    let other = Disk::without_image(geometry(BLOCKS), ErrorPolicy::Report);
    let other = bench.engine.attach(&other).unwrap();
    let mut memory = vec![7; 512];
    let pieces = buffers(&mut memory, 512);
    let write = IoRequest::Write {
        offset: 512,
        buffers: &pieces,
        durable: false,
    };
    for (tag, disk, waiting) in [
        (0, bench.disk, 0),
        (1, other, 0),
        (2, bench.disk, 1),
        (3, other, 2),
    ] {
        // SAFETY: the memory outlives the engine's use.
        unsafe { bench.engine.submit(tag, disk, write) };
        assert_eq!(bench.engine.waiting.len(), waiting);
    }
    assert_eq!(drain(&mut bench.engine).len(), 4);
}

#[test]
fn a_disk_whose_blocks_are_rewritten_has_one_engine() {
    let serve = |disk: &Disk| {
        let (mut engine, _) = crate::testing::BackendScript::engine(4);
        engine.attach(disk).map(|id| (engine, id))
    };
    let disk = Disk::without_image(geometry(BLOCKS), ErrorPolicy::Report);
    assert!(disk.needs_one_engine());
    let (mut first, id) = serve(&disk).unwrap();
    assert_eq!(serve(&disk).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
    first.detach(id).unwrap();
    let (second, _) = serve(&disk).unwrap();
    drop(second);
    serve(&disk).unwrap();
    let logical_block = 4096;
    let whole = Geometry {
        logical_block,
        ..geometry(BLOCKS)
    };
    let disk = Disk::without_image(whole, ErrorPolicy::Report);
    let served = [serve(&disk), serve(&disk)];
    assert!(served.iter().all(Result::is_ok));
}

#[test]
fn partial_logical_blocks_are_refused() {
    let logical_block = 4096;
    let geometry = Geometry {
        logical_block,
        ..geometry(BLOCKS)
    };
    let mut bench = bench_of(geometry, ErrorPolicy::Report, 1, true);
    let mut memory = vec![7; 8192];
    let pieces = buffers(&mut memory, 4096);
    let request = |offset, len: usize| IoRequest::Write {
        offset,
        buffers: &pieces[..len],
        durable: false,
    };
    let discard = |offset, len| IoRequest::Discard {
        offset,
        len,
        durable: false,
    };
    for (request, fits) in [
        (request(4096, 2), true),
        (request(512, 1), false),
        (discard(4096, 4096), true),
        (discard(4096, 512), false),
    ] {
        assert_eq!(super::one(&mut bench, request).is_ok(), fits, "{request:?}");
    }
}
