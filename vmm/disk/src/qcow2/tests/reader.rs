//! Reading without threads.

use std::os::fd::AsRawFd;

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
