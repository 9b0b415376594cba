use super::super::tests::{Rig, cdb, disk_limits};
use super::super::{DeviceKind, Identity, LogicalUnit, MediumLimits};

fn vpd(rig: &mut Rig, page: u8) -> Vec<u8> {
    rig.good(&[0x12, 1, page, 0x01, 0x00, 0], &[], 256)
}

/// The names that udev's `scsi_id` gives to a unit: designators of type 0 are prefixed with their type, vendor and
/// product, then blanks are folded.
fn by_id(rig: &mut Rig) -> String {
    let standard = rig.good(&[0x12, 0, 0, 0, 0xff, 0], &[], 255);
    let page = vpd(rig, 0x83);
    assert_eq!(page.len(), 4 + usize::from(page[3]));
    // ASCII; associated with the logical unit, vendor specific.
    assert_eq!(page[4..7], [0x02, 0x00, 0x00]);
    let id = &page[8..8 + usize::from(page[7])];
    let all = [&standard[8..16], &standard[16..32], id].concat();
    let words: Vec<_> = all.split(|&b| b == b' ').filter(|w| !w.is_empty()).collect();
    format!("scsi-0{}", String::from_utf8(words.join(&b'_')).unwrap())
}

#[test]
fn standard_data_of_a_disk() {
    let data = Rig::disk(disk_limits()).good(&[0x12, 0, 0, 0, 0xff, 0], &[], 255);
    assert_eq!(data.len(), 74);
    // Direct access, fixed, SPC-4, HISUP and format 2, additional length, CMDQUE.
    assert_eq!(data[..8], [0x00, 0x00, 0x06, 0x12, 69, 0, 0, 0x02]);
    assert_eq!(&data[8..36], b"QEMU    QEMU HARDDISK   2.5+");
    assert_eq!(data[58..64], [0x00, 0xa0, 0x04, 0x60, 0x04, 0xc0]);
}

#[test]
fn standard_data_of_a_drive() {
    let data = Rig::cd(None).good(&[0x12, 0, 0, 0, 0xff, 0], &[], 255);
    assert_eq!(data[..8], [0x05, 0x80, 0x06, 0x12, 69, 0, 0, 0x02]);
    assert_eq!(&data[8..36], b"QEMU    QEMU CD-ROM     2.5+");
}

#[test]
fn answers_are_cut_to_the_allocation_length() {
    let mut rig = Rig::disk(disk_limits());
    let all = rig.good(&[0x12, 0, 0, 0, 0xff, 0], &[], 255);
    for allocation in [0, 1, 5, 36] {
        let data = rig.good(&[0x12, 0, 0, 0, allocation, 0], &[], 255);
        // ADDITIONAL LENGTH does not change with it.
        assert_eq!(data, all[..allocation.into()]);
    }
}

#[test]
fn names_udev_makes() {
    assert_eq!(
        by_id(&mut Rig::disk(disk_limits())),
        "scsi-0QEMU_QEMU_HARDDISK_disk1"
    );
    assert_eq!(by_id(&mut Rig::cd(Some(10))), "scsi-0QEMU_QEMU_CD-ROM_cd1");
    let identity = Identity::new(DeviceKind::Disk, None, "scratch");
    let mut rig = Rig::new(LogicalUnit::disk(identity, disk_limits()).unwrap());
    assert_eq!(by_id(&mut rig), "scsi-0QEMU_QEMU_HARDDISK_scratch");
    // An empty serial number is none.
    assert_eq!(Identity::new(DeviceKind::Disk, Some(""), "x").serial, None);
}

#[test]
fn a_serial_number_of_any_kind_fits() {
    let identity = Identity::new(DeviceKind::Disk, Some(&"ä\n".repeat(4000)), "x");
    let mut rig = Rig::new(LogicalUnit::disk(identity, disk_limits()).unwrap());
    for page in [0x80, 0x83] {
        let data = vpd(&mut rig, page);
        assert!(data[8..].iter().all(|&b| b == b'_'));
        assert!(data.len() <= 254, "more than scsi_id reads");
    }
}

#[test]
fn supported_pages() {
    let mut rig = Rig::disk(disk_limits());
    assert_eq!(
        vpd(&mut rig, 0x00),
        [0, 0, 0, 6, 0x00, 0x80, 0x83, 0xb0, 0xb1, 0xb2]
    );
    assert_eq!(vpd(&mut rig, 0x80), *b"\x00\x80\x00\x05disk1");
    assert_eq!(vpd(&mut Rig::cd(None), 0x00), [5, 0, 0, 3, 0x00, 0x80, 0x83]);
    let anonymous = Identity::new(DeviceKind::Disk, None, "");
    let mut rig = Rig::new(LogicalUnit::disk(anonymous, disk_limits()).unwrap());
    assert_eq!(vpd(&mut rig, 0x00), [0, 0, 0, 5, 0x00, 0x83, 0xb0, 0xb1, 0xb2]);
    assert_eq!(vpd(&mut rig, 0x83), [0, 0x83, 0, 0]);
    assert_eq!(
        rig.field(&[0x12, 1, 0x80, 0, 0xff, 0], &[], 255),
        (0x24, true, 2, None)
    );
}

#[test]
fn every_supported_page_is_there() {
    for mut rig in [Rig::disk(disk_limits()), Rig::cd(None)] {
        for page in vpd(&mut rig, 0x00)[4..].to_vec() {
            let data = vpd(&mut rig, page);
            assert_eq!(data[1], page);
            assert_eq!(data.len(), 4 + usize::from(data[3]));
        }
    }
}

#[test]
fn block_limits_of_a_thin_disk() {
    let limits = MediumLimits {
        block_size: 4096,
        blocks: 1000,
        physical_exponent: 2,
        optimal_io: 1 << 16,
        max_transfer: 1 << 20,
        discard_granularity: 8192,
        max_unmap: 1 << 30,
        ..MediumLimits::default()
    };
    let page = vpd(&mut Rig::disk(limits), 0xb0);
    let word = |at: usize| u32::from_be_bytes(page[at..at + 4].try_into().unwrap());
    assert_eq!(page.len(), 64);
    assert_eq!(page[..8], [0, 0xb0, 0, 0x3c, 1, 32, 0, 4]);
    assert_eq!((word(8), word(12), word(16)), (256, 16, 0));
    assert_eq!((word(20), word(24), word(28), word(32)), (1 << 18, 255, 2, 0));
    assert_eq!((word(36), word(40)), (0, 1 << 18));
}

#[test]
fn a_thick_disk_reports_no_provisioning() {
    let limits = MediumLimits {
        thin: false,
        rotational: true,
        ..disk_limits()
    };
    let mut rig = Rig::disk(limits);
    assert!(vpd(&mut rig, 0xb0)[20..36].iter().all(|&b| b == 0));
    assert_eq!(vpd(&mut rig, 0xb1)[..6], [0, 0xb1, 0, 0x3c, 0x1c, 0x20]);
    assert_eq!(vpd(&mut rig, 0xb2), [0, 0xb2, 0, 4, 0, 0, 0, 0]);
    assert_eq!(rig.bad(&cdb::<10>(0x42, &[]), &[], 0), (0x05, 0x20, 0x00));
    let mut rig = Rig::disk(disk_limits());
    assert_eq!(vpd(&mut rig, 0xb1)[4..6], [0x00, 0x01]);
    assert_eq!(vpd(&mut rig, 0xb2), [0, 0xb2, 0, 4, 0, 0xe4, 2, 0]);
    let mut rig = Rig::disk(MediumLimits {
        unmapped_are_zeroes: false,
        ..disk_limits()
    });
    assert_eq!(vpd(&mut rig, 0xb2), [0, 0xb2, 0, 4, 0, 0xe0, 2, 0]);
}

#[test]
fn pages_without_evpd_and_unknown_ones_are_refused() {
    let mut rig = Rig::disk(disk_limits());
    assert_eq!(
        rig.field(&[0x12, 0, 0x80, 0, 36, 0], &[], 36),
        (0x24, true, 2, None)
    );
    assert_eq!(
        rig.field(&[0x12, 1, 0x42, 0, 36, 0], &[], 36),
        (0x24, true, 2, None)
    );
    assert_eq!(
        rig.field(&[0x12, 2, 0, 0, 36, 0], &[], 36),
        (0x24, true, 1, Some(1))
    );
    // NACA
    assert_eq!(
        rig.field(&[0x12, 0, 0, 0, 36, 4], &[], 36),
        (0x24, true, 5, Some(2))
    );
}
