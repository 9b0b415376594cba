//! A disk that is saved, and continues in a device that is built anew.

mod guest;

use guest::*;
use husk_devices::component::testing::{Mutation, mutate, mutation};
use husk_devices::component::{ComponentState, RestoreError};
use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::testing::{WRITE, wait_for};
use husk_disk::{Disk, DiskOptions, EngineKind};
use husk_virtio_blk::Blk;
use proptest::prelude::*;
use proptest::sample::Index;

const WRITEBACK: u64 = 32;

/// A device on the same image, opened while it had its whole length.
fn twin(guest: &Guest, kind: EngineKind) -> Blk {
    let len = guest.file.metadata().unwrap().len();
    guest.file.set_len(SECTORS * 512).unwrap();
    let disk = Disk::open_raw(guest.file.try_clone().unwrap().into(), DiskOptions::default()).unwrap();
    guest.file.set_len(len).unwrap();
    blk(disk, 1, kind, &guest.stops).0
}

fn through_text(state: &ComponentState) -> ComponentState {
    serde_json::from_str(&serde_json::to_string(state).unwrap()).unwrap()
}

/// Moves the guest to a device that is built anew.
fn reload(guest: &mut Guest, kind: EngineKind) {
    let queues = guest.blk.quiesce().unwrap();
    let state = guest.blk.save().unwrap();
    let mut new = twin(guest, kind);
    new.restore(&through_text(&state), F_FLUSH).unwrap();
    assert_eq!(new.save().unwrap(), state);
    guest.blk = new;
    guest.activate(F_FLUSH, queues);
}

/// A guest whose requests behind the first page are held, because the image is truncated for a while.
fn held(kind: EngineKind, requests: u64) -> (Guest, Vec<(u16, u64)>) {
    let mut guest = Guest::with(kind, 1, DiskOptions::default(), true);
    guest.file.set_len(4096).unwrap();
    let mut chains = Vec::new();
    for at in 0..requests {
        let page = DATA + at * 4096;
        let data = if at % 2 == 0 {
            vec![(page, 4096, WRITE)]
        } else {
            vec![(page, 512, WRITE), (page + 1024, 512, WRITE)]
        };
        chains.push(guest.add(IN, 8, &data));
    }
    guest.driver.kick();
    wait_for("the owner's call", || guest.stops.lock().unwrap().pop());
    (guest, chains)
}

#[test]
fn held_requests_continue_in_a_device_that_is_built_anew() {
    for kind in [EngineKind::Uring, EngineKind::Threads] {
        let (mut guest, chains) = held(kind, 7);
        for _ in 0..2 {
            reload(&mut guest, kind);
            wait_for("another call", || guest.stops.lock().unwrap().pop());
            assert_eq!(guest.driver.used(), None);
        }
        let queues = guest.blk.quiesce().unwrap();
        let state = guest.blk.save().unwrap();
        let json: serde_json::Value = state.clone().into();
        let heads: Vec<_> = chains.iter().map(|(head, _)| *head).collect();
        assert_eq!(json["queues"], serde_json::json!([{ "held": heads }]));

        guest.file.set_len(SECTORS * 512).unwrap();
        let mut new = twin(&guest, kind);
        new.restore(&state, F_FLUSH).unwrap();
        guest.blk = new;
        guest.activate(F_FLUSH, queues);
        let mut used: Vec<_> = chains.iter().map(|_| guest.driver.wait().0).collect();
        used.sort_unstable();
        let mut expected = heads;
        expected.sort_unstable();
        assert_eq!((used, guest.driver.used()), (expected, None));
        for (_, status) in chains {
            assert_eq!(guest.get(status, 1)[0], OK);
        }
        assert_eq!(guest.get(DATA, 4096), vec![0; 4096]);
        assert_eq!(guest.request(IN, 0, &[(DATA, 512, WRITE)]), (OK, 513));
    }
}

#[test]
fn a_reset_forgets_what_was_restored() {
    let (mut guest, _) = held(EngineKind::Auto, 3);
    guest.blk.quiesce().unwrap();
    let state = guest.blk.save().unwrap();
    let mut new = twin(&guest, EngineKind::Auto);
    new.restore(&state, F_FLUSH).unwrap();
    new.reset();
    let json: serde_json::Value = new.save().unwrap().into();
    assert_eq!(json["queues"], serde_json::json!([{ "held": [] }]));
    let empty = new.save().unwrap();
    guest.blk.restore(&empty, F_FLUSH).unwrap();
    let json: serde_json::Value = guest.blk.save().unwrap().into();
    assert_eq!(
        json["queues"],
        serde_json::json!([{ "held": [] }]),
        "the old ones are dropped"
    );
}

#[test]
fn a_chain_that_is_available_twice_is_not_saved() {
    let mut guest = Guest::with(EngineKind::Auto, 1, DiskOptions::default(), true);
    guest.file.set_len(4096).unwrap();
    let (head, _) = guest.add(IN, 8, &[(DATA, 4096, WRITE)]);
    guest.driver.offer(head);
    guest.driver.kick();
    wait_for("the owner's call", || guest.stops.lock().unwrap().pop());
    guest.blk.quiesce().unwrap();
    let expected = "queue 0: the driver made a chain available twice";
    assert_eq!(guest.blk.save().unwrap_err().to_string(), expected);
}

#[test]
fn another_disk_is_refused() {
    let mut guest = Guest::with(EngineKind::Auto, 1, DiskOptions::default(), true);
    guest.blk.quiesce().unwrap();
    let state = guest.blk.save().unwrap();
    let refused = |field: &str, value: serde_json::Value| {
        let mut json: serde_json::Value = state.clone().into();
        json[field] = value;
        match twin(&guest, EngineKind::Auto).restore(&json.into(), F_FLUSH) {
            Err(RestoreError::Field { field: named, .. }) => assert!(named.contains(field), "{named}"),
            got => panic!("{field}: {got:?}"),
        }
    };
    refused("size", (SECTORS * 512 + 512).into());
    refused("logical_block", 4096.into());
    refused("read_only", true.into());
    refused("queues", serde_json::json!([]));
    refused("queues", serde_json::json!([{ "held": [QUEUE_SIZE] }]));
    refused("queues", serde_json::json!([{ "held": [3, 3] }]));
}

#[test]
fn a_disk_that_has_grown_continues() {
    let mut guest = Guest::with(EngineKind::Auto, 1, DiskOptions::default(), true);
    let queues = guest.blk.quiesce().unwrap();
    let state = guest.blk.save().unwrap();
    guest.file.set_len(2 * SECTORS * 512).unwrap();
    let disk = Disk::open_raw(guest.file.try_clone().unwrap().into(), DiskOptions::default()).unwrap();
    guest.blk = blk(disk, 1, EngineKind::Auto, &guest.stops).0;
    guest.blk.restore(&state, F_FLUSH).unwrap();
    let mut capacity = [0; 8];
    guest.blk.read_config(0, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity), 2 * SECTORS);
    guest.activate(F_FLUSH, queues);
    assert_eq!(
        guest.request(IN, 2 * SECTORS - 1, &[(DATA, 512, WRITE)]),
        (OK, 513)
    );
}

#[derive(Clone, Debug)]
enum Step {
    Write { page: u64, seed: u8 },
    Read { page: u64 },
    Zero { page: u64 },
    CacheMode(bool),
    Wait,
    Save,
}

const PAGES: u64 = 32;

fn step() -> impl Strategy<Value = Step> {
    let page = 0..PAGES;
    prop_oneof![
        4 => (page.clone(), any::<u8>()).prop_map(|(page, seed)| Step::Write { page, seed }),
        3 => page.clone().prop_map(|page| Step::Read { page }),
        1 => page.prop_map(|page| Step::Zero { page }),
        1 => any::<bool>().prop_map(Step::CacheMode),
        2 => Just(Step::Wait),
        3 => Just(Step::Save),
    ]
}

/// Carries out the steps, and returns what the guest saw: each status, what it read, the cache mode and the image.
fn run(steps: &[Step], save: bool) -> Vec<Vec<u8>> {
    let mut guest = Guest::with(EngineKind::Auto, 1, DiskOptions::default(), true);
    let mut seen = Vec::new();
    // Pages with a request in flight, which nothing else touches until it has ended: without that, the order of two
    // requests would not be defined.
    let mut busy = Vec::new();
    let mut wait = |guest: &mut Guest, busy: &mut Vec<(u64, u64)>| {
        let all = std::mem::take(busy);
        guest.driver.kick();
        for _ in &all {
            guest.driver.wait();
        }
        for (page, status) in all {
            seen.push(guest.get(status, 1));
            seen.push(guest.get(DATA + page * 4096, 4096));
        }
        let mut mode = [0];
        guest.blk.read_config(WRITEBACK, &mut mode);
        seen.push(mode.to_vec());
    };
    for step in steps {
        let page = match step {
            Step::Write { page, .. } | Step::Read { page } | Step::Zero { page } => Some(*page),
            _ => None,
        };
        if busy.iter().any(|(other, _)| Some(*other) == page) {
            wait(&mut guest, &mut busy);
        }
        match step {
            Step::Write { page, seed } => {
                let at = DATA + page * 4096;
                guest.put(at, &pattern(4096, *seed));
                let (_, status) = guest.add(OUT, page * 8, &[(at, 4096, 0)]);
                busy.push((*page, status));
            }
            Step::Read { page } => {
                let (_, status) = guest.add(IN, page * 8, &[(DATA + page * 4096, 4096, WRITE)]);
                busy.push((*page, status));
            }
            Step::Zero { page } => {
                let at = DATA + page * 4096;
                let range = [&(page * 8).to_le_bytes()[..], &8_u32.to_le_bytes(), &[0; 4]].concat();
                guest.put(at, &range);
                let (_, status) = guest.add(WRITE_ZEROES, 0, &[(at, 16, 0)]);
                busy.push((*page, status));
            }
            Step::CacheMode(on) => guest.blk.write_config(WRITEBACK, &[u8::from(*on)]),
            Step::Wait => wait(&mut guest, &mut busy),
            Step::Save if save => {
                // With requests that the device has seen, and others that it has not.
                if busy.len() % 2 == 0 {
                    guest.driver.kick();
                }
                reload(&mut guest, EngineKind::Auto);
            }
            Step::Save => {}
        }
    }
    wait(&mut guest, &mut busy);
    assert_eq!(guest.driver.used(), None);
    seen.push(guest.disk(0, (PAGES * 4096) as usize));
    seen
}

fn restore_anything(changes: &[(Index, Mutation)]) {
    let (mut guest, _) = held(EngineKind::Auto, 3);
    let queues = guest.blk.quiesce().unwrap();
    let fresh = guest.blk.save().unwrap();
    let mut state = fresh.clone();
    for (place, change) in changes {
        mutate(&mut state, *place, change);
    }
    let mut new = twin(&guest, EngineKind::Auto);
    let before = new.save().unwrap();
    if new.restore(&state, F_FLUSH).is_err() {
        assert_eq!(new.save().unwrap(), before);
    }
    guest.blk = new;
    guest.activate(F_FLUSH, queues);
    assert!(guest.blk.quiesce().is_some(), "the worker gave its queue back");
    let reason = guest.interrupts.reset().unwrap_or_default();
    assert!(!reason.contains("panic"), "{reason}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..Default::default() })]

    /// A guest sees the same, whether or not its device is saved and built anew between its requests.
    #[test]
    fn a_restored_disk_continues(steps in prop::collection::vec(step(), 1..40)) {
        let plain = run(&steps, false);
        let saved = run(&steps, true);
        prop_assert!(plain == saved);
    }

    #[test]
    fn a_hostile_state_is_refused_or_harmless(changes in prop::collection::vec(mutation(), 1..4)) {
        restore_anything(&changes);
    }
}

#[test]
fn the_cache_mode_is_kept() {
    let mut guest = Guest::with(EngineKind::Auto, 1, DiskOptions::default(), true);
    guest.blk.write_config(WRITEBACK, &[0]);
    reload(&mut guest, EngineKind::Auto);
    let mut mode = [1];
    guest.blk.read_config(WRITEBACK, &mut mode);
    assert_eq!(mode, [0]);
}
