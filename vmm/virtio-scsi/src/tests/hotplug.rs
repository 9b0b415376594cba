//! Units that are added and removed.

use std::future::Future;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use super::*;

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn is_removed(event: [u8; 16], address: UnitAddress) -> bool {
    event[0] == 1 && event[4..12] == address.to_field() && event[12] == 2
}

#[test]
fn adding_is_checked_and_idempotent() {
    let (guest, file) = Guest::new();
    let disk = open(&file, reporting());
    let add = |id: &str, address| guest.handle.add(unit(id, address, disk.clone())).wait();
    add("first", at(0, 0)).unwrap();
    assert!(matches!(add("first", at(0, 1)), Err(ScsiError::Elsewhere(_, address)) if address == at(0, 0)));
    assert!(matches!(add("second", at(0, 0)), Err(ScsiError::Occupied(_, id)) if id == "first"));
    add("second", at(255, 16_383)).unwrap();
    let large = husk_disk::BlockSize::Custom {
        logical: 1024,
        physical: 4096,
    };
    let options = DiskOptions {
        block_size: large,
        ..reporting()
    };
    let third = unit("third", at(0, 2), open(&file, options));
    guest.handle.add(third).wait().unwrap();
    // Less than a block of a CD-ROM.
    let medium = Medium::CdRom(Some(open(&image(1), reporting())));
    let odd = NewUnit {
        medium,
        ..unit("odd", at(0, 3), disk.clone())
    };
    assert!(matches!(guest.handle.add(odd).wait(), Err(ScsiError::Medium(..))));
    let list = guest.handle.list().wait().unwrap();
    let seen: Vec<_> = list.iter().map(|info| (&info.id[..], info.address)).collect();
    assert_eq!(
        seen,
        [
            ("first", at(0, 0)),
            ("third", at(0, 2)),
            ("second", at(255, 16_383))
        ]
    );
    assert_eq!([list[0].bytes, list[1].bytes], [Some(BLOCKS * 512); 2]);
    for error in [
        guest.handle.remove("none").wait().unwrap_err(),
        guest.handle.resize("none").unwrap_err(),
        guest.handle.eject("none", false).wait().unwrap_err(),
    ] {
        assert!(matches!(error, ScsiError::NotFound(id) if id == "none"));
    }
}

#[test]
fn the_driver_is_interrupted_before_the_caller_has_the_answer() {
    let (mut guest, file) = Guest::new();
    let disk = open(&file, reporting());
    for lun in 1..100 {
        guest.event.set_used_event(lun - 1);
        let before = guest.interrupts.queue();
        guest
            .handle
            .add(unit(&lun.to_string(), at(0, lun), disk.clone()))
            .wait()
            .unwrap();
        assert!(guest.interrupts.queue() > before, "LUN {lun}");
        let (_, buffer) = guest.event().expect("the event of a unit");
        guest.give(buffer);
    }
}

#[test]
fn targets_beyond_the_last_are_refused() {
    let setup = ScsiConfig {
        queues: 1,
        max_target: 3,
        units: Vec::new(),
        engine: EngineKind::Auto,
        on_io_error: Arc::new(|_, _| {}),
    };
    let (scsi, handle) = VirtioScsi::new(setup).unwrap();
    let disk = || unit("x", at(4, 0), open(&image(8), reporting()));
    assert!(matches!(handle.add(disk()).wait(), Err(ScsiError::Target(4, 3))));
    let mut config = [0; 2];
    scsi.read_config(30, &mut config);
    assert_eq!(config, [3, 0]);
    drop(scsi);
    assert!(matches!(handle.add(disk()).wait(), Err(ScsiError::Gone)));
}

#[test]
fn a_flush_and_the_returned_buffer_end_a_removal() {
    let (mut guest, file) = Guest::new();
    let start = Instant::now();
    let mut answer = guest.handle.remove("first");
    let (event, buffer) = guest.wait_event();
    assert!(is_removed(event, at(0, 0)));
    // The driver can still write dirty data.
    guest.put(DATA, &pattern(512, 3));
    assert!(guest.run(at(0, 0), &write10(9, 1), &[(DATA, 512, 0)]).good());
    assert!(guest.run(at(0, 0), &SYNCHRONIZE_CACHE, &[]).good());
    assert!(guest.run(at(0, 0), &write10(10, 1), &[(DATA, 512, 0)]).good());
    // A command after a flush means that another flush follows.
    assert!(guest.run(at(0, 0), &SYNCHRONIZE_CACHE, &[]).good());
    guest.give(buffer);
    answer = {
        let removed = answer.wait().unwrap();
        assert!(start.elapsed() < REMOVAL_TIMEOUT, "{:?}", start.elapsed());
        removed.flushed.unwrap();
        assert_eq!(removed.disk.unwrap().size(), BLOCKS * 512);
        assert_eq!(content(&file, 9 * 512, 512), pattern(512, 3));
        guest.handle.remove("first")
    };
    assert!(matches!(answer.wait(), Err(ScsiError::NotFound(_))));
    assert_eq!(guest.run(at(0, 0), &[0; 6], &[]).code, 3);
    // Its address is free.
    let again = unit("again", at(0, 0), open(&file, reporting()));
    guest.handle.add(again).wait().unwrap();
    guest.settle(0, 0);
}

#[test]
fn a_flush_and_an_idle_period_end_a_removal() {
    let (mut guest, file) = Guest::new();
    let start = Instant::now();
    let answer = guest.handle.remove("first");
    guest.wait_event();
    assert!(guest.run(at(0, 0), &SYNCHRONIZE_CACHE, &[]).good());
    answer.wait().unwrap();
    assert!(start.elapsed() < REMOVAL_TIMEOUT);
    let again = unit("again", at(0, 0), open(&file, reporting()));
    guest.handle.add(again).wait().unwrap();
}

#[test]
fn a_disk_in_memory_is_flushed_at_once_and_removed() {
    let (mut guest, _file) = Guest::new();
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(BLOCKS * 512).unwrap();
    let memory = unit("memory", at(0, 1), open(&file, reporting()));
    guest.handle.add(memory).wait().unwrap();
    let (_, buffer) = guest.wait_event();
    guest.give(buffer);
    guest.settle(0, 1);
    let mut answer = std::pin::pin!(guest.handle.remove("memory"));
    let (_, buffer) = guest.wait_event();
    assert!(guest.run(at(0, 1), &SYNCHRONIZE_CACHE, &[]).good());
    guest.give(buffer);
    // Nothing else wakes the controller.
    let mut context = Context::from_waker(Waker::noop());
    let removed = wait_for("the removal", || match answer.as_mut().poll(&mut context) {
        Poll::Ready(removed) => Some(removed.unwrap()),
        Poll::Pending => None,
    });
    removed.flushed.unwrap();
}

#[test]
fn an_idle_driver_delays_a_removal_until_the_deadline() {
    let (mut guest, file) = Guest::new();
    let start = Instant::now();
    let answer = guest.handle.remove("first");
    let (_, buffer) = guest.wait_event();
    assert!(matches!(
        guest.handle.remove("first").wait(),
        Err(ScsiError::Removing(_))
    ));
    // The unit is served until then, and a flush that is not the last ends nothing.
    while start.elapsed() < REMOVAL_TIMEOUT * 3 / 4 {
        assert!(guest.run(at(0, 0), &SYNCHRONIZE_CACHE, &[]).good());
        assert!(guest.run(at(0, 0), &read10(0, 1), &[(DATA, 512, WRITE)]).good());
        thread::sleep(Duration::from_millis(5));
    }
    answer.wait().unwrap();
    assert!(start.elapsed() >= REMOVAL_TIMEOUT);
    assert_eq!(guest.run(at(0, 0), &read10(0, 1), &[(DATA, 512, WRITE)]).code, 3);
    let again = || unit("again", at(0, 0), open(&file, reporting()));
    let refused = guest.handle.add(again()).wait();
    assert!(matches!(refused, Err(ScsiError::NotReleased(address)) if address == at(0, 0)));
    // Another address is free.
    let elsewhere = unit("elsewhere", at(0, 1), open(&file, reporting()));
    guest.handle.add(elsewhere).wait().unwrap();
    guest.give(buffer);
    guest.handle.add(again()).wait().unwrap();
}

#[test]
fn a_free_lun_is_the_lowest_that_the_driver_has_released() {
    let (mut guest, file) = Guest::new();
    let plug = |handle: &ScsiHandle, id: &str| {
        let disk = unit(id, at(0, 0), open(&file, reporting()));
        handle.add_at_free_lun(disk).wait()
    };
    assert_eq!(plug(&guest.handle, "second").unwrap(), at(0, 1));
    assert_eq!(plug(&guest.handle, "second").unwrap(), at(0, 1), "it is there");
    assert_eq!(plug(&guest.handle, "third").unwrap(), at(0, 2));
    for _ in 0..2 {
        let (_, buffer) = guest.wait_event();
        guest.give(buffer);
    }

    let removed = guest.handle.remove("first");
    let (_, buffer) = guest.wait_event();
    // Neither a unit that is being removed nor one that the driver has not released frees its LUN.
    let removing = plug(&guest.handle, "first");
    assert!(matches!(removing, Err(ScsiError::Removing(_))), "{removing:?}");
    assert_eq!(plug(&guest.handle, "fourth").unwrap(), at(0, 3));
    removed.wait().unwrap();
    assert_eq!(plug(&guest.handle, "fifth").unwrap(), at(0, 4));
    guest.give(buffer);
    assert_eq!(plug(&guest.handle, "first").unwrap(), at(0, 0));
}

#[test]
fn a_read_only_unit_is_removed_when_the_driver_has_released_it() {
    let (mut guest, file) = Guest::new();
    let options = DiskOptions {
        read_only: true,
        ..reporting()
    };
    let disk = unit("ro", at(0, 1), open(&file, options));
    guest.handle.add(disk).wait().unwrap();
    let (_, buffer) = guest.wait_event();
    guest.give(buffer);
    let start = Instant::now();
    let answer = guest.handle.remove("ro");
    let (event, buffer) = guest.wait_event();
    assert!(is_removed(event, at(0, 1)));
    guest.give(buffer);
    answer.wait().unwrap();
    assert!(start.elapsed() < REMOVAL_TIMEOUT);
}

#[test]
fn without_a_driver_with_events_a_unit_is_removed_at_once() {
    let (mut guest, _file) = Guest::new();
    let disk = || unit("other", at(0, 1), open(&image(8), reporting()));
    for state in 0..2 {
        if state == 0 {
            guest.connect(0);
        } else {
            guest.scsi.reset();
        }
        guest.handle.add(disk()).wait().unwrap();
        let start = Instant::now();
        guest.handle.remove("other").wait().unwrap();
        assert!(start.elapsed() < REMOVAL_TIMEOUT);
    }
}

#[test]
fn removal_waits_for_running_tasks_and_then_flushes() {
    use husk_disk::testing::CallKind;
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Stop);
    let (head, response) = guest.add(at(0, 0), &write10(0, 1), &[(DATA, 512, 0)]);
    guest.request[0].kick();
    let write = Guest::made(&script, 1)[0];
    let answer = guest.handle.remove("first");
    thread::sleep(REMOVAL_TIMEOUT + Duration::from_millis(50));
    // Other units are served meanwhile.
    guest.add(at(0, 1), &write10(0, 1), &[(DATA, 512, 0)]);
    guest.request[0].kick();
    let other = Guest::made(&script, 2)[1];
    assert_eq!(other.slot, 1);
    script.finish(other.tag, Ok(()));
    guest.request[0].wait();
    // An error now fails the request instead of holding it.
    script.finish(write.tag, Err(libc::EIO));
    let (used, len) = guest.request[0].wait();
    assert_eq!((used, guest.ended(response, len).sense().0), (head, 3));
    let flush = Guest::made(&script, 3)[2];
    assert_eq!((flush.what, flush.slot), (CallKind::Sync, 0));
    script.finish(flush.tag, Err(libc::EIO));
    assert!(answer.wait().unwrap().flushed.is_err());
    assert_eq!(guest.stops.lock().unwrap().len(), 0);
}

#[test]
fn a_task_of_a_removed_unit_can_still_be_aborted() {
    let (mut guest, script) = Guest::scripted(8, ErrorPolicy::Report);
    let lun = field(at(0, 0));
    guest.add_with(lun, 9, 0, &write10(0, 1), &[(DATA, 512, 0)]);
    guest.request[0].kick();
    let write = Guest::made(&script, 1)[0];
    let answer = guest.handle.remove("first");
    thread::sleep(REMOVAL_TIMEOUT + Duration::from_millis(50));
    guest.manage(0, lun, 9);
    linger();
    assert_eq!(guest.control.used(), None, "its memory is in use");
    script.finish(write.tag, Ok(()));
    guest.control.wait();
    let flush = Guest::made(&script, 2)[1];
    script.finish(flush.tag, Ok(()));
    answer.wait().unwrap();
}

#[test]
fn units_are_added_and_removed_during_io_on_another() {
    let (mut guest, file) = Guest::new();
    let handle = guest.handle.clone();
    let hotplug = thread::spawn(move || {
        for round in 0..200u16 {
            let id = format!("disk{round}");
            let options = DiskOptions {
                read_only: true,
                ..reporting()
            };
            let disk = unit(&id, at(1, round), open(&image(8), options));
            handle.add(disk).wait().unwrap();
            // The driver gets events for most of them, which it ignores, and none for the rest.
            drop(handle.remove(&id));
        }
    });
    let mut seed = 0u8;
    while !hotplug.is_finished() {
        seed = seed.wrapping_add(1);
        guest.put(DATA, &pattern(4096, seed));
        for block in 0..8 {
            let data = [(DATA + 512 * u64::from(block), 512, 0)];
            guest.add(at(0, 0), &write10(block, 1), &data);
        }
        guest.request[0].kick();
        for _ in 0..8 {
            guest.request[0].wait();
        }
        assert_eq!(content(&file, 0, 4096), pattern(4096, seed));
    }
    hotplug.join().unwrap();
    let ended = guest.run(at(0, 0), &read10(0, 8), &[(DATA, 4096, WRITE)]);
    assert!(ended.good(), "{ended:?}");
    wait_for("the last removal", || {
        (guest.handle.list().wait().unwrap().len() == 1).then_some(())
    });
}

#[test]
fn a_thousand_units_leave_nothing_behind() {
    fn resident() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        4 * statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap()
    }
    fn read_events(guest: &mut Guest) {
        while let Some((_, buffer)) = guest.event() {
            guest.give(buffer);
        }
    }
    let (mut guest, _file) = Guest::new();
    let image = image(8);
    let mut memory = 0;
    let files = open_files();
    for round in 0..3 {
        for number in 1..=1000u16 {
            let (id, at) = (format!("disk{number}"), at((number % 7) as u8, number));
            let unit = unit(&id, at, open(&image, reporting()));
            wait_for("the driver to let go of the address", || {
                read_events(&mut guest);
                let added = guest.handle.add(unit.clone()).wait();
                // The driver may not have handled the last round's removal yet.
                let waits = matches!(added, Err(ScsiError::NotReleased(_)));
                (!waits).then(|| added.unwrap())
            });
        }
        let inquiry = [0x12, 0, 0, 0, 36, 0];
        assert!(
            guest
                .run(at(6, 1000 - 1000 % 7 - 1), &inquiry, &[(DATA, 36, WRITE)])
                .good()
        );
        assert_eq!(guest.handle.list().wait().unwrap().len(), 1001);
        let answers: Vec<_> = (1..=1000)
            .map(|number| guest.handle.remove(&format!("disk{number}")))
            .collect();
        for answer in answers {
            loop {
                read_events(&mut guest);
                if guest.handle.list().wait().unwrap().len() == 1 {
                    break;
                }
                thread::sleep(Duration::from_millis(5));
            }
            drop(answer.wait().unwrap());
        }
        if round == 0 {
            memory = resident();
        }
    }
    let grown = resident().saturating_sub(memory);
    // Other tests run beside this one.
    assert!(grown < 16 << 10, "{grown} KiB");
    wait_for("files to be closed", || {
        (open_files() < files + 500).then_some(())
    });
}
