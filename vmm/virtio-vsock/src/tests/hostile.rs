//! Drivers that break the rules: they harm their own connection or device, and nothing else.

use husk_devices::virtio::testing::NEXT;
use proptest::prelude::*;

use super::*;

#[test]
fn a_broken_ring_sets_device_needs_reset() {
    type Act = fn(&mut Guest);
    let acts: [(&str, Act); 7] = [
        ("transmit queue: ", |guest| {
            guest.queues[1].put(0, (SENT, 100, NEXT), 0);
            guest.queues[1].offer(0);
        }),
        ("transmit queue: ", |guest| {
            guest.queues[1].add(&[(END as u64 - 4, 100, 0)]);
        }),
        ("transmit queue: ", |guest| guest.queues[1].set_available(1000)),
        ("transmit queue: ", |guest| guest.queues[1].offer(5000)),
        ("transmit queue: ", |guest| {
            guest.queues[1].add(&[(SENT, 8, WRITE), (SENT, 8, 0)]);
        }),
        ("receive queue: ", |guest| {
            guest.queues[0].set_available(1000);
            guest.send(1, 2, RW);
        }),
        (
            "receive queue: buffer without space for more than the 44 bytes",
            |guest| {
                let queues = guest.vsock.quiesce().unwrap();
                for head in 0..SIZE {
                    guest.queues[0].put(head, (RECEIVED, 44, WRITE), 0);
                }
                guest.activate(queues);
                guest.send(1, 2, RW);
            },
        ),
    ];
    let mut guest = Guest::new();
    for (reason, act) in acts {
        guest.start();
        let mut host = guest.connect(1024, 5000);
        act(&mut guest);
        guest.queues.iter().for_each(Driver::kick);
        let said = guest.broken();
        assert!(said.starts_with(reason), "{said}");
        // The host need not wait for the reset.
        assert_eq!(heard_all(&mut host), b"");
        wait_for("no driver", || guest.handle.answer(0, None).err());
    }
    guest.start();
    guest.connect(1024, 5000);
}

/// What ends a connection of the guest with RST, and no other.
#[test]
fn a_broken_rule_costs_the_connection() {
    type Act = fn(&mut Guest);
    let acts: [Act; 9] = [
        |guest| guest.send(1, 5000, REQUEST),
        |guest| guest.send(1, 5000, RESPONSE),
        |guest| guest.send(1, 5000, 8),
        // More than the credit.
        |guest| {
            let header = Header {
                len: BUFFER + 1,
                ..guest.header(1, 5000, RW)
            };
            guest.send_packet(&header, &[0; 100]);
        },
        |guest| {
            let header = Header {
                len: u32::MAX,
                ..guest.header(1, 5000, RW)
            };
            guest.send_packet(&header, &[]);
        },
        // Shorter than it says.
        |guest| {
            let header = Header {
                len: 101,
                ..guest.header(1, 5000, RW)
            };
            guest.send_packet(&header, &[0; 100]);
        },
        // After the end.
        |guest| {
            guest.send_flags(1, 5000, SHUTDOWN_SEND);
            guest.send_bytes(1, 5000, b"x");
        },
        |guest| {
            let header = Header {
                kind: 2,
                ..guest.header(9, 5000, RW)
            };
            guest.send_packet(&header, &[]);
            guest.expect(9, 5000, RST);
            guest.send(1, 5000, 0);
        },
        |guest| {
            // The buffer and the socket, and one byte more.
            let mut sent = 0;
            while guest.try_next().is_none_or(|(header, _)| header.op != RST) {
                guest.send_bytes(1, 5000, &[0; 32 << 10]);
                sent += 1;
                assert!(sent < 1000);
            }
            guest.send(1, 5000, RW);
        },
    ];
    let mut guest = Guest::new();
    let mut other = guest.connect(2, 5000);
    for act in acts {
        let _host = guest.connect(1, 5000);
        act(&mut guest);
        guest.expect(1, 5000, RST);
        guest.send_bytes(2, 5000, b"unharmed");
        assert_eq!(heard(&mut other, 8), b"unharmed");
    }
    assert_eq!(guest.interrupts.reset(), None);
}

#[test]
fn data_before_the_host_has_accepted_is_refused() {
    let mut guest = Guest::new();
    guest.send(1, 5000, REQUEST);
    guest.send_bytes(1, 5000, b"x");
    guest.expect(1, 5000, RST);
    let (mut host, stream) = pair();
    guest.handle.connect(9, stream.into()).unwrap();
    let port = guest.next().0.src_port;
    guest.send_bytes(9, port, b"x");
    guest.expect(9, port, RST);
    assert_eq!(heard_all(&mut host), b"");
}

#[test]
fn a_guest_that_reads_no_replies_is_not_served() {
    let mut guest = Guest::new();
    guest.start_silent();
    let bytes = guest.header(1, 2, RW).to_bytes();
    guest
        .mem
        .memory()
        .write_slice(&bytes, GuestAddress(SENT))
        .unwrap();
    for _ in 0..SIZE {
        guest.queues[1].add(&[(SENT, HEADER_LEN as u32, 0)]);
    }
    guest.queues[1].kick();
    for _ in 0..64 {
        guest.queues[1].wait();
    }
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(
        guest.queues[1].used(),
        None,
        "each packet has an answer, which takes memory"
    );
    // It goes on as soon as there is room.
    guest.offer(SIZE - 1);
    for _ in 64..SIZE {
        guest.queues[1].wait();
    }
    for _ in 0..SIZE {
        guest.expect(1, 2, RST);
    }
}

#[test]
fn a_short_packet_is_ignored() {
    let mut guest = Guest::new();
    for len in [0, 1, 43] {
        guest.queues[1].add(&[(SENT, len, 0)]);
        guest.queues[1].kick();
        guest.queues[1].wait();
    }
    guest.expect_nothing();
}

fn header() -> impl Strategy<Value = (Header, u16)> {
    let ports = (0..4_u32, prop_oneof![0..3_u32, Just(1 << 30), Just(1 << 30 | 1)]);
    let ops = (
        prop_oneof![9 => Just(STREAM), 1 => any::<u16>()],
        0..9_u16,
        0..5_u32,
    );
    let lens = (prop_oneof![4 => 0..2000_u32, 1 => any::<u32>()], 0..2000_u16);
    (ports, ops, lens, any::<u32>(), any::<u32>()).prop_map(|(ports, ops, lens, buf_alloc, fwd_cnt)| {
        let header = Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: ports.0,
            dst_port: ports.1,
            len: lens.0,
            kind: ops.0,
            op: ops.1,
            flags: ops.2,
            buf_alloc,
            fwd_cnt,
        };
        (header, lens.1)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever the guest sends and the host does, the device goes on.
    #[test]
    fn no_packet_breaks_the_device(
        packets in prop::collection::vec((header(), any::<bool>(), 0..4_u8), 1..60),
    ) {
        let mut guest = Guest::new();
        let mut hosts = Vec::new();
        for ((header, len), exact, act) in packets {
            let header = Header { len: if exact { len.into() } else { header.len }, ..header };
            guest.send_packet(&header, &vec![1; len.into()]);
            let asked: Vec<_> = guest.requests.lock().unwrap().drain(..).collect();
            for (id, _) in asked {
                let (host, stream) = pair();
                guest.handle.answer(id, (act > 0).then(|| stream.into())).unwrap();
                hosts.push(host);
            }
            if act == 1 {
                let (mut host, stream) = pair();
                host.write_all(&[2; 3000]).unwrap();
                guest.handle.connect(header.src_port, stream.into()).unwrap();
                hosts.push(host);
            }
            if act == 2 {
                hosts.pop();
            }
            while guest.try_next().is_some() {}
        }
        drop(hosts);
        prop_assert_eq!(guest.interrupts.reset(), None);
        let mut host = guest.connect_among(77, 78);
        guest.send_bytes(77, 78, b"fine");
        prop_assert_eq!(heard(&mut host, 4), b"fine");
    }
}

impl Guest {
    /// A connection that the guest begins, while the device sends packets of others.
    fn connect_among(&mut self, guest_port: u32, host_port: u32) -> UnixStream {
        self.send(guest_port, host_port, REQUEST);
        let (id, _) = self.request();
        let (host, stream) = pair();
        self.handle.answer(id, Some(stream.into())).unwrap();
        wait_for("a response", || {
            let (header, _) = self.try_next()?;
            (header.op == RESPONSE && header.dst_port == guest_port).then_some(())
        });
        host
    }
}
