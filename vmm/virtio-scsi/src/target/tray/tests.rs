use super::super::tests::Rig;
use super::*;

const READY: [u8; 6] = [0; 6];
const EJECT: [u8; 6] = [0x1b, 0, 0, 0, 2, 0];
const LOAD: [u8; 6] = [0x1b, 0, 0, 0, 3, 0];
const PREVENT: [u8; 6] = [0x1e, 0, 0, 0, 1, 0];
const ALLOW: [u8; 6] = [0x1e, 0, 0, 0, 0, 0];

const CHANGED: (u8, u8, u8) = (0x06, 0x28, 0x00);
const CLOSED: (u8, u8, u8) = (0x02, 0x3a, 0x01);
const OPEN: (u8, u8, u8) = (0x02, 0x3a, 0x02);

/// Event code and media status.
fn event(rig: &mut Rig) -> [u8; 2] {
    let data = rig.good(&[0x4a, 1, 0, 0, 0x10, 0, 0, 0, 8, 0], &[], 8);
    assert_eq!(data[..4], [0, 4, 4, 0x10]);
    [data[4], data[5]]
}

#[test]
fn the_guest_ejects_and_loads() {
    let mut rig = Rig::cd(Some(10));
    rig.good(&READY, &[], 0);
    assert_eq!(event(&mut rig), [0, 2]);
    rig.good(&EJECT, &[], 0);
    assert!(rig.unit.tray_open() && rig.unit.medium().is_some());
    assert_eq!(rig.bad(&READY, &[], 0), OPEN);
    assert_eq!(event(&mut rig), [3, 1]);
    assert_eq!(event(&mut rig), [0, 1]);
    rig.good(&EJECT, &[], 0);
    rig.good(&LOAD, &[], 0);
    // The event is told in spite of the attention.
    assert_eq!(event(&mut rig), [2, 2]);
    assert_eq!(rig.bad(&READY, &[], 0), CHANGED);
    rig.good(&READY, &[], 0);
    // Closed already: nothing changes.
    rig.good(&LOAD, &[], 0);
    rig.good(&READY, &[], 0);
    assert_eq!(event(&mut rig), [0, 2]);
}

#[test]
fn the_host_inserts_and_ejects() {
    let mut rig = Rig::cd(None);
    assert_eq!(rig.bad(&READY, &[], 0), CLOSED);
    assert_eq!(event(&mut rig), [0, 0]);
    rig.unit.insert(MediumLimits::cd(20)).unwrap();
    assert_eq!(rig.bad(&READY, &[], 0), CHANGED);
    rig.good(&READY, &[], 0);
    assert_eq!(
        rig.good(&[0x25; 1].map(|o| [o, 0, 0, 0, 0, 0, 0, 0, 0, 0])[0], &[], 8),
        [0, 0, 0, 19, 0, 0, 8, 0]
    );
    rig.unit.eject(false).unwrap();
    assert_eq!(rig.unit.medium(), None);
    assert_eq!(rig.bad(&READY, &[], 0), OPEN);
    // Linux closes the tray of an empty drive when it is opened for reading.
    rig.good(&LOAD, &[], 0);
    assert_eq!(rig.bad(&READY, &[], 0), CLOSED);
    assert!(rig.unit.insert(MediumLimits::default()).is_err());
}

#[test]
fn a_prevented_removal() {
    let mut rig = Rig::cd(Some(10));
    rig.good(&PREVENT, &[], 0);
    assert_eq!(rig.bad(&EJECT, &[], 0), (0x05, 0x53, 0x02));
    assert_eq!(rig.unit.eject(false), Err(RemovalPrevented));
    // The guest is asked, and may comply.
    assert_eq!(event(&mut rig), [1, 2]);
    rig.good(&ALLOW, &[], 0);
    rig.good(&EJECT, &[], 0);
    rig.unit.eject(false).unwrap();
    rig.unit.insert(MediumLimits::cd(5)).unwrap();
    assert_eq!(rig.bad(&PREVENT, &[], 0), CHANGED);
    rig.good(&PREVENT, &[], 0);
    rig.unit.eject(true).unwrap();
    assert!(!rig.unit.removal_prevented());
    // A reset allows removal again.
    rig.good(&PREVENT, &[], 0);
    rig.unit.reset(UnitAttention::NexusLoss);
    assert!(!rig.unit.removal_prevented());
    assert_eq!(rig.bad(&[0x1e, 0, 0, 0, 2, 0], &[], 0).0, 0x06);
    assert_eq!(
        rig.field(&[0x1e, 0, 0, 0, 2, 0], &[], 0),
        (0x24, true, 4, Some(1))
    );
}

#[test]
fn the_power_closes_the_tray() {
    let mut rig = Rig::cd(Some(10));
    rig.good(&EJECT, &[], 0);
    rig.unit.reset(UnitAttention::UnitReset);
    assert!(rig.unit.tray_open());
    rig.unit.reset(UnitAttention::PowerOn);
    assert_eq!(rig.bad(&READY, &[], 0), (0x06, 0x29, 0x00));
    rig.good(&READY, &[], 0);
}

#[test]
fn a_disk_has_no_tray() {
    let mut rig = Rig::disk(super::super::tests::disk_limits());
    rig.good(&PREVENT, &[], 0);
    assert!(!rig.unit.removal_prevented());
    rig.unit.eject(true).unwrap();
    assert!(rig.unit.insert(MediumLimits::cd(4)).is_err());
    rig.good(&READY, &[], 0);
}
