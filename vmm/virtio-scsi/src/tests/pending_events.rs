//! Events for drivers of any speed.

use super::*;

fn added(address: UnitAddress) -> [u8; 16] {
    event(1, address, 1)
}

fn removed(address: UnitAddress) -> [u8; 16] {
    event(1, address, 2)
}

fn event(kind: u32, address: UnitAddress, reason: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[4..12].copy_from_slice(&address.to_field());
    bytes[12..].copy_from_slice(&reason.to_le_bytes());
    bytes
}

#[test]
fn a_driver_with_one_buffer_gets_the_events_of_every_unit() {
    let (mut guest, file) = Guest::new();
    let disk = open(&file, reporting());
    for number in 1..301 {
        let answer = guest
            .handle
            .add(unit(&number.to_string(), at(0, number), disk.clone()));
        answer.wait().unwrap();
    }
    // Eight buffers, of which the driver returns only one.
    let mut told = Vec::new();
    let mut back = 0;
    while told.len() < 300 {
        let (event, buffer) = guest.wait_event();
        told.push(event);
        if told.len() >= 8 {
            back += 1;
            guest.give(buffer);
        }
    }
    assert_eq!(
        told,
        (1..301).map(|number| added(at(0, number))).collect::<Vec<_>>()
    );
    linger();
    assert_eq!((guest.event(), back), (None, 293));
}

#[test]
fn a_new_size_is_an_event_and_a_unit_attention() {
    let (mut guest, file) = Guest::new();
    assert_eq!(guest.handle.resize("first").unwrap(), BLOCKS * 512);
    linger();
    assert_eq!(guest.event(), None, "it is the same");
    file.set_len(2 * BLOCKS * 512).unwrap();
    assert_eq!(guest.handle.resize("first").unwrap(), 2 * BLOCKS * 512);
    assert_eq!(guest.wait_event().0, event(3, at(0, 0), 0x092a));
    let capacity = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let room = [(DATA, 8, WRITE)];
    assert_eq!(guest.run(at(0, 0), &capacity, &room).sense(), (6, 0x2a, 9));
    assert!(guest.run(at(0, 0), &capacity, &room).good());
    assert_eq!(guest.get(DATA, 8), [0, 0, 0x0f, 0xff, 0, 0, 2, 0]);
    // The last block can be read.
    let last = read10(2 * BLOCKS as u32 - 1, 1);
    assert!(guest.run(at(0, 0), &last, &[(DATA, 512, WRITE)]).good());
}

#[test]
fn drivers_get_only_events_that_they_negotiated() {
    for features in [0, HOTPLUG, CHANGE] {
        let (mut guest, file) = Guest::new();
        guest.connect(features);
        guest.settle(0, 0);
        let disk = open(&file, reporting());
        let answer = guest.handle.add(unit("other", at(0, 1), disk));
        answer.wait().unwrap();
        file.set_len(2 * BLOCKS * 512).unwrap();
        guest.handle.resize("first").unwrap();
        linger();
        let expected = match features {
            HOTPLUG => vec![added(at(0, 1))],
            CHANGE => vec![event(3, at(0, 0), 0x092a)],
            _ => vec![],
        };
        let told: Vec<_> = std::iter::from_fn(|| guest.event())
            .map(|(event, _)| event)
            .collect();
        assert_eq!(told, expected, "{features}");
        let first = guest.run(at(0, 0), &[0; 6], &[]).sense();
        if features == HOTPLUG {
            assert_eq!(first, (6, 0x2a, 9));
        } else {
            // Without the event there is a unit attention.
            assert_eq!(first, (6, 0x3f, 0x0e));
        }
    }
}

#[test]
fn pending_events_survive_a_pause_but_not_a_reset() {
    let (mut guest, file) = Guest::new();
    let queues = guest.scsi.quiesce().unwrap();
    let disk = open(&file, reporting());
    guest
        .handle
        .add(unit("other", at(0, 1), disk.clone()))
        .wait()
        .unwrap();
    linger();
    assert_eq!(guest.event(), None);
    guest.activate(HOTPLUG | CHANGE, queues);
    assert_eq!(guest.wait_event().0, added(at(0, 1)));
    guest.scsi.quiesce().unwrap();
    guest.handle.add(unit("third", at(0, 2), disk)).wait().unwrap();
    guest.connect(HOTPLUG | CHANGE);
    linger();
    assert_eq!(guest.event(), None);
    guest.settle(0, 2);
}

#[test]
fn a_driver_that_lost_events_scans() {
    let (mut guest, file) = Guest::new();
    let disk = open(&file, reporting());
    // More events than are kept, of disks that are added and removed at the same few thousand addresses.
    let mut told = Vec::new();
    for target in 1..=5u8 {
        for lun in 0..1024 {
            let (id, at) = (format!("{target}-{lun}"), at(target, lun));
            guest.handle.add(unit(&id, at, disk.clone())).wait().unwrap();
        }
        let answers: Vec<_> = (0..1024)
            .map(|lun| guest.handle.remove(&format!("{target}-{lun}")))
            .collect();
        answers
            .into_iter()
            .for_each(|answer| drop(answer.wait().unwrap()));
    }
    while let Some((event, buffer)) = {
        linger();
        guest.event()
    } {
        told.push(event);
        if told.iter().any(|event| event[3] == 0x80) {
            break;
        }
        guest.give(buffer);
    }
    let missed = told.iter().find(|event| event[3] & 0x80 != 0);
    assert_eq!(missed, Some(&[0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
    // As Linux does then: it queries the known units, and scans.
    let inquiry = [0x12, 0, 0, 0, 36, 0];
    let gone = guest.run(at(3, 5), &inquiry, &[(DATA, 36, WRITE)]);
    assert_eq!(gone.code, 3);
    assert!(guest.run(at(0, 0), &inquiry, &[(DATA, 36, WRITE)]).good());
    assert_eq!(removed(at(0, 0))[12], 2);
}
