//! The serial port, and what its reader and its guest see.

use super::*;

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
    read(IIR);
    assert_eq!(read(IIR) & 0xf, IIR_NONE, "the interrupt is off");
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
    port.reset().unwrap();
    let mut lcr = [0];
    port.read(3, &mut lcr);
    assert_eq!(lcr, [3], "8n1");
    assert_eq!(port.take_output(10), b"z");
}
