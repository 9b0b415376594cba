//! Sense data for failures of the medium.

use std::io::ErrorKind;

use super::super::MediumLimits;
use super::{Rig, cdb, disk_limits};

/// Runs a command whose step of this number fails.
fn failing(rig: &mut Rig, step: usize, kind: ErrorKind, cdb: &[u8], out: &[u8], room: usize) -> (u8, u8, u8) {
    rig.fail = Some((step, kind));
    let code = rig.bad(cdb, out, room);
    assert_eq!(rig.steps.len(), step + 2, "a task goes on after an error");
    rig.fail = None;
    code
}

#[test]
fn errors_of_reads_and_writes() {
    let mut rig = Rig::disk(disk_limits());
    let read: [u8; 10] = cdb(0x28, &[(8, &[1])]);
    let write: [u8; 10] = cdb(0x2a, &[(8, &[1])]);
    let flush: [u8; 10] = cdb(0x35, &[]);
    for (kind, reading, writing) in [
        (ErrorKind::Other, (0x03, 0x11, 0x00), (0x03, 0x0c, 0x00)),
        (ErrorKind::StorageFull, (0x07, 0x27, 0x07), (0x07, 0x27, 0x07)),
        (ErrorKind::QuotaExceeded, (0x07, 0x27, 0x07), (0x07, 0x27, 0x07)),
        (
            ErrorKind::PermissionDenied,
            (0x03, 0x11, 0x00),
            (0x07, 0x27, 0x00),
        ),
        (
            ErrorKind::ReadOnlyFilesystem,
            (0x03, 0x11, 0x00),
            (0x07, 0x27, 0x00),
        ),
        (ErrorKind::InvalidInput, (0x05, 0x21, 0x00), (0x05, 0x21, 0x00)),
        (ErrorKind::OutOfMemory, (0x04, 0x44, 0x00), (0x04, 0x44, 0x00)),
    ] {
        assert_eq!(failing(&mut rig, 0, kind, &read, &[], 512), reading);
        assert_eq!(failing(&mut rig, 0, kind, &write, &[0; 512], 0), writing);
        assert_eq!(failing(&mut rig, 0, kind, &flush, &[], 0), writing);
    }
}

#[test]
fn errors_in_the_middle() {
    let mut rig = Rig::disk(disk_limits());
    let other = ErrorKind::Other;
    let (pulling, reading, writing) = ((0x0b, 0x4b, 0x00), (0x03, 0x11, 0x00), (0x03, 0x0c, 0x00));
    let same: [u8; 10] = cdb(0x41, &[(8, &[1])]);
    assert_eq!(failing(&mut rig, 0, other, &same, &[1; 512], 0), pulling);
    assert_eq!(failing(&mut rig, 1, other, &same, &[1; 512], 0), writing);
    let swap: [u8; 16] = cdb(0x89, &[(13, &[1])]);
    let out = [&rig.medium[..512], &[0; 512]].concat();
    assert_eq!(failing(&mut rig, 0, other, &swap, &out, 0), pulling);
    assert_eq!(failing(&mut rig, 1, other, &swap, &out, 0), reading);
    assert_eq!(failing(&mut rig, 2, other, &swap, &out, 0), writing);
    let status: [u8; 16] = cdb(0x9e, &[(1, &[0x12]), (13, &[24])]);
    assert_eq!(failing(&mut rig, 0, other, &status, &[], 24), reading);
}

#[test]
fn nothing_that_failed_was_moved() {
    let mut rig = Rig::disk(disk_limits());
    rig.fail = Some((0, ErrorKind::Other));
    let (response, _) = rig.run(&cdb::<10>(0x28, &[(8, &[1])]), &[], 512);
    assert_eq!(response.residual, 512);
}

#[test]
fn a_disc_is_ejected_while_it_is_read() {
    let read: [u8; 10] = cdb(0x28, &[(8, &[1])]);
    let mut rig = Rig::cd(Some(10));
    rig.meanwhile = Some(|unit| unit.eject(true).unwrap());
    assert_eq!(rig.bad(&read, &[], 2048), (0x02, 0x3a, 0x02));
    // The task does not read another disc.
    let mut rig = Rig::cd(Some(10));
    rig.meanwhile = Some(|unit| unit.insert(MediumLimits::cd(10)).unwrap());
    assert_eq!(rig.bad(&read, &[], 2048), (0x06, 0x28, 0x00));
}

#[test]
fn an_ended_task_reports_no_second_success() {
    use super::super::{ScsiCommand, ScsiStatus, Step};
    let mut rig = Rig::disk(disk_limits());
    let mut task = rig.unit.begin(ScsiCommand {
        cdb: &[0; 6],
        data_out: 0,
        data_in: 0,
        luns: &[],
    });
    let done = |step| match step {
        Step::Done(response) => response.status,
        step => panic!("{step:?}"),
    };
    assert_eq!(done(task.next(&mut rig.unit)), ScsiStatus::Good);
    assert_eq!(done(task.next(&mut rig.unit)), ScsiStatus::CheckCondition);
}
