//! Flow control, and connections that do not wait for each other.

use super::*;

#[test]
fn the_device_sends_what_the_guest_has_room_for() {
    let mut guest = Guest::new();
    guest.buf_alloc = 3000;
    let mut host = guest.connect(1024, 5000);
    host.write_all(&pattern(7500, 3)).unwrap();
    let mut bytes = guest.next().1;
    assert_eq!(bytes.len(), 3000);
    guest.expect(1024, 5000, CREDIT_REQUEST);
    // An answer without room is no reason to ask again.
    guest.send(1024, 5000, CREDIT_UPDATE);
    guest.expect_nothing();
    for fwd_cnt in [3000, 6000] {
        guest.fwd_cnt = fwd_cnt;
        guest.send(1024, 5000, CREDIT_UPDATE);
        bytes.extend(guest.next().1);
        if fwd_cnt == 3000 {
            guest.expect(1024, 5000, CREDIT_REQUEST);
        }
    }
    assert!(bytes == pattern(7500, 3));
    guest.expect_nothing();
}

/// Linux drops packets beyond a number, though there is credit for their bytes.
#[test]
fn small_packets_wait_until_the_guest_has_taken_others() {
    let mut guest = Guest::new();
    let mut host = guest.connect(1024, 5000);
    let sent = pattern(200_000, 4);
    let (mut bytes, mut parts) = (Vec::new(), sent.chunks(200));
    let packets = loop {
        host.write_all(parts.next().expect("the device sends all"))
            .unwrap();
        let (header, payload) = guest.next();
        if header.op == CREDIT_REQUEST {
            break bytes.len() / 200;
        }
        bytes.extend(payload);
    };
    assert!((200..300).contains(&packets), "{packets}");
    let rest: Vec<_> = parts.map(<[u8]>::to_vec).collect();
    let writer = std::thread::spawn(move || rest.iter().for_each(|part| host.write_all(part).unwrap()));
    // The guest takes nothing, and tells nothing when it does, unless it is asked.
    for _ in 0..3 {
        guest.send(1024, 5000, CREDIT_UPDATE);
        guest.expect_nothing();
        guest.expect(1024, 5000, CREDIT_REQUEST);
    }
    while bytes.len() < sent.len() {
        let before = bytes.len();
        guest.fwd_cnt = before as u32;
        guest.send(1024, 5000, CREDIT_UPDATE);
        loop {
            let (header, payload) = guest.next();
            match header.op {
                CREDIT_REQUEST => break,
                _ => bytes.extend(payload),
            }
            if bytes.len() == sent.len() {
                break;
            }
        }
        assert!(bytes.len() > before);
    }
    assert!(bytes == sent);
    writer.join().unwrap();
}

#[test]
fn a_guest_that_has_taken_a_part_of_a_packet_is_asked_again() {
    let mut guest = Guest::new();
    guest.buf_alloc = 2048;
    let mut host = guest.connect(1024, 5000);
    for len in [2000, 48] {
        host.write_all(&pattern(len, 1)).unwrap();
        assert_eq!(guest.next().1.len(), len);
    }
    host.write_all(b"more").unwrap();
    guest.expect(1024, 5000, CREDIT_REQUEST);
    // There are bytes free now, but no packet.
    guest.fwd_cnt = 100;
    guest.send(1024, 5000, CREDIT_UPDATE);
    guest.expect(1024, 5000, CREDIT_REQUEST);
    guest.expect(1024, 5000, CREDIT_REQUEST);
    guest.fwd_cnt = 2000;
    guest.send(1024, 5000, CREDIT_UPDATE);
    assert_eq!(guest.next().1, b"more");
}

#[test]
fn a_guest_that_asks_is_told_its_credit() {
    let mut guest = Guest::new();
    let _host = guest.connect(1024, 5000);
    guest.send_bytes(1024, 5000, &[0; 100]);
    guest.send(1024, 5000, CREDIT_REQUEST);
    let told = guest.expect(1024, 5000, CREDIT_UPDATE);
    assert_eq!((told.buf_alloc, told.fwd_cnt), (BUFFER, 100));
    guest.expect_nothing();
}

/// Sends as much as it has credit for while the host reads, and returns what is sent.
fn stream(guest: &mut Guest, total: usize) -> Vec<u8> {
    let sent = pattern(total, 9);
    let (mut at, mut free) = (0, BUFFER as usize);
    while at < total {
        while let Some((header, _)) = guest.try_next() {
            free = BUFFER as usize - (at as u32).wrapping_sub(header.fwd_cnt) as usize;
        }
        let len = free.min(total - at).min(60_000);
        if len > 0 {
            guest.send_bytes(1024, 5000, &sent[at..at + len]);
            (at, free) = (at + len, free - len);
        }
    }
    sent
}

#[test]
fn the_guest_is_told_when_the_host_has_read() {
    let mut guest = Guest::new();
    let mut host = guest.connect(1024, 5000);
    let total = 3 << 20;
    let reader = std::thread::spawn(move || heard(&mut host, total));
    let sent = stream(&mut guest, total);
    assert!(reader.join().unwrap() == sent);
}

#[test]
fn a_host_that_does_not_read_holds_up_no_other() {
    let mut guest = Guest::new();
    let mut slow = guest.connect(1, 5000);
    let mut quick = guest.connect(2, 5000);
    // As much as its socket and the device take.
    let mut sent = 0;
    loop {
        guest.send_bytes(1, 5000, &[7; 16 << 10]);
        sent += 16 << 10;
        guest.send(1, 5000, CREDIT_REQUEST);
        let told = wait_for("an answer", || {
            let header = guest.try_next()?.0;
            (header.op == CREDIT_UPDATE).then_some(header)
        });
        while guest.try_next().is_some() {}
        if BUFFER - (sent as u32).wrapping_sub(told.fwd_cnt) < 16 << 10 {
            break;
        }
    }
    for _ in 0..10 {
        guest.send_bytes(2, 5000, b"in time");
        assert_eq!(heard(&mut quick, 7), b"in time");
    }
    assert!(heard(&mut slow, sent).iter().all(|byte| *byte == 7));
}

#[test]
fn a_guest_program_that_does_not_read_holds_up_no_other() {
    let mut guest = Guest::new();
    guest.buf_alloc = 100;
    let mut slow = guest.connect(1, 5000);
    guest.buf_alloc = 0x4_0000;
    let mut quick = guest.connect(2, 5000);
    let waiting = fill(&mut slow);
    assert_eq!(guest.next().1.len(), 100);
    guest.expect(1, 5000, CREDIT_REQUEST);
    assert!(waiting > 100);
    for _ in 0..10 {
        quick.write_all(b"in time").unwrap();
        assert_eq!(guest.next().1, b"in time");
    }
}

#[test]
fn connections_take_turns() {
    let mut guest = Guest::new();
    let mut first = guest.connect(1, 5000);
    let mut second = guest.connect(2, 5000);
    let queues = guest.vsock.quiesce().unwrap();
    first.write_all(&pattern(40_000, 1)).unwrap();
    second.write_all(&pattern(40_000, 2)).unwrap();
    guest.activate(queues);
    let ports: Vec<_> = (0..8).map(|_| guest.next().0.dst_port).collect();
    assert!(
        ports == [1, 2, 1, 2, 1, 2, 1, 2] || ports == [2, 1, 2, 1, 2, 1, 2, 1],
        "{ports:?}"
    );
}

#[test]
fn a_guest_without_buffers_loses_nothing() {
    let mut guest = Guest::new();
    let mut host = guest.connect(1024, 5000);
    // Leave the buffers that are used without a successor.
    host.write_all(&pattern(200_000, 5)).unwrap();
    let total = 200_000 / (ROOM as usize - HEADER_LEN) + 1;
    let mut bytes = Vec::<u8>::new();
    for _ in 0..total {
        let (head, len) = guest.queues[0].wait();
        let mut packet = vec![0; len as usize];
        guest
            .mem
            .memory()
            .read_slice(&mut packet, GuestAddress(received(head)))
            .unwrap();
        bytes.extend(&packet[HEADER_LEN..]);
    }
    assert!(bytes == pattern(200_000, 5));
    for _ in 0..SIZE {
        if guest.queues[0].used().is_none() {
            host.write_all(b"x").unwrap();
        }
    }
    host.write_all(&pattern(1000, 6)).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    guest.offer(4);
    let rest = wait_for("the rest", || guest.try_next()).1;
    assert!(!rest.is_empty());
}
