//! The serial port, and what its reader and its guest see.

use proptest::prelude::*;

use super::*;
use crate::component::Component;
use crate::component::testing::{mutate, mutation};

fn port() -> (SerialPort, EventFd, EventFd, EventFd) {
    let fd = || EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let (irq, out, wanted) = (fd(), fd(), fd());
    let port = SerialPort::new(
        irq.try_clone().unwrap(),
        out.try_clone().unwrap(),
        wanted.try_clone().unwrap(),
    );
    (port, irq, out, wanted)
}

#[test]
fn output_is_buffered_signalled_once_and_taken() {
    let (port, _, out, _) = port();
    for byte in b"hello" {
        port.write(0, &[*byte]);
    }
    assert_eq!(out.read().unwrap(), 1);
    assert_eq!(port.take_output(3), b"hel");
    assert_eq!(port.take_output(100), b"lo");
    port.write(0, b"!");
    assert_eq!(out.read().unwrap(), 1);
}

#[test]
fn a_stalled_reader_loses_only_old_output() {
    let (port, _, _, _) = port();
    for i in 0..OUTPUT_LIMIT + 10 {
        port.write(0, &[i as u8]);
    }
    assert_eq!(port.dropped(), 10);
    let all = port.take_output(usize::MAX);
    assert_eq!(all.len(), OUTPUT_LIMIT);
    assert_eq!(all[0], 10);
}

#[test]
fn input_is_offered_as_the_fifo_has_room() {
    let (port, irq, _, wanted) = port();
    port.write(1, &[1]); // receive interrupt on
    assert_eq!(port.send(&[b'x'; 100]), 64);
    assert_eq!(irq.read().unwrap(), 1);
    assert!(wanted.read().is_err());
    let mut byte = [0];
    port.read(0, &mut byte);
    assert_eq!(byte, [b'x']);
    assert_eq!(wanted.read().unwrap(), 1);
    assert_eq!(port.send(&[b'y'; 100]), 1);
}

#[test]
fn the_interrupt_stays_until_all_data_is_read() {
    let (port, _, _, _) = port();
    let read = |register| {
        let mut byte = [0];
        port.read(register, &mut byte);
        byte[0]
    };
    port.write(IER, &[IER_RDA]);
    port.send(b"ab");
    for byte in *b"ab" {
        assert_eq!(read(IIR) & 0xf, IIR_RDA);
        assert_eq!(read(0), byte);
    }
    assert_eq!(read(IIR) & 0xf, IIR_NONE);
    port.send(b"c");
    port.write(IER, &[0]);
    assert_eq!(read(IIR) & 0xf, IIR_NONE, "the interrupt is off");
    port.write(IER, &[IER_THR_EMPTY]);
    port.write(IER, &[0]);
    assert_eq!(read(IIR) & 0xf, IIR_NONE, "that of the transmitter, too");
}

#[test]
fn the_interrupt_of_the_transmitter_follows_that_of_received_data() {
    let read = |port: &SerialPort, register| {
        let mut byte = [0];
        port.read(register, &mut byte);
        byte[0]
    };
    let (old, new) = (port().0, port().0);
    old.write(IER, &[IER_RDA | IER_THR_EMPTY]);
    old.write(0, b"x");
    old.send(b"a");
    assert_eq!(read(&old, IIR) & 0xf, IIR_RDA);
    new.restore(&old.save().unwrap()).unwrap();
    for port in [old, new] {
        assert_eq!(read(&port, 0), b'a');
        assert_eq!(read(&port, IIR) & 0xf, IIR_THR_EMPTY);
        assert_eq!(read(&port, IIR) & 0xf, IIR_NONE);
    }
}

#[test]
fn input_refused_during_loopback_is_requested_when_it_ends() {
    let (port, _, _, wanted) = port();
    port.write(4, &[0x10]); // loopback
    assert_eq!(port.send(b"x"), 0);
    port.write(4, &[0x08]);
    assert_eq!(wanted.read().unwrap(), 1);
    assert_eq!(port.send(b"x"), 1);
}

#[test]
fn reset_keeps_output_and_forgets_registers() {
    let (port, _, _, _) = port();
    port.write(3, &[0x1b]);
    port.write(0, b"z");
    port.reset();
    let mut lcr = [0];
    port.read(3, &mut lcr);
    assert_eq!(lcr, [3], "8n1");
    assert_eq!(port.take_output(10), b"z");
}

#[derive(Clone, Debug)]
enum Step {
    Read(u64),
    Write(u64, u8),
    Send(Vec<u8>),
    Take(usize),
    Save,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..8_u64).prop_map(Step::Read),
        4 => (0..8_u64, any::<u8>()).prop_map(|(at, value)| Step::Write(at, value)),
        2 => prop::collection::vec(any::<u8>(), 0..80).prop_map(Step::Send),
        1 => (0..8_usize).prop_map(Step::Take),
        2 => Just(Step::Save),
    ]
}

proptest! {
    /// Guest and reader see the same, whether or not the port is saved and restored between their accesses.
    #[test]
    fn a_restored_port_continues(steps in prop::collection::vec(step(), 0..80)) {
        let (plain, _, _, plain_wanted) = port();
        let (mut saved, _, _, mut saved_wanted) = port();
        for step in steps {
            match step {
                Step::Read(at) => {
                    let [a, b] = [&plain, &saved].map(|port| {
                        let mut byte = [0];
                        port.read(at, &mut byte);
                        byte
                    });
                    prop_assert_eq!(a, b);
                }
                Step::Write(at, value) => [&plain, &saved].into_iter().for_each(|port| port.write(at, &[value])),
                Step::Send(bytes) => prop_assert_eq!(plain.send(&bytes), saved.send(&bytes)),
                Step::Take(limit) => prop_assert_eq!(plain.take_output(limit), saved.take_output(limit)),
                Step::Save => {
                    let state = saved.save().unwrap();
                    let asked = saved_wanted.read().is_ok();
                    let (twin, _, out, wanted) = port();
                    twin.restore(&state).unwrap();
                    prop_assert_eq!(out.read().is_ok(), !twin.state().uart.writer().bytes.is_empty());
                    prop_assert_eq!(twin.save().unwrap(), state);
                    if asked {
                        wanted.write(1).unwrap();
                    }
                    (saved, saved_wanted) = (twin, wanted);
                }
            }
            prop_assert_eq!(plain_wanted.read().is_ok(), saved_wanted.read().is_ok());
        }
    }

    #[test]
    fn a_hostile_state_is_refused_or_harmless(changes in prop::collection::vec(mutation(), 1..4)) {
        let (port, ..) = port();
        port.write(0, b"out");
        port.send(b"in");
        let fresh = port.save().unwrap();
        let mut state = fresh.clone();
        changes.iter().for_each(|(place, change)| mutate(&mut state, *place, change));
        if port.restore(&state).is_err() {
            prop_assert_eq!(port.save().unwrap(), fresh);
        }
        port.send(b"more");
        for at in 0..8 {
            port.read(at, &mut [0]);
            port.write(at, &[0x55]);
        }
    }
}

#[test]
fn more_than_the_buffers_hold_is_refused() {
    let (port, ..) = port();
    for (field, limit) in [("received", 64), ("output", OUTPUT_LIMIT)] {
        for (len, fits) in [(limit, true), (limit + 1, false)] {
            let mut state: serde_json::Value = port.save().unwrap().into();
            state[field] = serde_json::to_value(crate::component::Bytes(vec![7; len])).unwrap();
            assert_eq!(port.restore(&state.into()).is_ok(), fits, "{field} {len}");
        }
        port.reset();
    }
}
