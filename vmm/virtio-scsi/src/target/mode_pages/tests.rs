use super::super::tests::{Rig, disk_limits};
use super::super::unit_attention::UnitAttention;
use super::super::{MediumLimits, Step};

const SENSE6: u8 = 0x1a;
const SENSE10: u8 = 0x5a;

fn sense6(rig: &mut Rig, byte1: u8, page: u8, subpage: u8) -> Vec<u8> {
    rig.good(&[SENSE6, byte1, page, subpage, 0xff, 0], &[], 255)
}

fn select6(list: &[u8]) -> [u8; 6] {
    [0x15, 0x10, 0, 0, list.len() as u8, 0]
}

fn caching(wce: u8) -> Vec<u8> {
    let page = [0, 0, 0, 0, 0x08, 0x12, wce];
    page.into_iter().chain([0; 17]).collect()
}

#[test]
fn headers_and_block_descriptors() {
    let mut rig = Rig::disk(disk_limits());
    let data = sense6(&mut rig, 0, 0x08, 0);
    assert_eq!(data.len(), 4 + 8 + 20);
    // Length, medium type, DPOFUA, block descriptor: 4096 blocks of 512 bytes.
    assert_eq!(data[..12], [31, 0, 0x10, 8, 0, 0, 0x10, 0, 0, 0, 2, 0]);
    assert_eq!(data[12..15], [0x08, 0x12, 0x04]);
    // DBD
    assert_eq!(
        sense6(&mut rig, 8, 0x08, 0)[..7],
        [23, 0, 0x10, 0, 0x08, 0x12, 0x04]
    );
    // LLBAA
    let data = rig.good(&[SENSE10, 0x10, 0x08, 0, 0, 0, 0, 1, 0, 0], &[], 256);
    assert_eq!(data[..8], [0, 6 + 16 + 20, 0, 0x10, 1, 0, 0, 16]);
    assert_eq!(data[8..24], [0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 2, 0]);
}

#[test]
fn all_pages_with_and_without_subpages() {
    let mut rig = Rig::disk(disk_limits());
    let all = sense6(&mut rig, 8, 0x3f, 0);
    let codes = |mut rest: &[u8]| {
        let mut codes = Vec::new();
        while let [code, len, ..] = rest {
            codes.push(*code);
            rest = &rest[2 + usize::from(*len)..];
        }
        codes
    };
    assert_eq!(codes(&all[4..]), [0x01, 0x08, 0x0a, 0x1c]);
    assert_eq!(sense6(&mut rig, 8, 0x3f, 0xff), all);
    let all = sense6(&mut Rig::cd(None), 0, 0x3f, 0);
    assert_eq!(codes(&all[4..]), [0x01, 0x08, 0x0a, 0x2a]);
    assert_eq!(
        rig.field(&[SENSE6, 0, 0x05, 0, 0xff, 0], &[], 255),
        (0x24, true, 2, Some(5))
    );
    assert_eq!(
        rig.field(&[SENSE6, 0, 0x08, 1, 0xff, 0], &[], 255),
        (0x24, true, 3, None)
    );
}

#[test]
fn a_read_only_disk_is_write_protected() {
    let limits = MediumLimits {
        read_only: true,
        ..disk_limits()
    };
    let mut rig = Rig::disk(limits);
    assert_eq!(sense6(&mut rig, 8, 0x08, 0)[..7], [23, 0, 0x90, 0, 0x08, 0x12, 0]);
    // Nothing changeable.
    assert_eq!(sense6(&mut rig, 8, 0x48, 0)[4..7], [0x08, 0x12, 0]);
}

#[test]
fn the_cache_can_be_switched_off_and_on() {
    let mut rig = Rig::disk(disk_limits());
    assert_eq!(sense6(&mut rig, 8, 0x48, 0)[6], 0x04);
    rig.good(&select6(&caching(0)), &caching(0), 0);
    // What was cached is flushed before the status.
    assert!(rig.steps.contains(&Step::Flush));
    assert_eq!(sense6(&mut rig, 8, 0x08, 0)[6], 0x00);
    // Defaults stay.
    assert_eq!(sense6(&mut rig, 8, 0x88, 0)[6], 0x04);
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    rig.good(&write, &[1; 512], 0);
    assert!(matches!(rig.steps[0], Step::Write { durable: true, .. }));
    rig.good(&select6(&caching(4)), &caching(4), 0);
    assert!(!rig.steps.contains(&Step::Flush));
    rig.good(&write, &[1; 512], 0);
    assert!(matches!(rig.steps[0], Step::Write { durable: false, .. }));
    rig.good(&select6(&caching(0)), &caching(0), 0);
    rig.unit.reset(UnitAttention::UnitReset);
    assert!(rig.unit.write_cache());
}

#[test]
fn the_cache_stays_on_if_its_flush_fails() {
    let mut rig = Rig::disk(disk_limits());
    // After the step that fetches the list.
    rig.fail = Some((1, std::io::ErrorKind::Other));
    assert_eq!(rig.bad(&select6(&caching(0)), &caching(0), 0), (0x03, 0x0c, 0x00));
    assert_eq!(rig.steps[1], Step::Flush);
    assert!(rig.unit.write_cache());
}

#[test]
fn a_disk_without_a_cache_gets_none() {
    let limits = MediumLimits {
        write_cache: false,
        ..disk_limits()
    };
    let mut rig = Rig::disk(limits);
    assert_eq!(
        rig.field(&select6(&caching(4)), &caching(4), 0),
        (0x26, false, 6, Some(2))
    );
    rig.good(&select6(&caching(0)), &caching(0), 0);
}

#[test]
fn descriptor_format_sense() {
    let mut rig = Rig::disk(disk_limits());
    let mut list: Vec<u8> = [0, 0, 0, 0, 0x0a, 0x0a, 0x04, 0x10].to_vec();
    list.resize(16, 0);
    rig.good(&select6(&list), &list, 0);
    let (response, _) = rig.run(&[0x12, 2, 0, 0, 36, 0], &[], 36);
    assert_eq!(
        response.sense,
        [
            0x72, 0x05, 0x24, 0x00, 0, 0, 0, 8, 0x02, 0x06, 0, 0, 0xc9, 0, 1, 0
        ]
    );
}

#[test]
fn select_through_ten_bytes_with_a_block_descriptor() {
    let mut rig = Rig::disk(disk_limits());
    let mut list = vec![0, 0, 0, 0, 0, 0, 0, 8];
    list.extend([0, 0, 0x10, 0, 0, 0, 2, 0]);
    list.extend(&caching(0)[4..]);
    let cdb = [0x55, 0x10, 0, 0, 0, 0, 0, 0, list.len() as u8, 0];
    rig.good(&cdb, &list, 0);
    assert!(!rig.unit.write_cache());
    // Other block lengths and counts are rejected; 0 blocks leave the number unchanged.
    list[8..12].fill(0);
    rig.good(&cdb, &list, 0);
    list[14] = 8;
    assert_eq!(rig.field(&cdb, &list, 0), (0x26, false, 14, None));
    list[14] = 2;
    list[10] = 1;
    assert_eq!(rig.field(&cdb, &list, 0), (0x26, false, 10, None));
    list[7] = 7;
    assert_eq!(rig.field(&cdb, &list, 0), (0x26, false, 7, None));
}

#[test]
fn wrong_lists_change_nothing() {
    let mut rig = Rig::disk(disk_limits());
    let good = caching(0);
    let length_error = (0x05, 0x1a, 0x00);
    assert_eq!(rig.bad(&select6(&good[..3]), &good[..3], 0), length_error);
    assert_eq!(rig.bad(&select6(&good[..20]), &good[..20], 0), length_error);
    let mut list = good.clone();
    list[3] = 30;
    assert_eq!(rig.bad(&select6(&list), &list, 0), length_error);
    for (byte, value, bit) in [
        (4, 0x05, None),
        (4, 0x48, None),
        (5, 0x0a, None),
        (6, 0x01, Some(0)),
        (23, 0xff, Some(7)),
    ] {
        let mut list = good.clone();
        list[byte] = value;
        let field = (0x26, false, byte as u16, bit);
        assert_eq!(rig.field(&select6(&list), &list, 0), field, "byte {byte}");
    }
    // The first page is right, the second is not.
    let mut list = good.clone();
    list.extend([0x0a, 0x0a, 0xff]);
    list.extend([0; 9]);
    assert_eq!(rig.field(&select6(&list), &list, 0), (0x26, false, 26, Some(7)));
    assert!(rig.unit.write_cache());
    // SP, no PF, and more than there is.
    assert_eq!(
        rig.field(&[0x15, 0x11, 0, 0, 24, 0], &good, 0),
        (0x24, true, 1, Some(0))
    );
    assert_eq!(
        rig.field(&[0x15, 0x00, 0, 0, 24, 0], &good, 0),
        (0x24, true, 1, Some(4))
    );
    let (response, _) = rig.run(&[0x15, 0x10, 0, 0, 25, 0], &good, 0);
    assert!(response.overrun);
    rig.good(&[0x15, 0x10, 0, 0, 0, 0], &[], 0);
}

#[test]
fn saved_values_are_refused() {
    let mut rig = Rig::disk(disk_limits());
    assert_eq!(
        rig.bad(&[SENSE6, 0, 0xc8, 0, 0xff, 0], &[], 255),
        (0x05, 0x39, 0x00)
    );
}

#[test]
fn linux_reads_the_capabilities_page_of_a_drive() {
    let mut rig = Rig::cd(Some(10));
    let data = rig.good(&[SENSE6, 0, 0x2a, 0, 128, 0], &[], 128);
    let page = &data[4..];
    assert_eq!(data[..4], [25, 0, 0, 0]);
    assert_eq!(page[..2], [0x2a, 0x14]);
    // DVD-ROM is read, nothing is written; a tray that opens.
    assert_eq!((page[2] & 0x08, page[3]), (0x08, 0));
    assert_eq!((page[6] >> 5, page[6] & 0x08), (1, 0x08));
    assert_eq!(page[6] & 0x02, 0);
    rig.good(&[0x1e, 0, 0, 0, 1, 0], &[], 0);
    let data = rig.good(&[SENSE10, 0, 0x2a, 0, 0, 0, 0, 0, 128, 0], &[], 128);
    assert_eq!(data[8 + 6] & 0x02, 0x02);
}
