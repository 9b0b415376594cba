//! Reading without threads.

use std::os::fd::AsRawFd;

use husk_seccomp::{ThreadRole, install};

use super::*;
use crate::Qcow2Reader;

#[test]
fn a_reader_without_threads_reads_the_same() {
    let size = 1 << 20;
    let file = image(size, 4096);
    let mut model = vec![0; size as usize];
    let disk = open(&file, None);
    let mut engine = Engine::new(EngineKind::Threads, 64, 1).unwrap();
    let id = engine.attach(&disk).unwrap();
    let write = Op {
        kind: 1,
        sector: 27,
        sectors: 20,
        step: 512,
        fill: 7,
    };
    batch(&mut engine, id, &[write], &mut model, 4096);
    engine.detach(id).unwrap();
    drop(disk);

    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let reader = Qcow2Reader::open(File::open(path).unwrap().into()).unwrap();
    assert_eq!(reader.size(), size);
    let mut content = vec![1; size as usize];
    reader.read_at(0, &mut content).unwrap();
    assert!(content == model);
    let (mut offset, mut allocated) = (0, 0);
    while offset < size {
        let extent = reader.extent(offset).unwrap();
        allocated += if extent.allocated { extent.len } else { 0 };
        offset += extent.len;
    }
    assert_eq!(allocated, 3 * 4096);
    let beyond = reader.read_at(size - 1, &mut [0; 2]).unwrap_err();
    assert_eq!(beyond.kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn a_boot_thread_reads_an_image_whose_tables_were_not_flushed() {
    // More tables than the cache has room for; one describes 512 clusters.
    let (tables, cluster) = (200, 4096);
    let size = tables * 512 * cluster;
    let file = image(size, cluster as usize);
    let disk = open(&file, None);
    let mut engine = Engine::new(EngineKind::Threads, 256, 1).unwrap();
    let id = engine.attach(&disk).unwrap();
    let write = |table| Op {
        kind: 1,
        sector: table * 512 * cluster / SECTOR,
        sectors: 1,
        step: 512,
        fill: 7,
    };
    let ops: Vec<Op> = (0..tables).map(write).collect();
    batch(
        &mut engine,
        id,
        &ops,
        &mut vec![0; size as usize],
        cluster as usize,
    );
    let reader = disk.reader();
    let boot = std::thread::spawn(move || {
        // A call that the filter does not allow ends the process.
        install(ThreadRole::Boot);
        let mut sector = [0; 512];
        ops.iter().all(|op| {
            reader.read_at(op.range().start as u64, &mut sector).unwrap();
            sector == [7; 512]
        })
    });
    assert!(boot.join().unwrap());
}
