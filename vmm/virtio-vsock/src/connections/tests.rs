use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use super::*;

const CID: u64 = 3;
const CYCLES: usize = 10_000;

/// Connections of a guest without receive buffers, as long as no packet is taken.
fn connections() -> Connections {
    let port = Arc::new(FIRST_HOST_PORT.into());
    Connections::new(CID, port, Arc::default(), Arc::new(|_, _| true)).unwrap()
}

fn from_guest(op: u16) -> Header {
    Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: 1024,
        dst_port: 5000,
        kind: STREAM,
        op,
        ..Header::default()
    }
}

fn socket() -> File {
    let (_, stream) = UnixStream::pair().unwrap();
    stream.set_nonblocking(true).unwrap();
    OwnedFd::from(stream).into()
}

/// The host hangs up on the only connection.
fn hang_up(connections: &mut Connections, now: Instant) {
    let token = connections.table.first_key_value().unwrap().0.token();
    connections.host_event(token, true, now);
}

#[test]
fn a_guest_that_takes_no_answer_and_resets_fills_no_queue() {
    let (mut connections, now) = (connections(), Instant::now());
    for id in 0..CYCLES as u64 {
        connections.take(&from_guest(REQUEST), Some(&[]), now);
        connections.answer(id, Some(socket()), now);
        assert_eq!((connections.ready.len(), connections.resets.len()), (1, 0));
        connections.take(&from_guest(RST), Some(&[]), now);
    }
    assert!(!connections.has_outgoing());
}

#[test]
fn hosts_that_hang_up_before_the_guest_is_asked_fill_no_queue() {
    let (mut connections, now) = (connections(), Instant::now());
    for _ in 0..CYCLES {
        connections.connect(1024, socket(), now);
        assert_eq!((connections.ready.len(), connections.resets.len()), (1, 0));
        hang_up(&mut connections, now);
    }
    assert!(!connections.has_outgoing());
    assert_eq!(connections.until_deadline(now), None);

    // A guest that was asked is told.
    connections.connect(1024, socket(), now);
    let mut op = || Some(connections.next_packet(&mut [0; 64], now)?.0.op);
    assert_eq!((op(), op()), (Some(REQUEST), None));
    hang_up(&mut connections, now);
    let (header, _) = connections.next_packet(&mut [0; 64], now).unwrap();
    assert_eq!((header.op, header.dst_port), (RST, 1024));
}
