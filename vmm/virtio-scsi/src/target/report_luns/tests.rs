use super::super::tests::{Rig, code, disk_limits};
use super::*;

fn luns(numbers: &[u16]) -> Vec<Lun> {
    numbers.iter().map(|&n| Lun::new(n).unwrap()).collect()
}

fn ask(cdb: &[u8], luns: &[Lun]) -> ScsiResponse {
    absent(ScsiCommand {
        cdb,
        data_out: 0,
        data_in: 256,
        luns,
    })
}

#[test]
fn luns_in_both_addressing_methods() {
    let mut rig = Rig::disk(disk_limits());
    rig.luns = luns(&[0, 255, 256, 16383]);
    let data = rig.good(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256);
    let mut expected = vec![0, 0, 0, 32, 0, 0, 0, 0];
    for first in [[0x00, 0], [0x00, 255], [0x41, 0], [0x7f, 255]] {
        expected.extend(first);
        expected.extend([0; 6]);
    }
    assert_eq!(data, expected);
    // The length is that of the whole list.
    let data = rig.good(&[0xa0, 0, 2, 0, 0, 0, 0, 0, 0, 16, 0, 0], &[], 256);
    assert_eq!(data, expected[..16]);
    // Well known logical units.
    let data = rig.good(&[0xa0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256);
    assert_eq!(data, [0; 8]);
    assert_eq!(
        rig.field(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 15, 0, 0], &[], 256),
        (0x24, true, 6, None)
    );
    assert_eq!(
        rig.field(&[0xa0, 0, 3, 0, 0, 0, 0, 0, 0, 16, 0, 0], &[], 256),
        (0x24, true, 2, None)
    );
}

#[test]
fn addresses_of_other_levels_are_none() {
    assert_eq!(Lun::from_bytes([0, 5, 0, 0, 0, 0, 0, 0]), Lun::new(5));
    assert_eq!(Lun::from_bytes([0x40, 5, 0, 0, 0, 0, 0, 0]), Lun::new(5));
    // Another bus, a second level, extended addressing.
    assert_eq!(Lun::from_bytes([1, 5, 0, 0, 0, 0, 0, 0]), None);
    assert_eq!(Lun::from_bytes([0, 5, 0, 1, 0, 0, 0, 0]), None);
    assert_eq!(Lun::from_bytes([0xc1, 1, 0, 0, 0, 0, 0, 0]), None);
    assert_eq!(Lun::new(16384), None);
}

#[test]
fn an_absent_unit_answers_inquiry_and_request_sense() {
    let others = luns(&[3]);
    let response = ask(&[0x12, 0, 0, 0, 36, 0], &others);
    assert_eq!((response.status, response.data.len()), (ScsiStatus::Good, 36));
    // Qualifier 011b, no device type.
    assert_eq!(response.data[..5], [0x7f, 0, 6, 0x12, 31]);
    assert_eq!(response.residual, 220);
    let response = ask(&[0x03, 0, 0, 0, 252, 0], &others);
    assert_eq!(code(&response.data), (0x05, 0x25, 0x00));
    let response = ask(&[0x03, 1, 0, 0, 252, 0], &others);
    assert_eq!(response.data, [0x72, 0x05, 0x25, 0, 0, 0, 0, 0]);
    let response = ask(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &others);
    assert_eq!(response.data[..10], [0, 0, 0, 8, 0, 0, 0, 0, 0, 3]);
    for cdb in [&[0; 6][..], &[0x28; 10], &[0x12, 1, 0x83, 0, 36, 0], &[], &[0x12]] {
        let response = ask(cdb, &others);
        assert_eq!(response.status, ScsiStatus::CheckCondition);
        assert_eq!(code(&response.sense), (0x05, 0x25, 0x00));
    }
}

#[test]
fn changed_luns_are_reported_once() {
    let mut rig = Rig::disk(disk_limits());
    let ready = [0; 6];
    let report = [0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    rig.unit.luns_changed();
    rig.unit.luns_changed();
    assert_eq!(rig.bad(&ready, &[], 0), (0x06, 0x3f, 0x0e));
    rig.good(&ready, &[], 0);
    // REPORT LUNS is as good, wherever on the target it was answered.
    rig.unit.luns_changed();
    rig.good(&report, &[], 256);
    rig.good(&ready, &[], 0);
    rig.unit.luns_changed();
    rig.unit.luns_reported();
    rig.good(&ready, &[], 0);
    let command = |cdb| ScsiCommand {
        cdb,
        data_out: 0,
        data_in: 64,
        luns: &[],
    };
    assert!(rig.unit.begin(command(&report)).reports_luns());
    assert!(!rig.unit.begin(command(&ready)).reports_luns());
}
