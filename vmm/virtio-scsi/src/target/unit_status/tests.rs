use super::super::tests::{Rig, code, disk_limits};
use super::super::unit_attention::UnitAttention;
use super::super::{DeviceKind, Identity, LogicalUnit, Step};

const READY: [u8; 6] = [0; 6];
const STOP: [u8; 6] = [0x1b, 0, 0, 0, 0, 0];
const START: [u8; 6] = [0x1b, 0, 0, 0, 1, 0];

#[test]
fn a_new_unit_reports_power_on() {
    let identity = Identity::new(DeviceKind::Disk, None, "x");
    let mut unit = LogicalUnit::disk(identity.clone(), disk_limits()).unwrap();
    unit.unit_attentions.take().unwrap();
    let mut rig = Rig::disk(disk_limits());
    rig.unit = LogicalUnit::disk(identity, disk_limits()).unwrap();
    // INQUIRY, REPORT LUNS leave the attention for the next command, which is not done.
    rig.good(&[0x12, 0, 0, 0, 36, 0], &[], 36);
    rig.good(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256);
    let before = rig.medium.clone();
    assert_eq!(
        rig.bad(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[9; 512], 0),
        (0x06, 0x29, 0x00)
    );
    assert_eq!(rig.medium, before);
    rig.good(&READY, &[], 0);
}

#[test]
fn unit_attentions_are_ordered_and_power_on_clears_others() {
    let mut rig = Rig::disk(disk_limits());
    rig.unit.resize(5000).unwrap();
    rig.unit.establish_unit_attention(UnitAttention::InquiryChanged);
    rig.unit.resize(6000).unwrap();
    // Even commands that are not known tell.
    assert_eq!(rig.bad(&[0xff], &[], 0), (0x06, 0x2a, 0x09));
    assert_eq!(rig.bad(&READY, &[], 0), (0x06, 0x3f, 0x03));
    rig.good(&READY, &[], 0);
    for (attention, ascq) in [
        (UnitAttention::PowerOn, 0x00),
        (UnitAttention::TargetReset, 0x02),
        (UnitAttention::UnitReset, 0x03),
        (UnitAttention::NexusLoss, 0x07),
    ] {
        rig.unit.reset(attention);
        assert_eq!(rig.bad(&READY, &[], 0), (0x06, 0x29, ascq));
    }
    rig.unit.luns_changed();
    rig.unit.reset(UnitAttention::PowerOn);
    assert_eq!(rig.bad(&READY, &[], 0), (0x06, 0x29, 0x00));
    rig.good(&READY, &[], 0);
}

#[test]
fn request_sense_takes_the_attention() {
    let mut rig = Rig::disk(disk_limits());
    rig.unit.establish_unit_attention(UnitAttention::ModeChanged);
    let data = rig.good(&[0x03, 0, 0, 0, 252, 0], &[], 252);
    assert_eq!((data.len(), code(&data)), (18, (0x06, 0x2a, 0x01)));
    let data = rig.good(&[0x03, 0, 0, 0, 252, 0], &[], 252);
    assert_eq!(code(&data), (0, 0, 0));
    rig.unit.establish_unit_attention(UnitAttention::ModeChanged);
    let data = rig.good(&[0x03, 1, 0, 0, 252, 0], &[], 252);
    assert_eq!(data, [0x72, 0x06, 0x2a, 0x01, 0, 0, 0, 0]);
    assert_eq!(rig.good(&[0x03, 0, 0, 0, 4, 0], &[], 252), [0x70, 0, 0, 0]);
    rig.good(&READY, &[], 0);
}

#[test]
fn a_stopped_disk_is_not_ready() {
    let mut rig = Rig::disk(disk_limits());
    rig.good(&STOP, &[], 0);
    assert_eq!(rig.steps[0], Step::Flush);
    let not_ready = (0x02, 0x04, 0x02);
    assert_eq!(rig.bad(&READY, &[], 0), not_ready);
    assert_eq!(rig.bad(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512), not_ready);
    let data = rig.good(&[0x03, 0, 0, 0, 252, 0], &[], 252);
    assert_eq!(code(&data), not_ready);
    rig.good(&[0x12, 0, 0, 0, 36, 0], &[], 36);
    rig.good(&START, &[], 0);
    rig.good(&READY, &[], 0);
    // A stop whose flush fails does not happen.
    rig.fail = Some((0, std::io::ErrorKind::Other));
    assert_eq!(rig.bad(&STOP, &[], 0), (0x03, 0x0c, 0x00));
    rig.fail = None;
    rig.good(&READY, &[], 0);
    // NO_FLUSH; a reset starts.
    rig.good(&[0x1b, 0, 0, 0, 4, 0], &[], 0);
    assert_eq!(rig.steps.len(), 1);
    rig.unit.reset(UnitAttention::UnitReset);
    assert_eq!(rig.bad(&READY, &[], 0).0, 0x06);
    rig.good(&READY, &[], 0);
    // Power conditions, ejecting.
    assert_eq!(
        rig.field(&[0x1b, 0, 0, 0, 0x31, 0], &[], 0),
        (0x24, true, 4, Some(7))
    );
    assert_eq!(
        rig.field(&[0x1b, 0, 0, 0, 2, 0], &[], 0),
        (0x24, true, 4, Some(1))
    );
}

#[test]
fn log_pages() {
    let mut rig = Rig::disk(disk_limits());
    let mut log = |page: u8, sub: u8| rig.good(&[0x4d, 0, 0x40 | page, sub, 0, 0, 0, 1, 0, 0], &[], 256);
    assert_eq!(log(0x00, 0x00), [0x00, 0, 0, 2, 0x00, 0x2f]);
    assert_eq!(log(0x00, 0xff), [0x40, 0xff, 0, 6, 0, 0, 0, 0xff, 0x2f, 0]);
    assert_eq!(log(0x2f, 0x00), [0x2f, 0, 0, 8, 0, 0, 3, 4, 0, 0, 0xff, 0]);
    assert_eq!(
        rig.field(&[0x4d, 0, 0x0d, 0, 0, 0, 0, 1, 0, 0], &[], 256),
        (0x24, true, 2, Some(5))
    );
    assert_eq!(
        rig.field(&[0x4d, 0, 0x2f, 1, 0, 0, 0, 1, 0, 0], &[], 256),
        (0x24, true, 3, None)
    );
    assert_eq!(
        rig.field(&[0x4d, 0, 0x2f, 0, 0, 0, 1, 1, 0, 0], &[], 256),
        (0x24, true, 5, None)
    );
    assert_eq!(
        rig.field(&[0x4d, 1, 0x2f, 0, 0, 0, 0, 1, 0, 0], &[], 256),
        (0x24, true, 1, Some(0))
    );
}

#[test]
fn self_tests() {
    let mut rig = Rig::disk(disk_limits());
    rig.good(&[0x1d, 0x04, 0, 0, 0, 0], &[], 0);
    assert_eq!(
        rig.field(&[0x1d, 0x20, 0, 0, 0, 0], &[], 0),
        (0x24, true, 1, Some(7))
    );
    assert_eq!(
        rig.field(&[0x1d, 0x00, 0, 0, 4, 0], &[0; 4], 0),
        (0x24, true, 3, None)
    );
}
