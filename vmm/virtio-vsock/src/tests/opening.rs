//! How connections begin, and how they are refused.

use super::*;
use crate::VsockError;

#[test]
fn the_guest_connects_to_the_host() {
    let mut guest = Guest::new();
    let mut host = guest.connect(1024, 5000);
    guest.send_bytes(1024, 5000, b"from the guest");
    assert_eq!(heard(&mut host, 14), b"from the guest");
    host.write_all(b"from the host").unwrap();
    let (header, bytes) = guest.next();
    assert_eq!((header.op, &bytes[..]), (RW, &b"from the host"[..]));
    assert_eq!((header.buf_alloc, header.fwd_cnt), (BUFFER, 14));
}

#[test]
fn the_host_connects_to_the_guest() {
    let mut guest = Guest::new();
    let (mut host, port) = guest.accept(22);
    assert!(port >= 1 << 30);
    host.write_all(b"hello").unwrap();
    assert_eq!(guest.next().1, b"hello");
    guest.send_bytes(22, port, b"you");
    assert_eq!(heard(&mut host, 3), b"you");
    let (_other, other_port) = guest.accept(22);
    assert_ne!(port, other_port);
}

#[test]
fn bytes_sent_before_the_guest_accepts_are_not_lost() {
    let mut guest = Guest::new();
    let (mut host, stream) = pair();
    host.write_all(b"early").unwrap();
    guest.handle.connect(7, stream.into()).unwrap();
    let (request, _) = guest.next();
    guest.expect_nothing();
    guest.send(7, request.src_port, RESPONSE);
    assert_eq!(guest.next().1, b"early");
}

#[test]
fn each_side_may_refuse() {
    let mut guest = Guest::new();
    guest.send(1024, 5000, REQUEST);
    let (id, _) = guest.request();
    guest.handle.answer(id, None).unwrap();
    guest.expect(1024, 5000, RST);
    let _host = guest.connect(1024, 5000);

    let (mut host, stream) = pair();
    guest.handle.connect(9, stream.into()).unwrap();
    let (request, _) = guest.next();
    guest.send(9, request.src_port, RST);
    assert_eq!(heard_all(&mut host), b"");
    guest.expect_nothing();
}

#[test]
fn a_host_that_hangs_up_before_the_answer_is_forgotten() {
    let mut guest = Guest::new();
    let (host, stream) = pair();
    guest.handle.connect(9, stream.into()).unwrap();
    let (request, _) = guest.next();
    drop(host);
    guest.expect(9, request.src_port, RST);
    guest.send(9, request.src_port, RESPONSE);
    guest.expect(9, request.src_port, RST);
}

#[test]
fn an_answer_after_the_guest_has_given_up_does_nothing() {
    let mut guest = Guest::new();
    guest.send(1024, 5000, REQUEST);
    let (id, _) = guest.request();
    guest.send(1024, 5000, RST);
    let (mut host, stream) = pair();
    guest.handle.answer(id, Some(stream.into())).unwrap();
    assert_eq!(heard_all(&mut host), b"");
    guest.handle.answer(id, None).unwrap();
    guest.handle.answer(77, None).unwrap();
    guest.expect_nothing();
    guest.connect(1024, 5000);
}

#[test]
fn packets_of_no_connection_are_reset() {
    let mut guest = Guest::new();
    for op in [RESPONSE, SHUTDOWN, RW, CREDIT_UPDATE, CREDIT_REQUEST, 0, 99] {
        guest.send(1, 2, op);
        guest.expect(1, 2, RST);
    }
    guest.send(1, 2, RST);
    guest.expect_nothing();
    let header = Header {
        kind: 2,
        ..guest.header(1, 2, REQUEST)
    };
    guest.send_packet(&header, &[]);
    assert_eq!(guest.expect(1, 2, RST).kind, 2);
    let header = Header {
        src_cid: 4,
        ..guest.header(1, 2, REQUEST)
    };
    guest.send_packet(&header, &[]);
    guest.expect_nothing();
    assert_eq!(*guest.requests.lock().unwrap(), []);
}

#[test]
fn another_cid_than_the_hosts_is_refused() {
    let mut guest = Guest::new();
    let header = Header {
        dst_cid: 5,
        ..guest.header(1, 2, REQUEST)
    };
    guest.send_packet(&header, &[]);
    let (head, len) = guest.queues[0].wait();
    let mut bytes = vec![0; len as usize];
    guest
        .mem
        .memory()
        .read_slice(&mut bytes, GuestAddress(received(head)))
        .unwrap();
    let reset = Header::from_bytes(bytes.first_chunk().unwrap());
    assert_eq!((reset.src_cid, reset.dst_cid, reset.op), (5, CID, RST));
}

#[test]
fn there_is_a_limit_of_connections() {
    let mut guest = Guest::new();
    for number in 0..crate::MAX_CONNECTIONS as u32 {
        guest.requests.lock().unwrap().clear();
        guest.send(number, 5000, REQUEST);
    }
    guest.expect_nothing();
    guest.requests.lock().unwrap().clear();
    guest.send(5000, 5000, REQUEST);
    guest.expect(5000, 5000, RST);
    let (mut host, stream) = pair();
    guest.handle.connect(9, stream.into()).unwrap();
    assert_eq!(heard_all(&mut host), b"");
    assert_eq!(*guest.requests.lock().unwrap(), []);
    guest.send(17, 5000, RST);
    guest.connect(5000, 5000);
}

#[test]
fn a_host_that_cannot_answer_now_refuses() {
    let mut guest = Guest::new();
    for number in 0..1000 {
        guest.send(number, 5000, REQUEST);
    }
    guest.expect_nothing();
    guest.send(1000, 5000, REQUEST);
    guest.expect(1000, 5000, RST);
}

#[test]
fn a_guest_without_a_driver_is_no_peer() {
    let mut guest = Guest::new();
    guest.vsock.reset();
    let (mut host, stream) = pair();
    let error = guest.handle.connect(9, stream.into()).unwrap_err();
    assert!(matches!(error, VsockError::NoDriver), "{error}");
    assert_eq!(heard_all(&mut host), b"");
}
