//! Functions and the requests that the device has not begun, because all slots are in use.

use husk_disk::testing::CallKind;
use serde_json::{Value, json};

use super::functions::{ABORT_TASK, NEXUS_RESET, QUERY_TASK, QUERY_TASK_SET, UNIT_RESET};
use super::snapshot::{built, scripted_units};
use super::*;

const SLOTS: u16 = 4;
const FEATURES: u64 = HOTPLUG | CHANGE;

/// A guest whose first disk has a write in each slot, and the heads of these.
fn full(policy: ErrorPolicy) -> (Guest, BackendScript, Vec<u16>) {
    let (mut guest, script) = Guest::scripted(SLOTS, policy);
    let mut heads = Vec::new();
    for block in 0..SLOTS {
        heads.push(
            guest
                .add(at(0, 0), &write10(block.into(), 1), &[(DATA, 512, 0)])
                .0,
        );
    }
    guest.request[0].kick();
    Guest::made(&script, SLOTS.into());
    (guest, script, heads)
}

/// Adds a write to the second disk.
fn write(guest: &mut Guest, id: u64, block: u32) -> (u16, u64) {
    guest.add_with(field(at(0, 1)), id, 0, &write10(block, 1), &[(DATA, 512, 0)])
}

/// The next answer: its head and its response code.
fn answer(guest: &mut Guest, response: u64) -> (u16, u8) {
    let (head, used) = guest.request[0].wait();
    (head, guest.ended(response, used).code)
}

#[test]
fn a_function_ends_requests_that_have_not_begun() {
    let second = field(at(0, 1));
    for (kind, id, code, attention) in [
        (ABORT_TASK, 90, 2, None),
        (UNIT_RESET, 0, 4, Some((6, 0x29, 3))),
        (NEXUS_RESET, 0, 4, Some((6, 0x29, 7))),
    ] {
        let (mut guest, script, heads) = full(ErrorPolicy::Report);
        let (head, response) = write(&mut guest, 90, 7);
        if kind == NEXUS_RESET {
            // It also waits for the tasks of the first disk.
            guest.manage(kind, second, id);
        } else {
            assert_eq!(guest.managed(kind, second, id), 0);
            assert_eq!(guest.control.used(), None);
        }
        assert_eq!(answer(&mut guest, response), (head, code));
        let made = script.made();
        for (call, head) in made.iter().zip(heads) {
            script.finish(call.tag, Ok(()));
            assert_eq!(guest.request[0].wait().0, head);
        }
        linger();
        assert_eq!(script.made().len(), usize::from(SLOTS), "the stale write");
        match attention {
            Some(sense) => guest.settle_with(0, 1, sense),
            None => assert!(guest.run(at(0, 1), &[0; 6], &[]).good()),
        }
    }
}

#[test]
fn other_requests_are_kept_in_their_order() {
    let (mut guest, script, heads) = full(ErrorPolicy::Report);
    let (second, nowhere) = (field(at(0, 1)), field(at(0, 9)));
    let kept = [1, 2].map(|block| write(&mut guest, block.into(), block));
    let (aborted, response) = write(&mut guest, 90, 7);
    let (absent, _) = guest.add_with(nowhere, 90, 0, &[0; 6], &[]);
    for (kind, id, code) in [
        (QUERY_TASK, 90, 10),
        (QUERY_TASK_SET, 0, 10),
        (QUERY_TASK, 91, 0),
        (ABORT_TASK, 90, 0),
        (QUERY_TASK, 90, 0),
        (QUERY_TASK_SET, 0, 10),
    ] {
        assert_eq!(guest.managed(kind, second, id), code, "{kind} {id}");
    }
    assert_eq!(answer(&mut guest, response), (aborted, 2));
    // One that came later, in the queue.
    let later = write(&mut guest, 3, 3);
    guest.request[0].kick();
    linger();
    assert_eq!(
        (script.made().len(), guest.request[0].used()),
        (SLOTS.into(), None)
    );
    for (at, answers) in [
        vec![heads[0]],
        vec![heads[1]],
        vec![heads[2], absent],
        vec![heads[3]],
        vec![kept[0].0],
        vec![kept[1].0],
        vec![later.0],
    ]
    .into_iter()
    .enumerate()
    {
        script.finish(Guest::made(&script, at + 1)[at].tag, Ok(()));
        for head in answers {
            assert_eq!(guest.request[0].wait().0, head);
        }
    }
    let begun = |block: u64| CallKind::Write {
        offset: 512 * block,
        len: 512,
        durable: false,
    };
    let calls: Vec<_> = script.made()[SLOTS.into()..]
        .iter()
        .map(|call| call.what)
        .collect();
    assert_eq!(calls, [1, 2, 3].map(begun));
}

#[test]
fn a_function_ends_a_request_that_arrives_with_it() {
    let (mut guest, script) = Guest::scripted(SLOTS, ErrorPolicy::Report);
    let queues = guest.scsi.quiesce().unwrap();
    let (head, response) = write(&mut guest, 90, 7);
    guest.manage(ABORT_TASK, field(at(0, 1)), 90);
    guest.activate(FEATURES, queues);
    let write = Guest::made(&script, 1)[0];
    linger();
    assert_eq!(guest.control.used(), None);
    script.finish(write.tag, Ok(()));
    guest.control.wait();
    assert_eq!(answer(&mut guest, response), (head, 2));
}

#[test]
fn more_requests_than_entries_need_a_reset() {
    let (mut guest, script, _) = full(ErrorPolicy::Report);
    let second = field(at(0, 1));
    let (head, _) = write(&mut guest, 1, 1);
    for _ in 1..QUEUE_SIZE {
        guest.request[0].offer(head);
    }
    assert_eq!(guest.managed(QUERY_TASK_SET, second, 0), 10);
    assert!(!guest.is_broken());
    guest.request[0].offer(head);
    guest.manage(QUERY_TASK_SET, second, 0);
    let reason = wait_for("a reset", || guest.interrupts.reset());
    assert_eq!(reason, "queue 2: more requests than entries of the queue");
    for call in script.made() {
        script.finish(call.tag, Ok(()));
    }
    guest.connect(FEATURES);
    guest.settle(0, 1);
    assert_eq!(script.made().len(), usize::from(SLOTS), "it is forgotten");
}

#[test]
fn a_chain_outside_of_the_queue_needs_a_reset() {
    let (mut guest, script, _) = full(ErrorPolicy::Report);
    guest.request[0].offer(QUEUE_SIZE);
    guest.manage(ABORT_TASK, field(at(0, 9)), 0);
    wait_for("a reset", || guest.interrupts.reset());
    for call in script.made() {
        script.finish(call.tag, Ok(()));
    }
}

#[test]
fn no_queue_keeps_the_slots_from_the_others() {
    let (mut guest, script, heads) = full(ErrorPolicy::Report);
    for block in 4..7 {
        write(&mut guest, block.into(), block);
    }
    for block in 100..103u32 {
        let (header, response) = guest.frame(field(at(0, 1)), block.into(), 0, &write10(block, 1));
        guest.request[1].add(&[header, (DATA, 512, 0), response]);
    }
    guest.request[0].kick();
    guest.request[1].kick();
    linger();
    for call in 0..heads.len() + 2 {
        script.finish(script.made()[call].tag, Ok(()));
        Guest::made(&script, heads.len() + call + 1);
    }
    let block = |call: &RecordedCall| match call.what {
        CallKind::Write { offset, .. } => (offset / 512) as u32,
        other => panic!("{other:?}"),
    };
    let begun: Vec<_> = script.made().iter().skip(heads.len()).map(block).collect();
    assert_eq!(begun, [100, 4, 101, 5, 102, 6]);
    for call in script.made().iter().skip(heads.len() + 2) {
        script.finish(call.tag, Ok(()));
    }
}

/// Fails all writes of [`full`], so that they are held, and pauses the device with two requests in the backlog.
fn paused() -> (Guest, BackendScript, Vec<u16>, Vec<ActiveQueue>) {
    let (mut guest, script, mut heads) = full(ErrorPolicy::Stop);
    for block in [1, 2] {
        heads.push(write(&mut guest, block.into(), block).0);
    }
    assert_eq!(guest.managed(ABORT_TASK, field(at(0, 1)), 90), 0);
    for call in script.made() {
        script.finish(call.tag, Err(libc::EIO));
    }
    let stops = Arc::clone(&guest.stops);
    wait_for("the owner's call", || stops.lock().unwrap().pop());
    let queues = guest.scsi.quiesce().unwrap();
    (guest, script, heads, queues)
}

/// Completes the writes of [`paused`] one by one. `before` calls were made by then.
fn all_end_in_order(guest: &mut Guest, script: &BackendScript, heads: &[u16], before: usize) {
    let slots = usize::from(SLOTS);
    assert_eq!(Guest::made(script, before + slots).len(), before + slots);
    for (at, head) in heads.iter().enumerate() {
        script.finish(Guest::made(script, before + at + 1)[before + at].tag, Ok(()));
        assert_eq!(guest.request[0].wait().0, *head);
    }
    assert_eq!(script.made().len(), before + heads.len());
}

#[test]
fn a_pause_keeps_requests_that_have_not_begun() {
    let (mut guest, script, heads, queues) = paused();
    guest.activate(FEATURES, queues);
    all_end_in_order(&mut guest, &script, &heads, SLOTS.into());
}

#[test]
fn a_snapshot_keeps_requests_that_have_not_begun() {
    let (mut guest, _script, heads, queues) = paused();
    let state = guest.scsi.save().unwrap();
    let (engine, script) = BackendScript::engine(SLOTS);
    let (mut scsi, handle) = built(scripted_units(), engine, &guest.stops);
    let good: Value = state.clone().into();
    for (backlog, expected) in [
        (good["controller"]["requests"].clone(), "twice"),
        (json!([{ "queue": 0, "head": 0 }]), "does not exist"),
    ] {
        let mut bad = good.clone();
        bad["controller"]["backlog"] = backlog;
        let error = scsi.restore(&bad.into(), FEATURES).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    scsi.restore(&state, FEATURES).unwrap();
    assert_eq!(scsi.save().unwrap(), state);
    (*guest.scsi, guest.handle) = (scsi, handle);
    guest.activate(FEATURES, queues);
    all_end_in_order(&mut guest, &script, &heads, 0);
}
