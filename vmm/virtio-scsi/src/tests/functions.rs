//! Task management and asynchronous notification.

use super::*;

pub(super) const ABORT_TASK: u32 = 0;
pub(super) const ABORT_TASK_SET: u32 = 1;
pub(super) const CLEAR_ACA: u32 = 2;
pub(super) const CLEAR_TASK_SET: u32 = 3;
pub(super) const NEXUS_RESET: u32 = 4;
pub(super) const UNIT_RESET: u32 = 5;
pub(super) const QUERY_TASK: u32 = 6;
pub(super) const QUERY_TASK_SET: u32 = 7;

#[test]
fn an_aborted_task_is_answered_before_its_function_and_after_its_io() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Report);
    let lun = field(at(0, 0));
    let (first, aborted) = guest.add_with(lun, 70, 0, &read10(0, 8), &[(DATA, 4096, WRITE)]);
    let (second, kept) = guest.add_with(lun, 71, 0, &read10(8, 8), &[(DATA, 4096, WRITE)]);
    guest.request[0].kick();
    let made = Guest::made(&script, 2);
    let response = guest.manage(ABORT_TASK, lun, 70);
    linger();
    assert_eq!((guest.control.used(), guest.request[0].used()), (None, None));
    script.finish(made[0].tag, Ok(()));
    guest.control.wait();
    assert_eq!(guest.get(response, 1), [0]);
    let (head, used) = guest.request[0].used().expect("answered before the function");
    assert_eq!((head, guest.ended(aborted, used).code), (first, 2));
    script.finish(made[1].tag, Ok(()));
    let (head, used) = guest.request[0].wait();
    assert!(head == second && guest.ended(kept, used).good());
    // The function succeeds for an unknown task.
    assert_eq!(guest.managed(ABORT_TASK, lun, 70), 0);
}

#[test]
fn a_driver_cannot_start_functions_without_end() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Report);
    let lun = field(at(0, 0));
    guest.add_with(lun, 70, 0, &read10(0, 8), &[(DATA, 4096, WRITE)]);
    guest.request[0].kick();
    let made = Guest::made(&script, 1);
    // It uses the same descriptors again before they are returned.
    for _ in 0..QUEUE_SIZE {
        guest.manage(ABORT_TASK, lun, 70);
        thread::sleep(Duration::from_millis(2));
    }
    assert!(!guest.is_broken());
    guest.manage(ABORT_TASK, lun, 70);
    wait_for("a reset", || guest.interrupts.reset());
    script.finish(made[0].tag, Ok(()));
}

#[test]
fn functions_that_reset_end_all_tasks_of_a_unit_and_no_other() {
    for (kind, code, attention) in [
        (ABORT_TASK_SET, 2, None),
        (CLEAR_TASK_SET, 2, None),
        (UNIT_RESET, 4, Some((6, 0x29, 3))),
    ] {
        let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Report);
        let lun = field(at(0, 0));
        // The ordered one waits for the other.
        let mut responses = Vec::new();
        for (id, attribute) in [(1, 0), (2, 1)] {
            responses.push(
                guest
                    .add_with(lun, id, attribute, &write10(0, 1), &[(DATA, 512, 0)])
                    .1,
            );
        }
        let (other, _) = guest.add(at(0, 1), &write10(0, 1), &[(DATA, 512, 0)]);
        guest.request[0].kick();
        let made = Guest::made(&script, 2);
        guest.manage(kind, lun, 0);
        // The waiting task is answered at once.
        let (_, used) = guest.request[0].wait();
        assert_eq!(guest.ended(responses[1], used).code, code);
        linger();
        assert_eq!(guest.control.used(), None);
        script.finish(made[0].tag, Ok(()));
        guest.control.wait();
        let (_, used) = guest.request[0].wait();
        assert_eq!(guest.ended(responses[0], used).code, code);
        assert_eq!(script.made().len(), 2);
        script.finish(made[1].tag, Ok(()));
        assert_eq!(guest.request[0].wait().0, other);
        let ended = guest.run(at(0, 0), &[0; 6], &[]);
        match attention {
            Some(sense) => assert_eq!(ended.sense(), sense),
            None => assert!(ended.good()),
        }
        assert!(guest.run(at(0, 1), &[0; 6], &[]).good());
    }
}

#[test]
fn a_nexus_reset_is_for_all_units_of_the_target() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Report);
    for lun in [0, 1] {
        guest.add(at(0, lun), &write10(0, 1), &[(DATA, 512, 0)]);
    }
    guest.request[0].kick();
    let made = Guest::made(&script, 2);
    // The LUN does not matter.
    guest.manage(NEXUS_RESET, field(at(0, 9)), 0);
    script.finish(made[1].tag, Ok(()));
    guest.request[0].wait();
    linger();
    assert_eq!(guest.control.used(), None);
    script.finish(made[0].tag, Ok(()));
    guest.control.wait();
    guest.request[0].wait();
    for lun in [0, 1] {
        assert_eq!(guest.run(at(0, lun), &[0; 6], &[]).sense(), (6, 0x29, 7));
    }
}

#[test]
fn queries_are_answered_and_other_functions_refused() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Report);
    let lun = field(at(0, 0));
    guest.add_with(lun, 5, 0, &write10(0, 1), &[(DATA, 512, 0)]);
    guest.request[0].kick();
    let made = Guest::made(&script, 1);
    for (kind, lun, id, code) in [
        (QUERY_TASK, lun, 5, 10),
        (QUERY_TASK, lun, 6, 0),
        (QUERY_TASK_SET, lun, 0, 10),
        (QUERY_TASK_SET, field(at(0, 1)), 0, 0),
        (QUERY_TASK, field(at(0, 2)), 5, 12),
        (ABORT_TASK, field(at(0, 2)), 5, 12),
        (UNIT_RESET, field(at(3, 0)), 0, 3),
        (NEXUS_RESET, field(at(3, 0)), 0, 3),
        (UNIT_RESET, [0; 8], 0, 3),
        (CLEAR_ACA, lun, 0, 11),
        (8, lun, 0, 11),
        (u32::MAX, lun, 0, 11),
    ] {
        assert_eq!(guest.managed(kind, lun, id), code, "{kind} {lun:x?}");
    }
    script.finish(made[0].tag, Ok(()));
    guest.request[0].wait();
}

#[test]
fn a_held_task_ends_with_its_units_reset() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Stop);
    let lun = field(at(0, 0));
    let (_, response) = guest.add_with(lun, 1, 0, &write10(0, 1), &[(DATA, 512, 0)]);
    guest.request[0].kick();
    let made = Guest::made(&script, 1);
    script.finish(made[0].tag, Err(libc::EIO));
    wait_for("the owner's call", || {
        (*guest.stops.lock().unwrap() == ["first"]).then_some(())
    });
    assert_eq!(guest.managed(UNIT_RESET, lun, 0), 0);
    let (_, used) = guest.request[0].wait();
    assert_eq!(guest.ended(response, used).code, 4);
    // The next request is held too, and the owner is notified.
    guest.settle_with(0, 0, (6, 0x29, 3));
    guest.add(at(0, 0), &write10(0, 1), &[(DATA, 512, 0)]);
    guest.request[0].kick();
    script.finish(Guest::made(&script, 2)[1].tag, Err(libc::EIO));
    wait_for("the owner's second call", || {
        (guest.stops.lock().unwrap().len() == 2).then_some(())
    });
}

/// Queries or subscribes; returns the events and the response.
fn notify(guest: &mut Guest, kind: u32, lun: [u8; 8], wanted: u32) -> (u32, u8) {
    let (header, (response, ..)) = guest.frame([0; 8], 0, 0, &[]);
    let bytes = [&kind.to_le_bytes()[..], &lun, &wanted.to_le_bytes()].concat();
    guest.put(header.0, &bytes);
    guest.control.add(&[(header.0, 16, 0), (response, 5, WRITE)]);
    guest.control.kick();
    assert_eq!(guest.control.wait().1, 5);
    let bytes = guest.get(response, 5);
    (u32::from_le_bytes(std::array::from_fn(|i| bytes[i])), bytes[4])
}

#[test]
fn a_driver_can_subscribe_to_media_changes() {
    let (mut guest, _file) = Guest::new();
    let drive = NewUnit {
        medium: Medium::CdRom(None),
        ..unit("cd", at(0, 1), open(&image(4), reporting()))
    };
    guest.handle.add(drive).wait().unwrap();
    guest.wait_event();
    let (disk, cd) = (field(at(0, 0)), field(at(0, 1)));
    assert_eq!(notify(&mut guest, 1, disk, u32::MAX), (0, 0));
    assert_eq!(notify(&mut guest, 1, cd, u32::MAX), (16, 0));
    assert_eq!(notify(&mut guest, 2, field(at(0, 2)), 16), (0, 12));
    assert_eq!(notify(&mut guest, 2, field(at(1, 0)), 16), (0, 3));
    let disc = || {
        let options = DiskOptions {
            read_only: true,
            ..reporting()
        };
        open(&image(64), options)
    };
    guest.handle.insert("cd", disc()).wait().unwrap();
    linger();
    assert_eq!(guest.event(), None, "not subscribed");
    guest.handle.eject("cd", false).wait().unwrap();
    assert_eq!(notify(&mut guest, 2, cd, 16 | 2), (16, 0));
    guest.handle.insert("cd", disc()).wait().unwrap();
    let (event, _) = guest.wait_event();
    assert_eq!(event, [2, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 16, 0, 0, 0]);
    assert_eq!(notify(&mut guest, 2, cd, 0), (0, 0));
    guest.handle.eject("cd", false).wait().unwrap().unwrap();
    linger();
    assert_eq!(guest.event(), None);
}
