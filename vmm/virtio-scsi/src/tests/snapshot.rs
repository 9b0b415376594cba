//! A controller that is saved, and continues in one that is built anew.

use std::os::unix::fs::OpenOptionsExt;

use husk_devices::component::testing::{mutate, mutation};
use husk_devices::component::{ComponentState, RestoreError};
use husk_disk::CacheMode;
use husk_disk::testing::CallKind;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const FEATURES: u64 = HOTPLUG | CHANGE;

/// A controller with these units.
pub(super) fn built(
    units: Vec<NewUnit>,
    engine: Engine,
    stops: &Arc<Mutex<Vec<String>>>,
) -> (VirtioScsi, ScsiHandle) {
    let stops = Arc::clone(stops);
    let setup = ScsiConfig {
        queues: 2,
        max_target: 255,
        units,
        engine: EngineKind::Auto,
        on_io_error: Arc::new(move |id, _| stops.lock().unwrap().push(id.to_owned())),
    };
    VirtioScsi::with_engine(setup, engine, REMOVAL_TIMEOUT).unwrap()
}

impl Guest {
    /// Moves the driver to a controller that is built anew with these units.
    fn reload_on(&mut self, units: Vec<NewUnit>, engine: Engine) {
        let queues = self.scsi.quiesce().unwrap();
        let state = self.scsi.save().unwrap();
        let text = serde_json::to_string(&state).unwrap();
        let (mut scsi, handle) = built(units, engine, &self.stops);
        scsi.restore(&serde_json::from_str(&text).unwrap(), FEATURES)
            .unwrap();
        assert_eq!(scsi.save().unwrap(), state);
        (*self.scsi, self.handle) = (scsi, handle);
        self.activate(FEATURES, queues);
    }

    fn reload(&mut self, units: &[NewUnit]) {
        self.reload_on(units.to_vec(), Engine::new(EngineKind::Auto, 128, 4096).unwrap());
    }
}

pub(super) fn scripted_units() -> Vec<NewUnit> {
    let options = DiskOptions {
        error_policy: ErrorPolicy::Stop,
        ..DiskOptions::default()
    };
    let disk = |id, lun| unit(id, at(0, lun), open(&image(BLOCKS), options));
    vec![disk("first", 0), disk("second", 1)]
}

/// A guest with a request of the first disk that is held.
fn held(cdb: &[u8], data: &[Descriptor]) -> (Guest, BackendScript, (u16, u64)) {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Stop);
    let request = guest.add(at(0, 0), cdb, data);
    guest.request[0].kick();
    script.finish(Guest::made(&script, 1)[0].tag, Err(libc::EIO));
    let stops = Arc::clone(&guest.stops);
    wait_for("the owner's call", || stops.lock().unwrap().pop());
    (guest, script, request)
}

#[test]
fn held_and_waiting_requests_continue_in_their_order() {
    let (mut guest, script, (first, response)) = held(&read10(3, 8), &[(DATA, 4096, WRITE)]);
    let (second, other) = guest.add_with(field(at(0, 0)), 9, 1, &write10(5, 1), &[(DATA + 4096, 512, 0)]);
    let (done, _) = guest.add(at(0, 1), &[0; 6], &[]);
    guest.request[0].kick();
    assert_eq!(guest.request[0].wait().0, done);
    let read = script.made()[0];

    let (engine, script) = BackendScript::engine(8);
    guest.reload_on(scripted_units(), engine);
    let again = Guest::made(&script, 1)[0];
    assert_eq!(again.what, read.what);
    script.finish(again.tag, Err(libc::EIO));
    let stops = Arc::clone(&guest.stops);
    wait_for("the owner's next call", || stops.lock().unwrap().pop());

    let (engine, script) = BackendScript::engine(8);
    guest.reload_on(scripted_units(), engine);
    let again = Guest::made(&script, 1)[0];
    assert_eq!(again.what, read.what);
    linger();
    assert_eq!(script.made().len(), 1, "the ordered one waits");
    script.finish(again.tag, Ok(()));
    let (head, used) = guest.request[0].wait();
    assert!(head == first && guest.ended(response, used).good());
    script.finish(Guest::made(&script, 2)[1].tag, Ok(()));
    let (head, used) = guest.request[0].wait();
    assert!(head == second && guest.ended(other, used).good());
}

#[test]
fn a_held_request_that_switches_the_cache_off_flushes_it_again() {
    // Through the page cache, a failed flush would be final.
    let units = || {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(BLOCKS * 512).unwrap();
        let mut direct = File::options();
        direct.read(true).write(true).custom_flags(libc::O_DIRECT);
        let options = DiskOptions {
            error_policy: ErrorPolicy::Stop,
            cache: CacheMode::None,
            ..DiskOptions::default()
        };
        let file = direct.open(file.path()).unwrap();
        vec![unit("first", at(0, 0), open(&file, options))]
    };
    let (engine, script) = BackendScript::engine(8);
    let mut guest = Guest::with(engine, units(), true);
    guest.settle(0, 0);
    // MODE SELECT (6): caching page without WCE.
    guest.put(DATA, &[&[0, 0, 0, 0, 8, 18][..], &[0; 18]].concat());
    let (head, response) = guest.add(at(0, 0), &[0x15, 0x10, 0, 0, 24, 0], &[(DATA, 24, 0)]);
    guest.request[0].kick();
    script.finish(Guest::made(&script, 1)[0].tag, Err(libc::EIO));
    let stops = Arc::clone(&guest.stops);
    wait_for("the owner's call", || stops.lock().unwrap().pop());

    let (engine, script) = BackendScript::engine(8);
    guest.reload_on(units(), engine);
    let again = Guest::made(&script, 1)[0];
    assert_eq!((again.what, guest.request[0].used()), (CallKind::Sync, None));
    script.finish(again.tag, Ok(()));
    let (used, len) = guest.request[0].wait();
    assert!(used == head && guest.ended(response, len).good());
}

#[test]
fn a_held_request_does_not_report_what_happened_after_it_began() {
    let (mut guest, _script, (head, response)) = held(&write10(0, 1), &[(DATA, 512, 0)]);
    let queues = guest.scsi.quiesce().unwrap();
    let mut state: Value = guest.scsi.save().unwrap().into();
    state["controller"]["units"][0]["logical"]["unit_attentions"] = json!(["capacity_changed"]);
    let (engine, script) = BackendScript::engine(8);
    let (mut scsi, handle) = built(scripted_units(), engine, &guest.stops);
    scsi.restore(&state.into(), FEATURES).unwrap();
    (*guest.scsi, guest.handle) = (scsi, handle);
    guest.activate(FEATURES, queues);
    script.finish(Guest::made(&script, 1)[0].tag, Ok(()));
    let (used, len) = guest.request[0].wait();
    assert!(used == head && guest.ended(response, len).good());
    guest.settle_with(0, 0, (6, 0x2a, 9));
}

#[test]
fn a_reset_forgets_what_was_restored() {
    let (mut guest, _script, _) = held(&read10(0, 1), &[(DATA, 512, WRITE)]);
    guest.scsi.quiesce().unwrap();
    let state = guest.scsi.save().unwrap();
    let (engine, script) = BackendScript::engine(8);
    let (mut scsi, handle) = built(scripted_units(), engine, &guest.stops);
    scsi.restore(&state, FEATURES).unwrap();
    (*guest.scsi, guest.handle) = (scsi, handle);
    guest.connect(FEATURES);
    guest.settle(0, 0);
    assert_eq!((script.made().len(), guest.request[0].used()), (0, None));
}

#[test]
fn what_cannot_be_saved_is_refused_by_name() {
    let refusal = |guest: &mut Guest| {
        guest.scsi.quiesce().unwrap();
        guest.scsi.save().unwrap_err().to_string()
    };
    let mut compare = [0; 16];
    (compare[0], compare[13]) = (0x89, 1);
    let (mut guest, ..) = held(&compare, &[(DATA, 1024, 0)]);
    let expected = "a COMPARE AND WRITE of disk \"first\" is held after an I/O error";
    assert_eq!(refusal(&mut guest), expected);

    let (mut guest, script, (head, _)) = held(&read10(0, 1), &[(DATA, 512, WRITE)]);
    guest.request[0].offer(head);
    guest.request[0].kick();
    script.finish(Guest::made(&script, 2)[1].tag, Err(libc::EIO));
    let expected = "queue 2: the driver made a chain available twice";
    assert_eq!(refusal(&mut guest), expected);

    let (mut guest, _script, _) = held(&read10(0, 1), &[(DATA, 512, WRITE)]);
    guest.manage(0, field(at(0, 0)), 0);
    let ending = guest.handle.remove("second");
    linger();
    assert_eq!(refusal(&mut guest), "disk \"second\" is being removed");
    drop(ending);

    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Report);
    guest.add(at(0, 0), &SYNCHRONIZE_CACHE, &[]);
    guest.request[0].kick();
    script.finish(Guest::made(&script, 1)[0].tag, Err(libc::EIO));
    guest.request[0].wait();
    let expected = "a flush of disk \"first\" failed, and earlier writes may be lost";
    assert_eq!(refusal(&mut guest), expected);

    let (mut guest, _file) = Guest::new();
    assert_eq!(guest.scsi.save().unwrap_err().to_string(), "it is not paused");
}

#[test]
fn what_driver_and_host_have_set_is_kept() {
    let file = image(BLOCKS);
    let disc = image(16);
    let drive = NewUnit {
        medium: Medium::CdRom(Some(open(
            &disc,
            DiskOptions {
                read_only: true,
                ..reporting()
            },
        ))),
        ..unit("cd", at(0, 5), open(&disc, reporting()))
    };
    let mut units = vec![unit("first", at(0, 0), open(&file, reporting())), drive];
    let engine = Engine::new(EngineKind::Auto, 128, 4096).unwrap();
    let mut guest = Guest::with(engine, units.clone(), true);
    guest.settle(0, 0);
    guest.settle(0, 5);
    // MODE SELECT (6): caching page without WCE; control page with D_SENSE.
    let mode = |page: &[u8]| [&[0; 4][..], page].concat();
    let caching = mode(&[&[8, 18, 0][..], &[0; 17]].concat());
    guest.put(DATA, &caching);
    let select = |len: usize| [0x15, 0x10, 0, 0, len as u8, 0];
    assert!(
        guest
            .run(
                at(0, 0),
                &select(caching.len()),
                &[(DATA, caching.len() as u32, 0)]
            )
            .good()
    );
    // PERSISTENT RESERVE OUT: REGISTER a key, then RESERVE with it.
    let mut list = [0; 24];
    list[15] = 7;
    guest.put(DATA, &list);
    let reserve = |action: u8, kind: u8| [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
    assert!(guest.run(at(0, 0), &reserve(0, 0), &[(DATA, 24, 0)]).good());
    (list[7], list[15]) = (7, 0);
    guest.put(DATA, &list);
    assert!(guest.run(at(0, 0), &reserve(1, 1), &[(DATA, 24, 0)]).good());
    // PREVENT ALLOW MEDIUM REMOVAL, and a request of the host that it refuses.
    assert!(guest.run(at(0, 5), &[0x1e, 0, 0, 0, 1, 0], &[]).good());
    assert!(guest.handle.eject("cd", false).wait().is_err());
    // A disk that was plugged and whose event the driver has no buffer for.
    for _ in 0..8 {
        units.push(unit(
            &format!("hot{}", units.len()),
            at(1, units.len() as u16),
            open(&image(8), reporting()),
        ));
        guest.handle.add(units.last().unwrap().clone()).wait().unwrap();
        guest.wait_event();
    }
    units.push(unit("last", at(2, 0), open(&image(8), reporting())));
    guest.handle.add(units.last().unwrap().clone()).wait().unwrap();
    guest.scsi.write_config(20, &64_u32.to_le_bytes());

    guest.reload(&units);
    let mut sizes = [0; 8];
    guest.scsi.read_config(20, &mut sizes);
    assert_eq!(sizes, [64, 0, 0, 0, 32, 0, 0, 0]);
    guest.scsi.write_config(20, &96_u32.to_le_bytes());
    let queues = guest.scsi.quiesce().unwrap();
    guest.activate(FEATURES, queues);
    guest.give(DATA - 0x800);
    let (event, _) = guest.wait_event();
    assert_eq!(event[..6], [1, 0, 0, 0, 1, 2], "the last disk");
    // MODE SENSE (6) of the caching page; PERSISTENT RESERVE IN: READ RESERVATION; GET EVENT STATUS NOTIFICATION.
    assert!(
        guest
            .run(at(0, 0), &[0x1a, 8, 8, 0, 32, 0], &[(DATA, 32, WRITE)])
            .good()
    );
    assert_eq!(guest.get(DATA, 7)[6] & 4, 0, "WCE");
    assert!(
        guest
            .run(
                at(0, 0),
                &[0x5e, 1, 0, 0, 0, 0, 0, 0, 24, 0],
                &[(DATA, 24, WRITE)]
            )
            .good()
    );
    let reservation = guest.get(DATA, 24);
    assert_eq!((reservation[3], reservation[15], reservation[21]), (1, 7, 1));
    let status = [0x4a, 1, 0, 0, 0x10, 0, 0, 0, 8, 0];
    assert!(guest.run(at(0, 5), &status, &[(DATA, 8, WRITE)]).good());
    assert_eq!(guest.get(DATA, 8)[4..6], [1, 2], "an eject request");
    assert!(guest.handle.eject("cd", false).wait().is_err(), "still prevented");
    guest.settle(2, 0);
}

#[test]
fn a_driver_is_told_of_a_disk_that_has_grown() {
    let file = image(BLOCKS);
    let one = || vec![unit("first", at(0, 0), open(&file, reporting()))];
    let engine = || Engine::new(EngineKind::Auto, 16, 64).unwrap();
    let mut guest = Guest::with(engine(), one(), true);
    guest.settle(0, 0);
    guest.give(DATA - 0x800);
    let queues = guest.scsi.quiesce().unwrap();
    let state = guest.scsi.save().unwrap();
    file.set_len(2 * BLOCKS * 512).unwrap();
    let (mut scsi, handle) = built(one(), engine(), &guest.stops);
    scsi.restore(&state, FEATURES).unwrap();
    (*guest.scsi, guest.handle) = (scsi, handle);
    guest.activate(FEATURES, queues);
    let (event, _) = guest.wait_event();
    assert_eq!((event[0], &event[12..]), (3, &[0x2a, 9, 0, 0][..]));
    guest.settle_with(0, 0, (6, 0x2a, 9));
    assert!(
        guest
            .run(at(0, 0), &read10(BLOCKS as u32, 1), &[(DATA, 512, WRITE)])
            .good()
    );
}

#[test]
fn the_cache_that_the_driver_has_seen_is_kept() {
    let file = image(BLOCKS);
    let cached = |cache| {
        let options = DiskOptions { cache, ..reporting() };
        vec![unit("first", at(0, 0), open(&file, options))]
    };
    let engine = || Engine::new(EngineKind::Auto, 16, 64).unwrap();
    // WCE of the caching page, now and as the default that a reset restores.
    let wce = |guest: &mut Guest| {
        [8, 0x88].map(|page| {
            let sense = [0x1a, 8, page, 0, 32, 0];
            assert!(guest.run(at(0, 0), &sense, &[(DATA, 32, WRITE)]).good());
            guest.get(DATA, 7)[6] & 4 != 0
        })
    };
    for (before, after) in [
        (CacheMode::Writethrough, CacheMode::Writeback),
        (CacheMode::Writeback, CacheMode::Writethrough),
    ] {
        let mut guest = Guest::with(engine(), cached(before), true);
        guest.settle(0, 0);
        let seen = wce(&mut guest);
        assert_eq!(seen, [before == CacheMode::Writeback; 2]);
        guest.reload_on(cached(after), engine());
        assert_eq!(wce(&mut guest), seen);
        assert!(guest.run(at(0, 0), &write10(0, 1), &[(DATA, 512, 0)]).good());
        assert!(guest.run(at(0, 0), &SYNCHRONIZE_CACHE, &[]).good());
    }
}

#[test]
fn other_disks_are_refused() {
    let file = image(BLOCKS);
    let one = || vec![unit("first", at(0, 0), open(&file, reporting()))];
    let engine = || Engine::new(EngineKind::Auto, 16, 64).unwrap();
    let mut guest = Guest::with(engine(), one(), true);
    guest.scsi.quiesce().unwrap();
    let good: Value = guest.scsi.save().unwrap().into();
    let refuse = |units: Vec<NewUnit>, pointer: &str, value: Value, expected: &str| {
        let mut bad = good.clone();
        *bad.pointer_mut(pointer).unwrap() = value;
        let (mut scsi, _handle) = built(units, engine(), &guest.stops);
        let before = scsi.save().unwrap();
        match scsi.restore(&bad.into(), FEATURES) {
            Err(RestoreError::Field { reason, .. }) => assert!(reason.contains(expected), "{reason}"),
            got => panic!("{expected}: {got:?}"),
        }
        assert_eq!(scsi.save().unwrap(), before);
    };
    let built_otherwise: [(Vec<NewUnit>, &str); 5] = [
        (vec![], "no such disk"),
        (
            vec![unit("first", at(0, 1), open(&file, reporting()))],
            "another address",
        ),
        (
            vec![unit("first", at(0, 0), open(&image(8), reporting()))],
            "another medium",
        ),
        (
            vec![NewUnit {
                serial: "S".into(),
                ..one().remove(0)
            }],
            "another serial number",
        ),
        (
            [
                one(),
                vec![unit("second", at(0, 1), open(&image(8), reporting()))],
            ]
            .concat(),
            "has no disk \"second\"",
        ),
    ];
    for (units, expected) in built_otherwise {
        refuse(units, "", good.clone(), expected);
    }
    let logical = "/controller/units/0/logical";
    let spoilt = [
        (
            "/unit_attentions",
            json!(["power_on", "power_on"]),
            "unit attentions",
        ),
        ("/reservations/held", json!("write_exclusive"), "reservations"),
        ("/reservations/key", json!(0), "reservations"),
        ("/tray/open", json!(true), "tray"),
        ("/cdrom", json!(true), "kind"),
    ];
    for (field, value, expected) in spoilt {
        refuse(one(), &format!("{logical}{field}"), value, expected);
    }
    let request = |queue: u16, head: u16| json!([{ "queue": queue, "head": head }]);
    let pointer = "/controller/requests";
    refuse(one(), pointer, request(1, 0), "does not exist");
    refuse(one(), pointer, request(2, QUEUE_SIZE), "does not exist");
    let twice = json!([{ "queue": 2, "head": 1 }, { "queue": 2, "head": 1 }]);
    refuse(one(), pointer, twice, "twice");
    let many: Vec<_> = (0..17).map(|head| json!({ "queue": 2, "head": head })).collect();
    refuse(one(), pointer, many.into(), "in flight");
    let event = |lun: u16, events: u8| json!([{ "target": 0, "lun": lun, "events": events }]);
    let pointer = "/controller/events";
    refuse(one(), pointer, event(1 << 14, 1), "LUN");
    refuse(one(), pointer, event(0, 0), "pending");
    refuse(one(), pointer, event(0, 16), "pending");
}

#[derive(Clone, Debug)]
enum Step {
    Command { lun: u16, cdb: Vec<u8>, data: Vec<u8> },
    Write { block: u32, seed: u8, ordered: bool },
    Read { block: u32 },
    Plug,
    Save,
}

fn step() -> impl Strategy<Value = Step> {
    let lun = prop::sample::select(vec![0_u16, 5]);
    let mode = any::<bool>().prop_map(|cache| {
        let data = [&[0; 4][..], &[8, 18, u8::from(cache) << 2], &[0; 17]].concat();
        (vec![0x15, 0x10, 0, 0, data.len() as u8, 0], data)
    });
    let reserve = (0..4_u8, 0..3_u8, 0..3_u8).prop_map(|(action, key, new)| {
        let mut data = vec![0; 24];
        (data[7], data[15]) = (key, new);
        (vec![0x5f, action, 1, 0, 0, 0, 0, 0, 24, 0], data)
    });
    let start = (0..4_u8).prop_map(|bits| (vec![0x1b, 0, 0, 0, bits, 0], vec![]));
    let prevent = (0..2_u8).prop_map(|on| (vec![0x1e, 0, 0, 0, on, 0], vec![]));
    let command = prop_oneof![mode, reserve, start, prevent, Just((vec![0; 6], vec![]))];
    let block = 0..64_u32;
    prop_oneof![
        6 => (lun, command).prop_map(|(lun, (cdb, data))| Step::Command { lun, cdb, data }),
        3 => (block.clone(), any::<u8>(), any::<bool>())
            .prop_map(|(block, seed, ordered)| Step::Write { block, seed, ordered }),
        3 => block.prop_map(|block| Step::Read { block }),
        1 => Just(Step::Plug),
        4 => Just(Step::Save),
    ]
}

/// Carries out the steps, and returns what the driver saw, and the disk.
fn run(steps: &[Step], save: bool) -> (Vec<(Ended, Vec<u8>)>, Vec<u8>) {
    let (file, disc) = (image(BLOCKS), image(16));
    let options = DiskOptions {
        read_only: true,
        ..reporting()
    };
    let drive = NewUnit {
        medium: Medium::CdRom(Some(open(&disc, options))),
        ..unit("cd", at(0, 5), open(&disc, reporting()))
    };
    let mut units = vec![unit("first", at(0, 0), open(&file, reporting())), drive];
    let engine = Engine::new(EngineKind::Auto, 128, 4096).unwrap();
    let mut guest = Guest::with(engine, units.clone(), true);
    let mut seen = Vec::new();
    for step in steps {
        let (lun, cdb, data, attribute) = match step {
            Step::Command { lun, cdb, data } => {
                guest.put(DATA, data);
                let out = (DATA, data.len() as u32, 0);
                (
                    *lun,
                    cdb.clone(),
                    if data.is_empty() { vec![] } else { vec![out] },
                    0,
                )
            }
            Step::Write { block, seed, ordered } => {
                guest.put(DATA, &pattern(512, *seed));
                (
                    0,
                    write10(*block, 1).to_vec(),
                    vec![(DATA, 512, 0)],
                    u8::from(*ordered),
                )
            }
            Step::Read { block } => (0, read10(*block, 1).to_vec(), vec![(DATA, 512, WRITE)], 0),
            Step::Plug => {
                let number = units.len() as u16;
                units.push(unit(
                    &format!("hot{number}"),
                    at(1, number),
                    open(&image(8), reporting()),
                ));
                guest.handle.add(units.last().unwrap().clone()).wait().unwrap();
                let (event, buffer) = guest.wait_event();
                guest.give(buffer);
                let ended = guest.run(at(1, number), &[0; 6], &[]);
                seen.push((ended, event.to_vec()));
                continue;
            }
            Step::Save => {
                if save {
                    guest.reload(&units);
                }
                continue;
            }
        };
        let (_, response) = guest.add_with(field(at(0, lun)), seen.len() as u64, attribute, &cdb, &data);
        if save && seen.len() % 2 == 0 {
            guest.request[0].kick();
            guest.reload(&units);
        }
        guest.request[0].kick();
        let (_, len) = guest.request[0].wait();
        seen.push((guest.ended(response, len), guest.get(DATA, 512)));
    }
    assert!(!guest.is_broken());
    let state = guest.scsi.quiesce().and_then(|_| guest.scsi.save().ok());
    seen.push((
        Ended {
            code: 0,
            status: 0,
            sense: vec![],
            residual: 0,
            used: 0,
        },
        serde_json::to_vec(&state).unwrap(),
    ));
    (seen, content(&file, 0, 64 * 512))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..Default::default() })]

    /// A driver sees the same, whether or not the controller is saved and built anew in between.
    #[test]
    fn a_restored_controller_continues(steps in prop::collection::vec(step(), 1..30)) {
        let (plain, saved) = (run(&steps, false), run(&steps, true));
        prop_assert_eq!(plain, saved);
    }

    #[test]
    fn a_hostile_state_is_refused_or_harmless(changes in prop::collection::vec(mutation(), 1..4)) {
        let (mut guest, _script, _) = held(&read10(0, 1), &[(DATA, 512, WRITE)]);
        let queues = guest.scsi.quiesce().unwrap();
        let mut state: ComponentState = guest.scsi.save().unwrap();
        changes.iter().for_each(|(place, change)| mutate(&mut state, *place, change));
        let engine = Engine::new(EngineKind::Auto, 8, 64).unwrap();
        let (mut scsi, handle) = built(scripted_units(), engine, &guest.stops);
        let before = scsi.save().unwrap();
        if scsi.restore(&state, FEATURES).is_err() {
            prop_assert_eq!(scsi.save().unwrap(), before);
        }
        (*guest.scsi, guest.handle) = (scsi, handle);
        guest.activate(FEATURES, queues);
        guest.add(at(0, 1), &read10(0, 1), &[(DATA, 512, WRITE)]);
        guest.request[0].kick();
        prop_assert!(guest.scsi.quiesce().is_some(), "the actor lives");
        let reason = guest.interrupts.reset().unwrap_or_default();
        prop_assert!(!reason.contains("panic"), "{}", reason);
        prop_assert!(guest.handle.list().wait().is_ok());
    }
}
