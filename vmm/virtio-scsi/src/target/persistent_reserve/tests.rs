use super::super::tests::{Rig, disk_limits};
use super::super::unit_attention::UnitAttention;
use super::super::{MediumLimits, ScsiStatus};

const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const RELEASE: u8 = 2;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const PREEMPT_AND_ABORT: u8 = 5;
const REGISTER_AND_IGNORE: u8 = 6;

const GOOD: Result<(), u8> = Ok(());
const CONFLICT: Result<(), u8> = Err(0x18);

/// The status code, if it is not GOOD.
fn out(rig: &mut Rig, action: u8, kind: u8, key: u64, service: u64) -> Result<(), u8> {
    let mut list = key.to_be_bytes().to_vec();
    list.extend(service.to_be_bytes());
    list.extend([0; 8]);
    let (response, _) = rig.run(&[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], &list, 0);
    match response.status {
        ScsiStatus::Good => Ok(()),
        status => Err(status as u8),
    }
}

fn read(rig: &mut Rig, action: u8) -> Vec<u8> {
    rig.good(&[0x5e, action, 0, 0, 0, 0, 0, 1, 0, 0], &[], 256)
}

/// PRGENERATION, the key, the reservation's key and type.
fn state(rig: &mut Rig) -> (u32, Option<u64>, Option<(u64, u8)>) {
    let number = |bytes: &[u8]| bytes.iter().fold(0, |n, &b| n << 8 | u64::from(b));
    let keys = read(rig, 0);
    let held = read(rig, 1);
    assert_eq!(keys[..4], held[..4]);
    assert_eq!(number(&keys[4..8]) as usize, keys.len() - 8);
    assert_eq!(number(&held[4..8]) as usize, held.len() - 8);
    let key = (keys.len() > 8).then(|| number(&keys[8..16]));
    let held = (held.len() > 8).then(|| (number(&held[8..16]), held[21]));
    (number(&keys[..4]) as u32, key, held)
}

#[test]
fn the_life_of_a_reservation() {
    let mut rig = Rig::disk(disk_limits());
    assert_eq!(state(&mut rig), (0, None, None));
    assert_eq!(out(&mut rig, RESERVE, 1, 7, 0), CONFLICT);
    assert_eq!(out(&mut rig, REGISTER, 0, 0, 7), GOOD);
    assert_eq!(state(&mut rig), (1, Some(7), None));
    assert_eq!(out(&mut rig, RESERVE, 1, 8, 0), CONFLICT);
    assert_eq!(out(&mut rig, RESERVE, 1, 7, 0), GOOD);
    assert_eq!(out(&mut rig, RESERVE, 1, 7, 0), GOOD);
    assert_eq!(out(&mut rig, RESERVE, 3, 7, 0), CONFLICT);
    assert_eq!(state(&mut rig), (1, Some(7), Some((7, 1))));
    // Its holder reads and writes.
    rig.good(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[1; 512], 0);
    // The key can change under it.
    assert_eq!(out(&mut rig, REGISTER, 0, 7, 9), GOOD);
    assert_eq!(state(&mut rig), (2, Some(9), Some((9, 1))));
    assert_eq!(out(&mut rig, RELEASE, 3, 9, 0), Err(0x02));
    assert_eq!(out(&mut rig, RELEASE, 1, 7, 0), CONFLICT);
    assert_eq!(out(&mut rig, RELEASE, 1, 9, 0), GOOD);
    assert_eq!(out(&mut rig, RELEASE, 1, 9, 0), GOOD);
    assert_eq!(state(&mut rig), (2, Some(9), None));
    assert_eq!(out(&mut rig, CLEAR, 0, 7, 0), CONFLICT);
    assert_eq!(out(&mut rig, CLEAR, 0, 9, 0), GOOD);
    assert_eq!(state(&mut rig), (3, None, None));
}

#[test]
fn registering() {
    let mut rig = Rig::disk(disk_limits());
    // The nexus is not registered, so it has no key but 0.
    assert_eq!(out(&mut rig, REGISTER, 0, 1, 7), CONFLICT);
    assert_eq!(out(&mut rig, REGISTER, 0, 0, 0), GOOD);
    assert_eq!(out(&mut rig, REGISTER_AND_IGNORE, 0, 1, 0), GOOD);
    assert_eq!(state(&mut rig), (0, None, None));
    assert_eq!(out(&mut rig, REGISTER_AND_IGNORE, 0, 1, 7), GOOD);
    assert_eq!(out(&mut rig, REGISTER, 0, 0, 8), CONFLICT);
    assert_eq!(out(&mut rig, REGISTER_AND_IGNORE, 0, 0, 8), GOOD);
    assert_eq!(state(&mut rig), (2, Some(8), None));
    // Unregistering releases.
    assert_eq!(out(&mut rig, RESERVE, 5, 8, 0), GOOD);
    assert_eq!(out(&mut rig, REGISTER, 0, 8, 0), GOOD);
    assert_eq!(state(&mut rig), (3, None, None));
}

#[test]
fn preempting() {
    for action in [PREEMPT, PREEMPT_AND_ABORT] {
        let mut rig = Rig::disk(disk_limits());
        assert_eq!(out(&mut rig, action, 1, 7, 7), CONFLICT);
        assert_eq!(out(&mut rig, REGISTER, 0, 0, 7), GOOD);
        assert_eq!(out(&mut rig, RESERVE, 1, 7, 0), GOOD);
        assert_eq!(out(&mut rig, action, 3, 8, 7), CONFLICT);
        assert_eq!(out(&mut rig, action, 3, 7, 8), CONFLICT);
        // Key 0 means something for all registrants only.
        assert_eq!(out(&mut rig, action, 3, 7, 0), Err(0x02));
        // The holder preempts itself, and holds another type then.
        assert_eq!(out(&mut rig, action, 7, 7, 7), GOOD);
        assert_eq!(state(&mut rig), (2, Some(7), Some((0, 7))));
        assert_eq!(out(&mut rig, action, 8, 7, 0), GOOD);
        assert_eq!(state(&mut rig), (3, Some(7), Some((0, 8))));
        // With all registrants a key names a registration, and the last one takes the reservation along.
        assert_eq!(out(&mut rig, action, 8, 7, 7), GOOD);
        assert_eq!(state(&mut rig), (4, None, None));
    }
}

#[test]
fn full_status_and_capabilities() {
    let mut rig = Rig::disk(disk_limits());
    assert_eq!(read(&mut rig, 2), [0, 8, 0, 0x80, 0xea, 0x01, 0, 0]);
    assert_eq!(read(&mut rig, 3), [0; 8]);
    out(&mut rig, REGISTER, 0, 0, 7).unwrap();
    out(&mut rig, RESERVE, 6, 7, 0).unwrap();
    let data = read(&mut rig, 3);
    assert_eq!(data.len(), 8 + 24 + 24);
    assert_eq!(data[..8], [0, 0, 0, 1, 0, 0, 0, 48]);
    // Key, R_HOLDER, scope and type, port, TransportID.
    assert_eq!(data[8..16], [0, 0, 0, 0, 0, 0, 0, 7]);
    assert_eq!(data[20..22], [1, 6]);
    assert_eq!(data[26..33], [0, 1, 0, 0, 0, 24, 0x0f]);
}

#[test]
fn errors_in_the_parameter_list_or_the_cdb_are_refused() {
    let mut rig = Rig::disk(disk_limits());
    assert_eq!(
        rig.bad(&[0x5f, 0, 0, 0, 0, 0, 0, 0, 23, 0], &[0; 24], 0),
        (0x05, 0x1a, 0x00)
    );
    assert_eq!(
        rig.field(&[0x5f, 0x1f, 0, 0, 0, 0, 0, 0, 24, 0], &[0; 24], 0),
        (0x24, true, 1, Some(4))
    );
    assert_eq!(
        rig.field(&[0x5e, 0x04, 0, 0, 0, 0, 0, 0, 24, 0], &[], 24),
        (0x24, true, 1, Some(4))
    );
    for (bit, flag) in [(3, 8), (2, 4), (0, 1)] {
        let mut list = [0; 24];
        list[20] = flag;
        assert_eq!(
            rig.field(&[0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0], &list, 0),
            (0x26, false, 20, Some(bit))
        );
    }
    assert_eq!(
        rig.field(&[0x5f, 1, 0x11, 0, 0, 0, 0, 0, 24, 0], &[0; 24], 0),
        (0x24, true, 2, Some(7))
    );
    assert_eq!(
        rig.field(&[0x5f, 1, 0x02, 0, 0, 0, 0, 0, 24, 0], &[0; 24], 0),
        (0x24, true, 2, Some(3))
    );
}

#[test]
fn reservations_outlive_resets_but_not_the_power() {
    let mut rig = Rig::disk(disk_limits());
    out(&mut rig, REGISTER, 0, 0, 7).unwrap();
    out(&mut rig, RESERVE, 1, 7, 0).unwrap();
    for (attention, left) in [
        (UnitAttention::UnitReset, (1, Some(7), Some((7, 1)))),
        (UnitAttention::NexusLoss, (1, Some(7), Some((7, 1)))),
        (UnitAttention::PowerOn, (0, None, None)),
    ] {
        rig.unit.reset(attention);
        assert_eq!(rig.bad(&[0, 0, 0, 0, 0, 0], &[], 0).0, 0x06);
        assert_eq!(state(&mut rig), left);
    }
}

#[test]
fn a_shared_unit_has_none() {
    let limits = MediumLimits {
        shareable: true,
        ..disk_limits()
    };
    let mut rig = Rig::disk(limits);
    assert_eq!(
        rig.bad(&[0x5e, 0, 0, 0, 0, 0, 0, 1, 0, 0], &[], 256),
        (0x05, 0x20, 0x00)
    );
    assert_eq!(
        rig.bad(&[0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0], &[0; 24], 0),
        (0x05, 0x20, 0x00)
    );
    // And says so.
    let data = rig.good(&[0xa3, 0x0c, 1, 0x5e, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256);
    assert_eq!(data, [0, 1, 0, 0]);
}
