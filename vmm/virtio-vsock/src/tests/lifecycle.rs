//! Pause, reset, and the device at rest.

use super::*;

#[test]
fn a_pause_ends_no_connection() {
    let mut guest = Guest::new();
    let mut host = guest.connect(1024, 5000);
    let (mut other, port) = guest.accept(22);
    let queues = guest.vsock.quiesce().unwrap();
    assert_eq!(
        queues.iter().map(|queue| queue.index).collect::<Vec<_>>(),
        [0, 1, 2]
    );
    host.write_all(b"meanwhile").unwrap();
    let (mut third, stream) = pair();
    guest.handle.connect(23, stream.into()).unwrap();
    guest.activate(queues);
    let mut seen = [guest.next(), guest.next()];
    seen.sort_by_key(|(header, _)| header.dst_port);
    assert_eq!((seen[0].0.op, seen[0].0.dst_port), (REQUEST, 23));
    assert_eq!(seen[1].1, b"meanwhile");
    guest.send(23, seen[0].0.src_port, RST);
    assert_eq!(heard_all(&mut third), b"");
    guest.send_bytes(22, port, b"goes on");
    assert_eq!(heard(&mut other, 7), b"goes on");
}

#[test]
fn data_that_arrives_as_the_device_stops_is_not_lost() {
    let mut guest = Guest::new();
    let mut host = guest.connect(1024, 5000);
    for round in 0..2000_u32 {
        let byte = [round as u8];
        let queues = std::thread::scope(|scope| {
            scope.spawn(|| {
                // At another moment each time.
                (0..round).for_each(|_| std::hint::spin_loop());
                host.write_all(&byte).unwrap();
            });
            guest.vsock.quiesce().unwrap()
        });
        guest.activate(queues);
        let (header, bytes) = guest.next();
        assert_eq!((header.op, bytes.as_slice()), (RW, &byte[..]), "round {round}");
        guest.fwd_cnt += 1;
        if round % 100 == 99 {
            guest.send(1024, 5000, CREDIT_UPDATE);
        }
    }
}

#[test]
fn messages_to_a_paused_device_are_limited() {
    let mut guest = Guest::new();
    let queues = guest.vsock.quiesce().unwrap();
    let mut ends: Vec<_> = (0..70)
        .map(|_| {
            let (host, stream) = pair();
            (host, guest.handle.connect(9, stream.into()))
        })
        .collect();
    let (mut host, refused) = ends.pop().unwrap();
    assert!(matches!(refused, Err(crate::VsockError::Busy)));
    assert_eq!(heard_all(&mut host), b"");
    assert_eq!(ends.iter().filter(|(_, sent)| sent.is_ok()).count(), 64);
    guest.activate(queues);
    for _ in 0..64 {
        assert_eq!(guest.next().0.op, REQUEST);
    }
}

#[test]
fn a_reset_ends_all_connections() {
    let mut guest = Guest::new();
    for _ in 0..3 {
        let mut host = guest.connect(1024, 5000);
        let (mut other, port) = guest.accept(22);
        guest.send(1025, 5000, REQUEST);
        let (id, _) = guest.request();
        guest.vsock.reset();
        assert_eq!(heard_all(&mut host), b"");
        assert_eq!(heard_all(&mut other), b"");
        guest.start();
        // Nothing of it reaches the next driver.
        let (mut late, stream) = pair();
        guest.handle.answer(id, Some(stream.into())).unwrap();
        assert_eq!(heard_all(&mut late), b"");
        guest.expect_nothing();
        guest.send(22, port, CREDIT_UPDATE);
        guest.expect(22, port, RST);
    }
}

#[test]
fn a_connection_that_begins_during_a_reset_is_closed() {
    let mut guest = Guest::new();
    let _queues = guest.vsock.quiesce().unwrap();
    let (mut host, stream) = pair();
    guest.handle.connect(9, stream.into()).unwrap();
    guest.vsock.reset();
    assert_eq!(heard_all(&mut host), b"");
    guest.start();
    guest.expect_nothing();
}

#[test]
fn the_configuration_is_the_guests_cid() {
    let guest = Guest::new();
    let mut cid = [0; 8];
    guest.vsock.read_config(0, &mut cid);
    assert_eq!(u64::from_le_bytes(cid), CID);
    assert_eq!(guest.vsock.features() & 0b11, 1, "stream sockets only");
}

#[test]
fn a_driver_without_an_event_queue_is_served() {
    let mut guest = Guest::new();
    let mut queues = guest.vsock.quiesce().unwrap();
    queues.truncate(2);
    guest.vsock.reset();
    guest.activate(queues);
    guest.connect(1, 5000);
}
