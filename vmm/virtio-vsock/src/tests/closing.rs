//! How connections end.

use std::net::Shutdown;

use super::*;

#[test]
fn the_guest_closes() {
    let mut guest = Guest::new();
    let mut host = guest.connect(1024, 5000);
    guest.send_bytes(1024, 5000, b"last words");
    guest.send_flags(1024, 5000, SHUTDOWN_BOTH);
    guest.expect(1024, 5000, RST);
    assert_eq!(heard_all(&mut host), b"last words");
    assert!(host.write_all(b"x").is_err());
    guest.connect(1024, 5000);
}

#[test]
fn the_guest_half_closes() {
    let mut guest = Guest::new();
    let (mut host, port) = guest.accept(22);
    guest.send_bytes(22, port, b"question");
    guest.send_flags(22, port, SHUTDOWN_SEND);
    assert_eq!(heard_all(&mut host), b"question");
    host.write_all(b"answer").unwrap();
    assert_eq!(guest.next().1, b"answer");
    guest.send_flags(22, port, SHUTDOWN_RCV);
    guest.expect(22, port, RST);
}

#[test]
fn the_guest_reads_no_more() {
    let mut guest = Guest::new();
    let (mut host, port) = guest.accept(22);
    guest.send_flags(22, port, SHUTDOWN_RCV);
    wait_for("a closed direction", || host.write_all(b"x").err());
    guest.send_bytes(22, port, b"still");
    assert_eq!(heard(&mut host, 5), b"still");
    // It is told that the host closes, although it reads nothing.
    drop(host);
    assert_eq!(guest.expect(22, port, SHUTDOWN).flags, SHUTDOWN_BOTH);
}

#[test]
fn the_host_half_closes() {
    let mut guest = Guest::new();
    let mut host = guest.connect(1024, 5000);
    host.write_all(b"question").unwrap();
    host.shutdown(Shutdown::Write).unwrap();
    assert_eq!(guest.next().1, b"question");
    assert_eq!(guest.expect(1024, 5000, SHUTDOWN).flags, SHUTDOWN_SEND);
    guest.send_bytes(1024, 5000, b"answer");
    assert_eq!(heard(&mut host, 6), b"answer");
    drop(host);
    assert_eq!(guest.expect(1024, 5000, SHUTDOWN).flags, SHUTDOWN_BOTH);
    guest.send(1024, 5000, RST);
    guest.expect_nothing();
}

#[test]
fn the_host_closes() {
    let mut guest = Guest::new();
    let mut host = guest.connect(1024, 5000);
    host.write_all(&pattern(10_000, 1)).unwrap();
    drop(host);
    let mut bytes = Vec::new();
    let last = loop {
        let (header, more) = guest.next();
        bytes.extend(more);
        if header.op != RW {
            break header;
        }
    };
    assert!(bytes == pattern(10_000, 1));
    assert_eq!((last.op, last.flags), (SHUTDOWN, SHUTDOWN_BOTH));
    // What the guest still sends is taken and discarded.
    for _ in 0..3 {
        guest.send_bytes(1024, 5000, &vec![0; BUFFER as usize]);
        assert_eq!(guest.expect(1024, 5000, CREDIT_UPDATE).buf_alloc, BUFFER);
    }
    guest.send(1024, 5000, RST);
    guest.expect_nothing();
}

#[test]
fn a_guest_that_never_ends_a_closed_connection_loses_it() {
    let mut guest = Guest::new();
    drop(guest.connect(1024, 5000));
    guest.expect(1024, 5000, SHUTDOWN);
    let start = std::time::Instant::now();
    guest.expect(1024, 5000, RST);
    assert!(start.elapsed() > Duration::from_secs(8));
}

#[test]
fn a_guest_that_does_not_answer_is_given_up() {
    let mut guest = Guest::new();
    let (mut host, stream) = pair();
    guest.handle.connect(9, stream.into()).unwrap();
    let port = guest.next().0.src_port;
    assert_eq!(heard_all(&mut host), b"");
    guest.expect(9, port, RST);
}

#[test]
fn a_host_that_does_not_answer_is_given_up() {
    let mut guest = Guest::new();
    guest.send(1024, 5000, REQUEST);
    let (id, _) = guest.request();
    guest.expect(1024, 5000, RST);
    let (mut host, stream) = pair();
    guest.handle.answer(id, Some(stream.into())).unwrap();
    assert_eq!(heard_all(&mut host), b"");
    // A connection that was answered stays.
    let _host = guest.connect(1024, 5001);
    std::thread::sleep(Duration::from_secs(11));
    guest.expect_nothing();
}

#[test]
fn a_slow_host_gets_what_the_guest_sent_before_it_closed() {
    let mut guest = Guest::new();
    let mut host = guest.connect(1024, 5000);
    let (mut sent, mut credit) = (Vec::new(), BUFFER);
    // Until the socket and the device's buffer are full.
    while credit > 0 {
        let bytes = pattern(credit.min(5000) as usize, sent.len() as u8);
        guest.send_bytes(1024, 5000, &bytes);
        sent.extend(bytes);
        let told = wait_for("an answer", || {
            guest.send(1024, 5000, CREDIT_REQUEST);
            guest.try_next()
        });
        credit = BUFFER - (sent.len() as u32).wrapping_sub(told.0.fwd_cnt);
        while guest.try_next().is_some() {}
    }
    assert!(sent.len() > BUFFER as usize);
    guest.send_flags(1024, 5000, SHUTDOWN_BOTH);
    wait_for("a reset", || {
        guest.try_next().filter(|(header, _)| header.op == RST)
    });
    assert!(heard_all(&mut host) == sent);
}
