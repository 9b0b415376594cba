//! Drivers that violate the specification.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

#[test]
fn a_request_without_room_for_a_response_sets_device_needs_reset() {
    for chain in [
        vec![(HEADERS, 51, 0)],
        vec![(HEADERS, 51, 0), (RESPONSES, 107, WRITE)],
        vec![(HEADERS, 51, 0), (END as u64 - 50, 108, WRITE)],
        vec![(HEADERS, 51, 0), (RESPONSES, 108, WRITE), (HEADERS, 1, 0)],
    ] {
        let (mut guest, _file) = Guest::new();
        guest.request[0].add(&chain);
        guest.request[0].kick();
        wait_for("the end of the device", || guest.interrupts.reset());
        assert_eq!(guest.request[0].used(), None);
        // The device works again after a reset.
        guest.connect(HOTPLUG);
        guest.settle(0, 0);
    }
}

#[test]
fn answers_before_a_malformed_request_arrive() {
    let (mut guest, _file) = Guest::new();
    let (head, response) = guest.add(at(0, 0), &[0; 6], &[]);
    guest.request[0].add(&[(HEADERS, 51, 0)]);
    guest.request[0].kick();
    wait_for("the end of the device", || guest.interrupts.reset());
    let (used, len) = guest.request[0].used().unwrap();
    assert_eq!(used, head);
    assert!(guest.ended(response, len).good());
}

#[test]
fn a_bad_request_fails_alone() {
    let (mut guest, _file) = Guest::new();
    let (header, response) = guest.frame(field(at(0, 0)), 1, 0, &read10(0, 1));
    let outside = END as u64 - 100;
    for chain in [
        // A header that is too short.
        vec![(header.0, 50, 0), response],
        vec![response],
        // One that is not in memory.
        vec![(END as u64 - 20, 101, 0), response],
        // Data in both directions.
        vec![header, (DATA, 512, 0), response, (DATA, 512, WRITE)],
        // Data that is not in memory.
        vec![header, response, (outside, 512, WRITE)],
        vec![header, response, (u64::MAX - 100, 512, WRITE)],
    ] {
        guest.put(response.0, &[0xee; 108]);
        guest.request[0].add(&chain);
        guest.request[0].kick();
        let (_, used) = guest.request[0].wait();
        let ended = guest.ended(response.0, used);
        assert_eq!((ended.code, ended.used), (9, RESPONSE), "{chain:x?}");
    }
    assert!(!guest.is_broken());
    assert!(guest.run(at(0, 0), &[0; 6], &[]).good());
}

#[test]
fn bad_control_requests_fail_alone() {
    let (mut guest, _file) = Guest::new();
    let (response, one) = (RESPONSES, 1);
    guest.put(HEADERS, &[0; 64]);
    guest.put(HEADERS + 64, &[9, 0, 0, 0]);
    for (chain, len, code) in [
        (vec![(HEADERS, 23, 0), (response, one, WRITE)], 1, Some(9)),
        // An unknown type.
        (vec![(HEADERS + 64, 24, 0), (response, one, WRITE)], 0, None),
    ] {
        guest.put(response, &[0xee]);
        guest.control.add(&chain);
        guest.control.kick();
        assert_eq!(guest.control.wait().1, len);
        assert_eq!(guest.get(response, 1)[0], code.unwrap_or(0xee));
    }
    guest.control.add(&[(HEADERS, 24, 0)]);
    guest.control.kick();
    wait_for("the end of the device", || guest.interrupts.reset());
}

#[test]
fn a_short_event_buffer_sets_device_needs_reset() {
    let (mut guest, file) = Guest::new();
    for _ in 0..8 {
        // Use up the valid buffers.
        let disk = open(&file, reporting());
        let number = guest.requests as u16;
        guest.requests += 1;
        let disk = unit(&number.to_string(), at(9, number), disk);
        guest.handle.add(disk).wait().unwrap();
        guest.wait_event();
    }
    guest.event.add(&[(DATA, 15, WRITE)]);
    guest.event.kick();
    linger();
    assert!(!guest.is_broken(), "nobody looked");
    let disk = unit("x", at(10, 0), open(&file, reporting()));
    guest.handle.add(disk).wait().unwrap();
    wait_for("the end of the device", || guest.interrupts.reset());
    // The handle still works.
    assert_eq!(guest.handle.list().wait().unwrap().len(), 10);
}

/// Descriptors anywhere, most of them in memory.
fn descriptor() -> impl Strategy<Value = Descriptor> {
    let address = prop_oneof![
        6 => HEADERS..DATA + 0x1000,
        1 => any::<u64>(),
        1 => END as u64 - 600..END as u64,
    ];
    let len = prop_oneof![4 => 0..200u32, 2 => Just(512), 1 => Just(108), 1 => Just(51), 1 => any::<u32>()];
    (address, len, prop_oneof![Just(0), Just(WRITE)])
}

fn lun() -> impl Strategy<Value = [u8; 8]> {
    prop_oneof![
        4 => Just(field(at(0, 0))),
        1 => Just(field(at(0, 7))),
        1 => any::<[u8; 8]>(),
    ]
}

fn cdb() -> impl Strategy<Value = Vec<u8>> {
    let opcode = prop_oneof![
        4 => prop::sample::select(vec![
            0x00, 0x03, 0x12, 0x15, 0x1a, 0x1b, 0x25, 0x28, 0x2a, 0x2e, 0x2f, 0x35, 0x41, 0x42, 0x55, 0x5a, 0x5e, 0x5f,
            0x88, 0x89, 0x8a, 0x8f, 0x91, 0x93, 0x9e, 0xa0, 0xa3, 0xa8, 0xaa,
        ]),
        1 => any::<u8>(),
    ];
    (
        opcode,
        vec(prop_oneof![3 => Just(0), 1 => 0..4u8, 1 => any::<u8>()], 31),
    )
        .prop_map(|(opcode, mut rest)| {
            rest.insert(0, opcode);
            rest
        })
}

#[derive(Clone, Debug)]
enum Act {
    /// Any chain in any queue.
    Chain(u8, Vec<Descriptor>),
    /// A proper request with any data.
    Request([u8; 8], u8, Vec<u8>, Vec<Descriptor>),
    Function(u32, [u8; 8], u64),
    Pause,
    Reset,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        2 => (0..4u8, vec(descriptor(), 1..6)).prop_map(|(queue, chain)| Act::Chain(queue, chain)),
        8 => (lun(), 0..5u8, cdb(), vec(descriptor(), 0..4)).prop_map(|(l, a, c, d)| Act::Request(l, a, c, d)),
        2 => (0..10u32, lun(), 0..30u64).prop_map(|(kind, lun, id)| Act::Function(kind, lun, id)),
        1 => Just(Act::Pause),
        1 => Just(Act::Reset),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever the driver does, a reset brings back a device that works, and the host is served throughout.
    #[test]
    fn nothing_a_driver_does_outlives_a_reset(acts in vec(act(), 1..40)) {
        let (mut guest, _file) = Guest::new();
        for act in acts {
            match act {
                Act::Chain(queue, chain) => {
                    let driver = match queue {
                        0 => &mut guest.control,
                        1 => &mut guest.event,
                        n => &mut guest.request[usize::from(n) - 2],
                    };
                    driver.add(&chain);
                    driver.kick();
                }
                Act::Request(lun, attribute, cdb, data) => {
                    guest.add_with(lun, guest.requests, attribute, &cdb, &data);
                    guest.request[0].kick();
                }
                Act::Function(kind, lun, id) => drop(guest.manage(kind, lun, id)),
                Act::Pause => {
                    let queues = guest.scsi.quiesce();
                    let queues = queues.expect("the queues");
                    guest.activate(HOTPLUG | CHANGE, queues);
                }
                Act::Reset => guest.connect(HOTPLUG | CHANGE),
            }
        }
        prop_assert_eq!(guest.handle.list().wait().unwrap().len(), 1);
        guest.connect(HOTPLUG | CHANGE);
        guest.settle(0, 0);
        let ended = guest.run(at(0, 0), &read10(0, 8), &[(DATA, 4096, WRITE)]);
        prop_assert!(ended.good(), "{:?}", ended);
    }
}
