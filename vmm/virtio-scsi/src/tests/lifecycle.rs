//! Resets, pauses and the state that survives them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use husk_disk::testing::CallKind;

use super::*;
use crate::config::Sizes;
use crate::handle::ControllerMessage;

/// Completes a call a little later, and reports that on the channel.
fn finish_later(script: BackendScript, tag: u16, result: Result<(), i32>) -> Arc<AtomicBool> {
    let ending = Arc::<AtomicBool>::default();
    let told = Arc::clone(&ending);
    thread::spawn(move || {
        linger();
        told.store(true, Ordering::SeqCst);
        script.finish(tag, result);
    });
    ending
}

#[test]
fn a_reset_forgets_requests_and_keeps_the_table() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Stop);
    guest.add(at(0, 0), &write10(0, 1), &[(DATA, 512, 0)]);
    guest.add(at(0, 0), &write10(1, 1), &[(DATA, 512, 0)]);
    guest.add_with(field(at(0, 0)), 3, 1, &write10(2, 1), &[(DATA, 512, 0)]);
    guest.request[0].kick();
    let made = Guest::made(&script, 2);
    script.finish(made[0].tag, Err(libc::EIO));
    wait_for("the owner's call", || {
        (guest.stops.lock().unwrap().len() == 1).then_some(())
    });
    let ending = {
        let (script, tag) = (script.clone(), made[1].tag);
        finish_later(script, tag, Err(libc::EIO))
    };
    guest.scsi.reset();
    assert!(ending.load(Ordering::SeqCst), "it waits for what has begun");
    assert_eq!(guest.request[0].used(), None);
    assert_eq!(script.made().len(), 2);
    guest.connect(HOTPLUG);
    guest.settle(0, 0);
    guest.settle(0, 1);
    // Errors are held as before.
    guest.add(at(0, 0), &write10(0, 1), &[(DATA, 512, 0)]);
    guest.request[0].kick();
    let again = Guest::made(&script, 3)[2];
    script.finish(again.tag, Err(libc::EIO));
    wait_for("the owner's second call", || {
        (guest.stops.lock().unwrap().len() == 2).then_some(())
    });
}

#[test]
fn a_reset_ends_the_wait_for_the_driver_of_a_removed_unit() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Report);
    guest.add(at(0, 0), &write10(0, 1), &[(DATA, 512, 0)]);
    guest.request[0].kick();
    let write = Guest::made(&script, 1)[0];
    let answer = guest.handle.remove("first");
    guest.wait_event();
    // The reset waits for the write, so the next driver is there as soon as the reset is done.
    let (ack, reset) = mpsc::sync_channel(1);
    guest.handle.0.send(ControllerMessage::Reset(ack));
    let driver = crate::virtqueues::Driver {
        mem: guest.mem.clone(),
        interrupt: Arc::clone(&guest.interrupts) as _,
        features: HOTPLUG,
        sizes: Sizes::DEFAULT,
        queues: guest.new_queues(),
    };
    let (ack, active) = mpsc::sync_channel(1);
    let driver = Box::new(driver);
    guest.handle.0.send(ControllerMessage::Activate(driver, ack));
    script.finish(write.tag, Ok(()));
    reset.recv().unwrap();
    active.recv().unwrap();
    let no_unit = (5, 0x25, 0);
    assert_eq!(guest.run(at(0, 0), &[0; 6], &[]).sense(), no_unit);
    let flush = Guest::made(&script, 2)[1];
    script.finish(flush.tag, Ok(()));
    answer.wait().unwrap();
    let again = unit("again", at(0, 0), open(&image(BLOCKS), reporting()));
    guest.handle.add(again).wait().unwrap();
    guest.settle(0, 0);
    guest.settle(0, 1);
}

#[test]
fn a_pause_completes_running_tasks_and_takes_no_new_ones() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Report);
    guest.add(at(0, 0), &read10(0, 8), &[(DATA, 4096, WRITE)]);
    guest.request[0].kick();
    let read = Guest::made(&script, 1)[0];
    let ending = finish_later(script.clone(), read.tag, Ok(()));
    let queues = guest.scsi.quiesce().unwrap();
    assert!(ending.load(Ordering::SeqCst));
    assert!(guest.request[0].used().is_some());
    assert_eq!(queues.iter().map(|q| q.index).collect::<Vec<_>>(), [0, 1, 2, 3]);
    let (head, _) = guest.add(at(0, 0), &[0; 6], &[]);
    guest.request[0].kick();
    linger();
    assert_eq!(guest.request[0].used(), None);
    assert!(guest.scsi.quiesce().is_none());
    guest.activate(HOTPLUG | CHANGE, queues);
    assert_eq!(guest.request[0].wait().0, head);
}

#[test]
fn held_requests_survive_a_pause_and_are_retried() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Stop);
    let (first, response) = guest.add(at(0, 0), &read10(0, 8), &[(DATA, 4096, WRITE)]);
    let (second, _) = guest.add(at(0, 1), &write10(0, 1), &[(DATA, 512, 0)]);
    guest.request[0].kick();
    let made = Guest::made(&script, 2);
    script.finish(made[0].tag, Err(libc::EIO));
    wait_for("the owner's call", || {
        (*guest.stops.lock().unwrap() == ["first"]).then_some(())
    });
    script.finish(made[1].tag, Ok(()));
    assert_eq!(guest.request[0].wait().0, second);
    for again in 1..3 {
        let queues = guest.scsi.quiesce().unwrap();
        linger();
        assert_eq!(script.made().len(), 1 + again);
        guest.activate(HOTPLUG | CHANGE, queues);
        let call = Guest::made(&script, 2 + again)[1 + again];
        assert_eq!(call.what, made[0].what);
        let result = if again == 1 { Err(libc::EIO) } else { Ok(()) };
        script.finish(call.tag, result);
        if again == 1 {
            wait_for("the owner's second call", || {
                (guest.stops.lock().unwrap().len() == 2).then_some(())
            });
        }
    }
    let (head, used) = guest.request[0].wait();
    assert!(head == first && guest.ended(response, used).good());
}

/// WRITE SAME of zeroes to the first disk, without `fallocate`, that takes three pieces of 256 KiB. Returns its head
/// and the address of its response when the first piece is under way.
fn zero(guest: &mut Guest, script: &BackendScript, id: u64) -> (u16, u64, RecordedCall) {
    let made = script.made().len();
    let cdb = [0x93, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x06, 0, 0, 0];
    let (head, response) = guest.add_with(field(at(0, 0)), id, 0, &cdb, &[]);
    guest.request[0].kick();
    let mut call = Guest::made(script, made + 1)[made];
    if matches!(call.what, CallKind::Allocate { .. }) {
        script.finish(call.tag, Err(libc::EOPNOTSUPP));
        call = Guest::made(script, made + 2)[made + 1];
    }
    (head, response, call)
}

#[test]
fn a_pause_suspends_zeroing() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Report);
    let (head, response, piece) = zero(&mut guest, &script, 1);
    let ending = finish_later(script.clone(), piece.tag, Ok(()));
    let queues = guest.scsi.quiesce().unwrap();
    assert!(ending.load(Ordering::SeqCst));
    assert_eq!((script.made().len(), guest.request[0].used()), (2, None));
    let state: serde_json::Value = guest.scsi.save().unwrap().into();
    assert_eq!(state["controller"]["requests"][0]["head"], head);
    guest.activate(HOTPLUG | CHANGE, queues);
    for made in 3..5 {
        let piece = Guest::made(&script, made)[made - 1];
        assert_eq!(guest.request[0].used(), None);
        script.finish(piece.tag, Ok(()));
    }
    let (used, len) = guest.request[0].wait();
    assert!(used == head && guest.ended(response, len).good());
    assert_eq!(script.made().len(), 4, "no piece is written twice");
}

#[test]
fn functions_and_resets_end_zeroing() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Report);
    let (head, response, piece) = zero(&mut guest, &script, 9);
    guest.manage(0, field(at(0, 0)), 9);
    linger();
    assert_eq!(guest.control.used(), None);
    script.finish(piece.tag, Ok(()));
    guest.control.wait();
    let (used, len) = guest.request[0].wait();
    assert_eq!((used, guest.ended(response, len).code), (head, 2), "aborted");
    // While it runs, and while it is suspended.
    for paused in [false, true] {
        let (_, _, piece) = zero(&mut guest, &script, 9);
        let made = script.made().len();
        let ending = finish_later(script.clone(), piece.tag, Ok(()));
        if paused {
            guest.scsi.quiesce().unwrap();
        }
        guest.scsi.reset();
        assert!(ending.load(Ordering::SeqCst));
        guest.connect(HOTPLUG);
        guest.settle(0, 0);
        assert_eq!(script.made().len(), made);
    }
}

#[test]
fn a_removal_ends_zeroing_after_its_deadline() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Report);
    let (_, _, piece) = zero(&mut guest, &script, 9);
    let removal = guest.handle.remove("first");
    thread::sleep(REMOVAL_TIMEOUT + Duration::from_millis(50));
    let made = script.made().len();
    script.finish(piece.tag, Ok(()));
    let flush = Guest::made(&script, made + 1)[made];
    assert_eq!(flush.what, CallKind::Sync);
    script.finish(flush.tag, Ok(()));
    removal.wait().unwrap();
}

#[test]
fn a_unit_can_be_removed_while_paused() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Stop);
    let (_, response) = guest.add(at(0, 0), &write10(0, 1), &[(DATA, 512, 0)]);
    guest.request[0].kick();
    let write = Guest::made(&script, 1)[0];
    script.finish(write.tag, Err(libc::EIO));
    wait_for("the owner's call", || {
        (guest.stops.lock().unwrap().len() == 1).then_some(())
    });
    let queues = guest.scsi.quiesce().unwrap();
    let (held, idle) = (guest.handle.remove("first"), guest.handle.remove("second"));
    thread::sleep(REMOVAL_TIMEOUT + Duration::from_millis(50));
    assert!(
        guest
            .handle
            .list()
            .wait()
            .unwrap()
            .iter()
            .all(|info| info.removing)
    );
    assert_eq!(script.made().len(), 1);
    guest.activate(HOTPLUG | CHANGE, queues);
    // The request is retried once, and no longer held, because the deadline has passed.
    let again = Guest::made(&script, 2)[1];
    assert_eq!(again.what, write.what);
    linger();
    script.finish(again.tag, Err(libc::EIO));
    let (_, used) = guest.request[0].wait();
    assert_eq!(guest.ended(response, used).sense().0, 3);
    let flush = Guest::made(&script, 3)[2];
    script.finish(flush.tag, Ok(()));
    held.wait().unwrap();
    // The driver has not released the other unit yet.
    assert!(guest.run(at(0, 1), &[0; 6], &[]).good());
    let flush = Guest::made(&script, 4)[3];
    script.finish(flush.tag, Ok(()));
    idle.wait().unwrap();
}

#[test]
fn errors_of_a_unit_being_removed_pause_nothing() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Stop);
    let (_, response) = guest.add(at(0, 0), &write10(0, 1), &[(DATA, 512, 0)]);
    guest.request[0].kick();
    let write = Guest::made(&script, 1)[0];
    script.finish(write.tag, Err(libc::EIO));
    let stops = Arc::clone(&guest.stops);
    wait_for("the owner's call", || {
        (stops.lock().unwrap().len() == 1).then_some(())
    });
    let queues = guest.scsi.quiesce().unwrap();
    let removal = guest.handle.remove("first");
    guest.activate(HOTPLUG | CHANGE, queues);
    let again = Guest::made(&script, 2)[1];
    script.finish(again.tag, Err(libc::EIO));
    let (_, used) = guest.request[0].wait();
    assert_eq!(guest.ended(response, used).sense().0, 3);
    let flush = Guest::made(&script, 3)[2];
    script.finish(flush.tag, Ok(()));
    removal.wait().unwrap();
    assert_eq!(stops.lock().unwrap().len(), 1);
}

#[test]
fn actor_switches_to_sched_other_after_single_requests() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Stop);
    for _ in 0..40 {
        assert!(guest.run(at(0, 1), &[0; 6], &[]).good());
    }
    guest.add(at(0, 0), &write10(0, 1), &[(DATA, 512, 0)]);
    guest.request[0].kick();
    script.finish(Guest::made(&script, 1)[0].tag, Err(libc::EIO));
    let stops = Arc::clone(&guest.stops);
    wait_for("the owner's call", || {
        (stops.lock().unwrap().len() == 1).then_some(())
    });
    // SAFETY: asks for the policy of a thread; the actor itself may not.
    let policy = unsafe { libc::sched_getscheduler(guest.thread.load(Ordering::SeqCst)) };
    assert_eq!(policy, libc::SCHED_OTHER);
}

#[test]
fn drivers_come_and_go() {
    let (mut guest, file) = Guest::new();
    for round in 0..20u8 {
        guest.put(DATA, &pattern(512, round));
        assert!(guest.run(at(0, 0), &write10(0, 1), &[(DATA, 512, 0)]).good());
        if round % 2 == 0 {
            guest.connect(HOTPLUG | CHANGE);
            guest.settle(0, 0);
        } else {
            let queues = guest.scsi.quiesce().unwrap();
            guest.activate(HOTPLUG | CHANGE, queues);
        }
        assert_eq!(content(&file, 0, 512), pattern(512, round));
    }
}

#[test]
fn engine_failure_sets_device_needs_reset() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Report);
    script.break_down();
    guest.add(at(0, 0), &write10(0, 1), &[(DATA, 512, 0)]);
    guest.request[0].kick();
    wait_for("the end", || guest.interrupts.reset());
    assert!(matches!(guest.handle.list().wait(), Err(ScsiError::Gone)));
    assert!(guest.scsi.quiesce().is_none());
    guest.scsi.reset();
    assert!(script.is_dropped());
}

#[test]
fn a_controller_needs_a_request_queue() {
    let (mut guest, _file) = Guest::new();
    guest.scsi.reset();
    let activation = Activation {
        mem: guest.mem.clone(),
        features: 0,
        queues: vec![guest.control.queue(false)],
        interrupt: Arc::clone(&guest.interrupts) as _,
    };
    assert!(guest.scsi.activate(activation).is_err());
}

#[test]
fn memory_is_mapped_until_the_disk_is_closed() {
    use husk_devices::GuestMemMmap;
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Report);
    let old = Arc::downgrade(&guest.mem.memory().into_inner());
    guest.add(at(0, 0), &read10(0, 1), &[(DATA, 512, WRITE)]);
    guest.request[0].kick();
    let tag = Guest::made(&script, 1)[0].tag;
    let more = GuestMemMmap::from_ranges(&[(GuestAddress(0x1000_0000), 0x1000)]).unwrap();
    let regions = old.upgrade().unwrap();
    let region = more.remove_region(GuestAddress(0x1000_0000), 0x1000).unwrap().1;
    let grown = regions.insert_region(region).unwrap();
    drop(regions);
    guest.mem.lock().unwrap().replace(grown);
    linger();
    assert!(old.upgrade().is_some());
    script.finish(tag, Ok(()));
    guest.request[0].wait();
    wait_for("the old map's end", || old.upgrade().is_none().then_some(()));
}

#[test]
fn errors_of_the_engine_have_names() {
    let error = ScsiError::Io("x".into(), io::ErrorKind::NotFound.into());
    assert!(error.to_string().starts_with("disk \"x\": "));
}
