//! Makes qcow2 images.

use std::io::Write;

use flate2::Compression;
use flate2::write::DeflateEncoder;

const CLUSTER: usize = 64 << 10;

/// An image of `disk`, whose clusters are holes if they are zero. Every second cluster is compressed.
pub fn image(disk: &[u8]) -> Vec<u8> {
    let clusters = disk.len().div_ceil(CLUSTER);
    assert!(clusters <= CLUSTER / 8);
    // Header, refcount table, refcount block, L1 table, L2 table, data.
    let mut file = vec![0; 5 * CLUSTER];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"QFI\xfb");
    put(4, &3_u32.to_be_bytes());
    put(20, &16_u32.to_be_bytes());
    put(24, &(disk.len() as u64).to_be_bytes());
    put(36, &1_u32.to_be_bytes());
    put(40, &(3 * CLUSTER as u64).to_be_bytes());
    put(48, &(CLUSTER as u64).to_be_bytes());
    put(56, &1_u32.to_be_bytes());
    put(96, &4_u32.to_be_bytes());
    put(100, &104_u32.to_be_bytes());
    put(CLUSTER, &(2 * CLUSTER as u64).to_be_bytes());
    put(3 * CLUSTER, &((1 << 63) | (4 * CLUSTER as u64)).to_be_bytes());
    for (number, data) in disk.chunks(CLUSTER).enumerate() {
        if data.iter().all(|byte| *byte == 0) {
            continue;
        }
        file.resize(file.len().next_multiple_of(CLUSTER), 0);
        let at = file.len() as u64;
        let entry = if number % 2 == 0 {
            file.extend(data);
            (1 << 63) | at
        } else {
            let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
            let mut whole = data.to_vec();
            whole.resize(CLUSTER, 0);
            encoder.write_all(&whole).unwrap();
            let packed = encoder.finish().unwrap();
            file.extend(&packed);
            file.resize(file.len().next_multiple_of(512), 0);
            let further = (packed.len() as u64).div_ceil(512) - 1;
            (1 << 62) | (further << 54) | at
        };
        let place = 4 * CLUSTER + number * 8;
        file[place..place + 8].copy_from_slice(&entry.to_be_bytes());
    }
    file.resize(file.len().next_multiple_of(CLUSTER), 0);
    file
}
