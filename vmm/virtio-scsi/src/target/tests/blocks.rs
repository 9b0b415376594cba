//! Capacity, transfers, flushes, unmapping: the steps of each command.

use super::super::{DataLocation, MediumLimits, ScsiStatus, Step};
use super::{Rig, cdb, code, disk_limits};

const READ10: [u8; 10] = [0x28, 0, 0, 0, 0, 2, 0, 0, 3, 0];
const WRITE10: [u8; 10] = [0x2a, 0, 0, 0, 0, 2, 0, 0, 3, 0];

#[test]
fn capacity() {
    let mut rig = Rig::disk(disk_limits());
    assert_eq!(
        rig.good(&cdb::<10>(0x25, &[]), &[], 8),
        [0, 0, 0x0f, 0xff, 0, 0, 2, 0]
    );
    let long: [u8; 16] = cdb(0x9e, &[(1, &[0x10]), (13, &[32])]);
    let mut expected = vec![0, 0, 0, 0, 0, 0, 0x0f, 0xff, 0, 0, 2, 0, 0, 3, 0xc0, 0];
    expected.resize(32, 0);
    assert_eq!(rig.good(&long, &[], 32), expected);
    let mut keeps_data = Rig::disk(MediumLimits {
        unmapped_are_zeroes: false,
        ..disk_limits()
    });
    expected[14] = 0x80;
    assert_eq!(keeps_data.good(&long, &[], 32), expected);
    assert_eq!(
        rig.field(&cdb::<10>(0x25, &[(5, &[1])]), &[], 8),
        (0x24, true, 2, None)
    );
    rig.good(&cdb::<10>(0x25, &[(5, &[1]), (8, &[1])]), &[], 8);
}

#[test]
fn blocks_have_a_size_that_linux_takes() {
    let limits = |block_size| MediumLimits {
        block_size,
        blocks: 64,
        physical_exponent: 1,
        ..disk_limits()
    };
    for block_size in [512, 1024, 2048, 4096] {
        let mut rig = Rig::disk(limits(block_size));
        let capacity = rig.good(&cdb::<10>(0x25, &[]), &[], 8);
        assert_eq!(capacity[4..], block_size.to_be_bytes());
        let long: [u8; 16] = cdb(0x9e, &[(1, &[0x10]), (13, &[32])]);
        let long = rig.good(&long, &[], 32);
        assert_eq!((&long[8..12], long[13]), (&block_size.to_be_bytes()[..], 1));
        let block = block_size as usize;
        assert_eq!(
            rig.good(&READ10, &[], 3 * block),
            rig.medium[2 * block..5 * block]
        );
        // OPTIMAL TRANSFER LENGTH GRANULARITY, MAXIMUM TRANSFER LENGTH
        let page = rig.good(&[0x12, 1, 0xb0, 0, 64, 0], &[], 64);
        assert_eq!(page[6..8], [0, 2]);
        assert_eq!(page[8..12], ((1 << 20) / block_size).to_be_bytes());
    }
    for block_size in [0, 256, 513, 8192] {
        let identity = super::Identity::new(super::DeviceKind::Disk, None, "");
        assert!(super::LogicalUnit::disk(identity, limits(block_size)).is_err());
    }
}

#[test]
fn capacity_beyond_32_bits() {
    let limits = MediumLimits {
        blocks: 1 << 33,
        thin: false,
        ..disk_limits()
    };
    let identity = super::Identity::new(super::DeviceKind::Disk, None, "");
    let mut rig = Rig::disk(disk_limits());
    rig.unit = super::LogicalUnit::disk(identity, limits).unwrap();
    rig.unit.unit_attentions.take();
    assert_eq!(
        rig.good(&cdb::<10>(0x25, &[]), &[], 8),
        [0xff, 0xff, 0xff, 0xff, 0, 0, 2, 0]
    );
    let long: [u8; 16] = cdb(0x9e, &[(1, &[0x10]), (13, &[32])]);
    let data = rig.good(&long, &[], 32);
    assert_eq!(data[..8], ((1u64 << 33) - 1).to_be_bytes());
    assert_eq!(data[14], 0);
    // The block descriptor of MODE SENSE (6) has 32 bits.
    let data = rig.good(&[0x1a, 0, 8, 0, 255, 0], &[], 255);
    assert_eq!(data[4..12], [0xff, 0xff, 0xff, 0xff, 0, 0, 2, 0]);
}

#[test]
fn a_new_capacity_is_reported_and_takes_effect() {
    let mut rig = Rig::disk(disk_limits());
    rig.unit.resize(4097).unwrap();
    assert_eq!(rig.bad(&READ10, &[], 1536), (0x06, 0x2a, 0x09));
    assert_eq!(rig.good(&cdb::<10>(0x25, &[]), &[], 8)[..4], [0, 0, 0x10, 0x00]);
    rig.unit.resize(4097).unwrap();
    rig.good(&READ10, &[], 1536);
    assert!(rig.unit.resize(0).is_err());
    // A running task does not go beyond the new end.
    rig.meanwhile = Some(|unit| unit.resize(1).unwrap());
    assert_eq!(rig.bad(&READ10, &[], 1536), (0x05, 0x21, 0x00));
    rig.meanwhile = None;
    assert_eq!(rig.bad(&[0; 6], &[], 0), (0x06, 0x2a, 0x09));
    assert_eq!(rig.bad(&READ10, &[], 1536), (0x05, 0x21, 0x00));
}

#[test]
fn plain_transfers_use_the_initiators_buffers() {
    let mut rig = Rig::disk(disk_limits());
    let data = rig.good(&READ10, &[], 1536);
    assert_eq!(data, rig.medium[1024..2560]);
    let into = DataLocation::Initiator(0);
    let (offset, len) = (1024, 1536);
    assert_eq!(rig.steps[0], Step::Read { offset, len, into });
    rig.good(&WRITE10, &[9; 1536], 0);
    let from = DataLocation::Initiator(0);
    let durable = false;
    assert_eq!(
        rig.steps[0],
        Step::Write {
            offset,
            len,
            from,
            durable
        }
    );
    assert_eq!(rig.medium[1024..2560], [9; 1536]);
    // FUA, DPO
    let mut cdb = WRITE10;
    cdb[1] = 0x18;
    rig.good(&cdb, &[9; 1536], 0);
    assert!(matches!(rig.steps[0], Step::Write { durable: true, .. }));
}

#[test]
fn read_6_of_no_length_is_256_blocks() {
    let mut rig = Rig::disk(disk_limits());
    assert_eq!(rig.good(&[0x08, 0, 0, 1, 0, 0], &[], 1 << 17).len(), 1 << 17);
    // The upper bits of byte 1 are not part of the address.
    rig.good(&[0x08, 0xe0, 0, 1, 1, 0], &[], 512);
}

#[test]
fn the_end_of_the_medium() {
    let mut rig = Rig::disk(disk_limits());
    let beyond = (0x05, 0x21, 0x00);
    let at =
        |first: u32, count: u16| cdb::<10>(0x28, &[(2, &first.to_be_bytes()), (7, &count.to_be_bytes())]);
    rig.good(&at(4095, 1), &[], 512);
    assert_eq!(rig.bad(&at(4095, 2), &[], 1024), beyond);
    assert_eq!(rig.bad(&at(u32::MAX, 2), &[], 1024), beyond);
    rig.good(&at(4095, 0), &[], 0);
    assert_eq!(rig.bad(&at(4097, 0), &[], 0), beyond);
    for opcode in [0x88, 0x8a, 0x8e, 0x8f, 0x91, 0x93] {
        let cdb: [u8; 16] = cdb(opcode, &[(2, &u64::MAX.to_be_bytes()), (13, &[2])]);
        assert_eq!(rig.bad(&cdb, &[0; 1024], 1024), beyond);
    }
}

#[test]
fn transfers_above_the_limit_are_refused() {
    let limits = MediumLimits {
        max_transfer: 4096,
        ..disk_limits()
    };
    let mut rig = Rig::disk(limits);
    let cdb16 = |opcode, count: u8| cdb::<16>(opcode, &[(13, &[count])]);
    for opcode in [0x88, 0x8a, 0x8f] {
        rig.good(&cdb16(opcode, 8), &[0; 8192], 4096);
        assert_eq!(
            rig.field(&cdb16(opcode, 9), &[0; 8192], 8192),
            (0x24, true, 10, None)
        );
    }
}

#[test]
fn protection_information_is_refused() {
    let mut rig = Rig::disk(disk_limits());
    for opcode in [0x28, 0x2a, 0x2e, 0x2f, 0x41] {
        let cdb: [u8; 10] = cdb(opcode, &[(1, &[0x20]), (8, &[1])]);
        assert_eq!(rig.field(&cdb, &[0; 512], 512), (0x24, true, 1, Some(7)));
    }
}

#[test]
fn buffers_smaller_than_the_cdb_length_are_an_error() {
    let mut rig = Rig::disk(disk_limits());
    for (cdb, out, room) in [(READ10, 0, 1535), (WRITE10, 1535, 0), (WRITE10, 0, 4096)] {
        let (response, _) = rig.run(&cdb, &vec![0; out], room);
        assert!(response.overrun);
        assert_eq!(response.status, ScsiStatus::CheckCondition);
        assert_eq!(rig.steps.len(), 1);
    }
    let (response, _) = rig.run(&READ10, &[], 2000);
    assert_eq!((response.overrun, response.residual), (false, 464));
    let (response, _) = rig.run(&WRITE10, &[0; 2000], 0);
    assert_eq!((response.overrun, response.residual), (false, 464));
}

#[test]
fn flushes() {
    let mut rig = Rig::disk(disk_limits());
    for cdb in [&cdb::<10>(0x35, &[])[..], &cdb::<16>(0x91, &[(1, &[2])])] {
        rig.good(cdb, &[], 0);
        assert_eq!(rig.steps[0], Step::Flush);
    }
    let limits = MediumLimits {
        read_only: true,
        ..disk_limits()
    };
    let mut rig = Rig::disk(limits);
    rig.good(&cdb::<10>(0x35, &[]), &[], 0);
    assert_eq!(rig.steps.len(), 1);
}

#[test]
fn nothing_writes_a_read_only_disk() {
    let limits = MediumLimits {
        read_only: true,
        ..disk_limits()
    };
    let mut rig = Rig::disk(limits);
    let before = rig.medium.clone();
    for opcode in [0x0a, 0x2a, 0x2e, 0x41, 0x42, 0x89, 0x8a, 0x8e, 0x93, 0xaa, 0xae] {
        let cdb: [u8; 16] = cdb(opcode, &[(8, &[24]), (13, &[1])]);
        assert_eq!(
            rig.bad(&cdb, &[0; 1 << 17], 0),
            (0x07, 0x27, 0x00),
            "{opcode:02x}"
        );
    }
    assert_eq!(rig.medium, before);
}

fn same16(byte1: u8, first: u8, count: u32) -> [u8; 16] {
    cdb(0x93, &[(1, &[byte1]), (9, &[first]), (10, &count.to_be_bytes())])
}

#[test]
fn write_same_writes_zeroes_and_other_blocks() {
    let mut rig = Rig::disk(disk_limits());
    let zeroes = |unmap, durable| Step::WriteZeroes {
        offset: 512,
        len: 1024,
        unmap,
        durable,
    };
    rig.good(&same16(0x00, 1, 2), &[0; 512], 0);
    assert_eq!(rig.steps[1], zeroes(false, false));
    rig.good(&same16(0x08, 1, 2), &[0; 512], 0);
    assert_eq!(rig.steps[1], zeroes(true, false));
    // NDOB: no data.
    rig.good(&same16(0x09, 1, 2), &[], 0);
    assert_eq!(rig.steps[0], zeroes(true, false));
    rig.unit.modes.write_cache = false;
    rig.good(&same16(0x01, 1, 2), &[], 0);
    assert_eq!(rig.steps[0], zeroes(false, true));
    // 1 MiB of another block, in pieces.
    rig.good(&same16(0x00, 1, 2048), &[5; 512], 0);
    assert_eq!(rig.steps.len(), 1 + 4 + 1);
    assert!(rig.medium[512..512 + (1 << 20)].iter().all(|&b| b == 5));
}

#[test]
fn write_same_of_other_blocks_than_zeroes_is_bounded_like_a_write() {
    let limits = MediumLimits {
        max_transfer: 4096,
        ..disk_limits()
    };
    let mut rig = Rig::disk(limits);
    rig.good(&same16(0, 0, 2048), &[0; 512], 0);
    rig.good(&same16(0, 0, 8), &[5; 512], 0);
    assert_eq!(rig.field(&same16(0, 0, 9), &[5; 512], 0), (0x24, true, 10, None));
    let ten: [u8; 10] = cdb(0x41, &[(8, &[9])]);
    assert_eq!(rig.field(&ten, &[5; 512], 0), (0x24, true, 7, None));
    assert_eq!(rig.medium[8 * 512..9 * 512], [0; 512]);
}

#[test]
fn write_same_refusals() {
    let mut rig = Rig::disk(disk_limits());
    let bad = |rig: &mut Rig, byte1, count| rig.field(&same16(byte1, 0, count), &[0; 512], 0);
    assert_eq!(bad(&mut rig, 0x00, 0), (0x24, true, 10, None));
    assert_eq!(bad(&mut rig, 0x00, 2049), (0x24, true, 10, None));
    assert_eq!(bad(&mut rig, 0x10, 1), (0x24, true, 1, Some(4)));
    assert_eq!(bad(&mut rig, 0x04, 1), (0x24, true, 1, Some(2)));
    let ten: [u8; 10] = cdb(0x41, &[(1, &[1]), (8, &[1])]);
    assert_eq!(rig.field(&ten, &[0; 512], 0), (0x24, true, 1, Some(0)));
    let limits = MediumLimits {
        thin: false,
        ..disk_limits()
    };
    assert_eq!(bad(&mut Rig::disk(limits), 0x08, 1), (0x24, true, 1, Some(3)));
    let (response, _) = rig.run(&same16(0, 0, 1), &[0; 511], 0);
    assert!(response.overrun);
}

fn unmap_list(ranges: &[(u64, u32)]) -> Vec<u8> {
    let mut list = ((6 + ranges.len() * 16) as u16).to_be_bytes().to_vec();
    list.extend(((ranges.len() * 16) as u16).to_be_bytes());
    list.extend([0; 4]);
    for (first, count) in ranges {
        list.extend(first.to_be_bytes());
        list.extend(count.to_be_bytes());
        list.extend([0; 4]);
    }
    list
}

fn unmap(len: usize) -> [u8; 10] {
    cdb(0x42, &[(7, &(len as u16).to_be_bytes())])
}

#[test]
fn unmapping() {
    let mut rig = Rig::disk(disk_limits());
    let list = unmap_list(&[(1, 2), (9, 0), (4095, 1)]);
    rig.good(&unmap(list.len()), &list, 0);
    let discard = |offset, len| Step::Discard {
        offset,
        len,
        durable: false,
    };
    assert_eq!(rig.steps[1..3], [discard(512, 1024), discard(4095 * 512, 512)]);
    assert_eq!(rig.steps.len(), 4);
    // An empty list; a truncated list.
    rig.good(&unmap(0), &[], 0);
    rig.good(&unmap(8), &list[..8], 0);
    rig.good(&unmap(39), &list[..39], 0);
    assert_eq!(rig.steps.len(), 3);
    assert_eq!(rig.bad(&unmap(7), &list, 0), (0x05, 0x1a, 0x00));
    let anchor: [u8; 10] = cdb(0x42, &[(1, &[1]), (8, &[24])]);
    assert_eq!(rig.field(&anchor, &list, 0), (0x24, true, 1, Some(0)));
    // All or nothing.
    let before = rig.medium.clone();
    let list = unmap_list(&[(1, 2), (4095, 2)]);
    assert_eq!(rig.bad(&unmap(list.len()), &list, 0), (0x05, 0x21, 0x00));
    let list = unmap_list(&[(1, 2), (u64::MAX, 2)]);
    assert_eq!(rig.bad(&unmap(list.len()), &list, 0), (0x05, 0x21, 0x00));
    let list = unmap_list(&[(1, 1024), (1, 1025)]);
    assert_eq!(rig.field(&unmap(list.len()), &list, 0), (0x26, false, 32, None));
    let list = unmap_list(&[(1, 1); 256]);
    assert_eq!(rig.field(&unmap(list.len()), &list, 0), (0x26, false, 2, None));
    assert_eq!(rig.medium, before);
    let list = unmap_list(&[(1, 1); 255]);
    rig.good(&unmap(list.len()), &list, 0);
}

fn lba_status(first: u16, allocation: u16) -> [u8; 16] {
    cdb(
        0x9e,
        &[
            (1, &[0x12]),
            (8, &first.to_be_bytes()),
            (12, &allocation.to_be_bytes()),
        ],
    )
}

/// First block, number of blocks, and true if they are mapped.
fn extents(data: &[u8]) -> Vec<(u64, u32, bool)> {
    let len = u32::from_be_bytes(data[..4].try_into().unwrap()) as usize;
    assert_eq!(len, data.len() - 4);
    let parse = |d: &[u8; 16]| {
        let first = u64::from_be_bytes(d[..8].try_into().unwrap());
        let count = u32::from_be_bytes(d[8..12].try_into().unwrap());
        (first, count, d[12] == 0)
    };
    data[8..].as_chunks::<16>().0.iter().map(parse).collect()
}

#[test]
fn get_lba_status_reports_mapped_blocks() {
    let mut rig = Rig::disk(disk_limits());
    let list = unmap_list(&[(8, 16), (40, 8), (4088, 8)]);
    rig.good(&unmap(list.len()), &list, 0);
    let all = [
        (0, 8, true),
        (8, 16, false),
        (24, 16, true),
        (40, 8, false),
        (48, 4040, true),
        (4088, 8, false),
    ];
    assert_eq!(extents(&rig.good(&lba_status(0, 256), &[], 256)), all);
    let data = rig.good(&lba_status(12, 24), &[], 256);
    assert_eq!(extents(&data), [(12, 12, false)]);
    assert_eq!(
        extents(&rig.good(&lba_status(4095, 256), &[], 256)),
        [(4095, 1, false)]
    );
    assert_eq!(rig.bad(&lba_status(4096, 256), &[], 256), (0x05, 0x21, 0x00));
    assert_eq!(rig.good(&lba_status(0, 0), &[], 256), [0_u8; 0]);
}

#[test]
fn holes_smaller_than_blocks_are_mapped() {
    let limits = MediumLimits {
        block_size: 4096,
        blocks: 4,
        ..disk_limits()
    };
    let mut rig = Rig::disk(limits);
    rig.grain = 512;
    rig.holes.extend([512, 1024]);
    rig.holes.extend((8192..12288 + 512).step_by(512));
    let data = rig.good(&lba_status(0, 256), &[], 256);
    assert_eq!(extents(&data), [(0, 2, true), (2, 1, false), (3, 1, true)]);
}

#[test]
fn the_answer_to_get_lba_status_ends() {
    let limits = MediumLimits {
        blocks: 4096,
        ..disk_limits()
    };
    let mut rig = Rig::disk(limits);
    rig.grain = 512;
    rig.holes.extend((0..4096 * 512).step_by(1024));
    let data = rig.good(&lba_status(0, u16::MAX), &[], 1 << 16);
    assert_eq!(extents(&data).len(), 64);
    assert!(rig.steps.len() < 200);
}

#[test]
fn miscompares() {
    let mut rig = Rig::disk(disk_limits());
    let verify: [u8; 10] = cdb(0x2f, &[(1, &[2]), (8, &[1])]);
    let found = rig.medium[..512].to_vec();
    rig.good(&verify, &found, 0);
    let (response, _) = rig.run(&verify, &[0; 512], 0);
    assert_eq!(code(&response.sense), (0x0e, 0x1d, 0x00));
    // BYTCHK 10b is reserved; without BYTCHK the medium is read and no data is sent.
    let reserved: [u8; 10] = cdb(0x2f, &[(1, &[4]), (8, &[1])]);
    assert_eq!(rig.field(&reserved, &found, 0), (0x24, true, 1, Some(2)));
    let read_only: [u8; 10] = cdb(0x2f, &[(8, &[1])]);
    rig.good(&read_only, &[], 0);
    assert!(matches!(
        rig.steps[0],
        Step::Read {
            into: DataLocation::Scratch(_),
            ..
        }
    ));
    let too_long: [u8; 16] = cdb(0x89, &[(13, &[255])]);
    let out = [rig.medium[..255 * 512].to_vec(), vec![0; 255 * 512]].concat();
    rig.good(&too_long, &out, 0);
    let limits = MediumLimits {
        block_size: 4096,
        blocks: 100,
        ..disk_limits()
    };
    let mut rig = Rig::disk(limits);
    let at = |count| cdb::<16>(0x89, &[(13, &[count])]);
    assert_eq!(rig.field(&at(33), &[0; 66 * 4096], 0), (0x24, true, 13, None));
    let (response, _) = rig.run(&at(2), &[0; 4 * 4096 - 1], 0);
    assert!(response.overrun);
}

#[test]
fn data_that_is_pulled_again_counts_once() {
    let mut rig = Rig::disk(disk_limits());
    // WRITE AND VERIFY of a block, BYTCHK 01b, with two blocks in the data-out buffer.
    let (response, _) = rig.run(&cdb::<10>(0x2e, &[(1, &[2]), (8, &[1])]), &[7; 1024], 0);
    assert_eq!((response.status, response.residual), (ScsiStatus::Good, 512));
    // COMPARE AND WRITE uses another part of the buffer in each step.
    let out = [vec![7; 512], vec![8; 1024]].concat();
    let (response, _) = rig.run(&cdb::<16>(0x89, &[(13, &[1])]), &out, 0);
    assert_eq!((response.status, response.residual), (ScsiStatus::Good, 512));
}

#[test]
fn a_shared_disk_does_not_offer_compare_and_write() {
    for shareable in [false, true] {
        let limits = MediumLimits {
            shareable,
            ..disk_limits()
        };
        let mut rig = Rig::disk(limits);
        let found = rig.medium[..512].to_vec();
        let swap: [u8; 16] = cdb(0x89, &[(13, &[1])]);
        let (response, _) = rig.run(&swap, &[found, vec![7; 512]].concat(), 0);
        assert_eq!(response.status == ScsiStatus::Good, !shareable);
        assert_eq!(rig.medium[..512] == [7; 512], !shareable);
        // SUPPORT of REPORT SUPPORTED OPERATION CODES; MAXIMUM COMPARE AND WRITE LENGTH of the Block Limits page.
        let opcode = rig.good(&[0xa3, 0x0c, 1, 0x89, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256);
        assert_eq!(opcode[1], if shareable { 1 } else { 3 });
        let page = rig.good(&[0x12, 1, 0xb0, 1, 0, 0], &[], 256);
        assert_eq!(page[5], if shareable { 0 } else { 255 });
    }
}

#[test]
fn extents_of_any_length_are_taken() {
    use super::super::{Extent, ScsiCommand};
    // A medium that reports a byte at a time is not queried for the whole range.
    for (len, told) in [(1, 128), (0, 128), (u64::MAX, 4096)] {
        let mut rig = Rig::disk(disk_limits());
        let mut task = rig.unit.begin(ScsiCommand {
            cdb: &lba_status(0, 256),
            data_out: 0,
            data_in: 256,
            luns: &[],
        });
        let response = loop {
            match task.next(&mut rig.unit) {
                Step::Extent { .. } => task.complete_extent_step(Ok(Extent { allocated: true, len })),
                Step::Done(response) => break response,
                step => panic!("{step:?}"),
            }
        };
        assert_eq!(extents(&response.data), [(0, told, true)]);
    }
}
