use super::super::MediumLimits;
use super::super::tests::{Rig, disk_limits};

fn one(rig: &mut Rig, options: u8, opcode: u8, action: u16) -> Vec<u8> {
    let [high, low] = action.to_be_bytes();
    rig.good(
        &[0xa3, 0x0c, options, opcode, high, low, 0, 0, 1, 0, 0, 0],
        &[],
        256,
    )
}

/// All descriptors: opcode, service action if there is one, length of the CDB.
fn all(rig: &mut Rig) -> Vec<(u8, Option<u16>, u16)> {
    let data = rig.good(&[0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0], &[], 4096);
    let len = u32::from_be_bytes(data[..4].try_into().unwrap());
    assert_eq!(len as usize, data.len() - 4);
    let (descriptors, rest) = data[4..].as_chunks::<8>();
    assert!(rest.is_empty());
    descriptors
        .iter()
        .map(|d| {
            let action = u16::from_be_bytes([d[2], d[3]]);
            (
                d[0],
                (d[5] & 1 != 0).then_some(action),
                u16::from_be_bytes([d[6], d[7]]),
            )
        })
        .collect()
}

#[test]
fn both_report_forms_match_the_served_commands() {
    let thick = MediumLimits {
        thin: false,
        ..disk_limits()
    };
    for limits in [disk_limits(), thick] {
        let mut rig = Rig::disk(limits);
        let all = all(&mut rig);
        for opcode in 0..=255 {
            for action in 0..32 {
                let known = all
                    .iter()
                    .find(|(o, a, _)| *o == opcode && a.is_none_or(|a| a == action));
                let mut cdb = [0; 16];
                cdb[0] = opcode;
                cdb[1] = action as u8;
                // Commands of all zeroes do little, and REPORT LUNS and others fail with another code.
                let (response, _) = rig.run(&cdb, &[], 0);
                let has_actions = all.iter().any(|(o, a, _)| *o == opcode && a.is_some());
                let refused = response.sense.get(12) == Some(&0x20)
                    || has_actions && response.sense.get(15..18) == Some(&[0xcc, 0, 1]);
                rig.unit.stopped = false;
                assert_eq!(
                    known.is_none(),
                    refused,
                    "opcode {opcode:02x}/{action:02x}: {response:02x?}"
                );
                let data = one(&mut rig, 3, opcode, action);
                let served = known.is_some() && (has_actions || action == 0);
                assert_eq!(data[1], if served { 3 } else { 1 });
                if let (Some((_, _, len)), true) = (known, served) {
                    assert_eq!(usize::from(*len), data.len() - 4);
                    assert_eq!(data[4], opcode);
                    assert!(!has_actions || data[5] & 0x1f == action as u8);
                }
            }
        }
    }
}

#[test]
fn usage_data_has_the_length_of_the_opcode_group() {
    for (opcode, _, len) in all(&mut Rig::disk(disk_limits())) {
        let expected = match opcode >> 5 {
            0 => 6,
            1 | 2 => 10,
            4 => 16,
            _ => 12,
        };
        assert_eq!(len, expected, "opcode {opcode:02x}");
    }
}

#[test]
fn linux_queries_are_answered() {
    let mut rig = Rig::disk(disk_limits());
    // INQUIRY by opcode; WRITE SAME (16) likewise; READ CAPACITY (16) by service action.
    assert_eq!(
        one(&mut rig, 1, 0x12, 0),
        [0, 3, 0, 6, 0x12, 0x01, 0xff, 0xff, 0xff, 0x04]
    );
    assert_eq!(one(&mut rig, 1, 0x93, 0)[..6], [0, 3, 0, 16, 0x93, 0xff]);
    assert_eq!(one(&mut rig, 2, 0x9e, 0x10)[..6], [0, 3, 0, 16, 0x9e, 0x10]);
    assert_eq!(one(&mut rig, 1, 0x00, 0), [0, 3, 0, 6, 0, 0, 0, 0, 0, 4]);
    // ATA PASS-THROUGH
    assert_eq!(one(&mut rig, 1, 0x85, 0), [0, 1, 0, 0]);
    assert_eq!(one(&mut rig, 2, 0x9e, 0x11), [0, 1, 0, 0]);
}

#[test]
fn options_that_do_not_fit_the_opcode() {
    let mut rig = Rig::disk(disk_limits());
    let bad = (0x24, true, 2, Some(2));
    for (options, opcode) in [(1, 0x9e), (2, 0x12), (4, 0x12), (7, 0x12)] {
        let cdb = [0xa3, 0x0c, options, opcode, 0, 0, 0, 0, 1, 0, 0, 0];
        assert_eq!(rig.field(&cdb, &[], 256), bad);
    }
}

#[test]
fn timeouts_are_reported_on_request() {
    let mut rig = Rig::disk(disk_limits());
    let plain = all(&mut rig).len();
    let data = rig.good(&[0xa3, 0x0c, 0x80, 0, 0, 0, 0, 0, 0x20, 0, 0, 0], &[], 8192);
    assert_eq!(data.len(), 4 + plain * 20);
    assert_eq!(data[4 + 5] & 2, 2);
    assert_eq!(data[12..24], [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 60]);
    let data = one(&mut rig, 0x81, 0x12, 0);
    assert_eq!(data[1], 0x83);
    assert_eq!(data.len(), 4 + 6 + 12);
}

#[test]
fn task_management_functions() {
    let mut rig = Rig::disk(disk_limits());
    let data = rig.good(&[0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0], &[], 16);
    assert_eq!(data, [0xdc, 0x03, 0, 0]);
    let data = rig.good(&[0xa3, 0x0d, 0x80, 0, 0, 0, 0, 0, 0, 16, 0, 0], &[], 16);
    assert_eq!((data.len(), data[3]), (16, 12));
    assert_eq!(
        rig.field(&[0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0], &[], 3),
        (0x24, true, 6, None)
    );
}
