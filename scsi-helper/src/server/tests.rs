use std::os::fd::OwnedFd;
use std::thread;

use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;
use crate::{MAX_DATA, PRIVILEGED_OPCODES, PrivilegedScsiClient};

const SECOND: Duration = Duration::from_secs(1);

const EVERYTHING: HelperPolicy = HelperPolicy {
    writable: true,
    reservations: true,
};

fn pair() -> (OwnedFd, OwnedFd) {
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    socketpair(kind.0, kind.1, kind.2, None).unwrap()
}

/// Error number that a client gets from a server whose device is a file, which takes no command: ENOTTY for a command
/// that reached the device.
fn errno(policy: HelperPolicy, cdb: &[u8], data: DataBuffer<'_>) -> i32 {
    let (here, there) = pair();
    let device = tempfile::tempfile().unwrap();
    let server = thread::spawn(move || PrivilegedScsiServer::new(device, policy).serve(there));
    let client = PrivilegedScsiClient::new(here);
    let error = client.execute(cdb, data, SECOND).unwrap_err();
    drop(client);
    server.join().unwrap().unwrap();
    error.raw_os_error().unwrap()
}

fn reserve_in(service_action: u8, allocation_length: u16) -> [u8; 10] {
    let [high, low] = allocation_length.to_be_bytes();
    [0x5e, service_action, 0, 0, 0, 0, 0, high, low, 0]
}

fn reserve_out(service_action: u8, list_length: u8) -> [u8; 10] {
    [0x5f, service_action, 0x05, 0, 0, 0, 0, 0, list_length, 0]
}

fn compare_and_write(blocks: u8) -> [u8; 16] {
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x89, blocks);
    cdb
}

const SYNCHRONIZE_CACHE: [u8; 16] = [0x91, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn commands_of_the_table_reach_the_device() {
    for service_action in 0..=3 {
        let cdb = reserve_in(service_action, 8);
        assert_eq!(errno(EVERYTHING, &cdb, DataBuffer::In(&mut [0; 8])), libc::ENOTTY);
    }
    assert_eq!(
        errno(EVERYTHING, &reserve_in(0, 0), DataBuffer::None),
        libc::ENOTTY
    );
    for service_action in 0..=6 {
        let cdb = reserve_out(service_action, 24);
        assert_eq!(errno(EVERYTHING, &cdb, DataBuffer::Out(&[0; 24])), libc::ENOTTY);
    }
    for (blocks, bytes) in [(1, 1024), (2, 2048), (1, 8192), (0, 0)] {
        let data = vec![0; bytes];
        let cdb = compare_and_write(blocks);
        assert_eq!(errno(EVERYTHING, &cdb, DataBuffer::Out(&data)), libc::ENOTTY);
    }
    assert_eq!(
        errno(EVERYTHING, &SYNCHRONIZE_CACHE, DataBuffer::None),
        libc::ENOTTY
    );
}

#[test]
fn register_and_move_and_other_service_actions_are_refused() {
    for service_action in 7..=31 {
        let cdb = reserve_out(service_action, 24);
        assert_eq!(errno(EVERYTHING, &cdb, DataBuffer::Out(&[0; 24])), libc::EPERM);
    }
    for service_action in 4..=31 {
        let cdb = reserve_in(service_action, 8);
        assert_eq!(errno(EVERYTHING, &cdb, DataBuffer::In(&mut [0; 8])), libc::EPERM);
    }
}

#[test]
fn other_opcodes_are_refused() {
    for opcode in (0..=u8::MAX).filter(|opcode| !PRIVILEGED_OPCODES.contains(opcode)) {
        for len in [6, 10, 12, 16] {
            let cdb = [&[opcode][..], &[0; 15]].concat();
            assert_eq!(errno(EVERYTHING, &cdb[..len], DataBuffer::None), libc::EPERM);
        }
    }
    assert_eq!(errno(EVERYTHING, &[], DataBuffer::None), libc::EPERM);
}

#[test]
fn lengths_and_directions_that_contradict_the_cdb_are_refused() {
    let mut naca = SYNCHRONIZE_CACHE;
    naca[15] = 0x04;
    let mut protected = compare_and_write(1);
    protected[1] = 0x20;
    let cases: [(&[u8], DataBuffer<'_>); 12] = [
        (&reserve_in(0, 9), DataBuffer::In(&mut [0; 8])),
        (&reserve_in(0, 8), DataBuffer::None),
        (&reserve_in(0, 8), DataBuffer::Out(&[0; 8])),
        (&reserve_in(0, 8)[..9], DataBuffer::In(&mut [0; 8])),
        (&reserve_out(0, 24), DataBuffer::Out(&[0; 25])),
        (&reserve_out(0, 24), DataBuffer::None),
        (&reserve_out(0, 24), DataBuffer::In(&mut [0; 24])),
        (&compare_and_write(3), DataBuffer::Out(&[0; 1024])),
        (&compare_and_write(1), DataBuffer::Out(&[0; 64])),
        (&protected, DataBuffer::Out(&[0; 1024])),
        (&SYNCHRONIZE_CACHE, DataBuffer::In(&mut [0; 512])),
        (&naca, DataBuffer::None),
    ];
    for (cdb, data) in cases {
        assert_eq!(errno(EVERYTHING, cdb, data), libc::EPERM, "{cdb:x?}");
    }
}

#[test]
fn the_policy_decides_between_reservations_and_writes() {
    let writable = HelperPolicy {
        reservations: false,
        ..EVERYTHING
    };
    let reservations = HelperPolicy {
        writable: false,
        ..EVERYTHING
    };
    let read_keys = |policy| errno(policy, &reserve_in(0, 8), DataBuffer::In(&mut [0; 8]));
    let reserve = |policy| errno(policy, &reserve_out(1, 24), DataBuffer::Out(&[0; 24]));
    let compare = |policy| errno(policy, &compare_and_write(1), DataBuffer::Out(&[0; 1024]));
    let flush = |policy| errno(policy, &SYNCHRONIZE_CACHE, DataBuffer::None);
    let all = |policy| [read_keys(policy), reserve(policy), compare(policy), flush(policy)];
    let (allowed, refused) = (libc::ENOTTY, libc::EPERM);
    assert_eq!(all(writable), [refused, refused, allowed, allowed]);
    assert_eq!(all(reservations), [allowed, allowed, refused, refused]);
    assert_eq!(all(HelperPolicy::default()), [refused; 4]);
}

#[test]
fn the_timeout_is_bounded() {
    let timeout = |cdb: &[u8], timeout| {
        let message = Request {
            direction: Direction::None,
            cdb,
            data_len: 0,
            data_out: &[],
            timeout,
        }
        .to_message();
        let mut executed = None;
        respond(&message, EVERYTHING, |_, _, timeout| {
            executed = Some(timeout);
            Ok(ScsiCompletion::default())
        })
        .unwrap();
        executed.unwrap().as_secs()
    };
    let for_ever = Duration::from_millis(u32::MAX.into());
    assert_eq!(timeout(&SYNCHRONIZE_CACHE, for_ever), 120);
    assert_eq!(timeout(&reserve_in(0, 0), for_ever), 30);
    assert_eq!(timeout(&reserve_in(0, 0), Duration::from_secs(5)), 5);
    // The kernel reads 0 as its own default.
    assert_eq!(timeout(&reserve_in(0, 0), Duration::ZERO), 1);
}

#[test]
fn a_malformed_request_closes_the_channel() {
    let request = |direction: u8, cdb_len: u8, data_len: u32, data: &[u8]| {
        let mut message = vec![0; 28];
        (message[0], message[1]) = (direction, cdb_len);
        message[4..8].copy_from_slice(&data_len.to_le_bytes());
        message.extend(data);
        message
    };
    let messages = [
        vec![0],
        vec![0; 27],
        request(3, 10, 0, &[]),
        request(255, 10, 0, &[]),
        request(0, 17, 0, &[]),
        request(0, 10, 8, &[]),
        request(0, 10, 0, &[0; 8]),
        request(1, 10, u32::MAX, &[]),
        request(1, 10, MAX_DATA as u32 + 1, &[]),
        request(1, 10, 8, &[0; 8]),
        request(2, 10, 24, &[0; 23]),
        request(2, 10, 24, &[0; 25]),
        request(2, 10, MAX_DATA as u32 + 1, &vec![0; MAX_DATA + 1]),
    ];
    for message in messages {
        let (here, there) = pair();
        let device = tempfile::tempfile().unwrap();
        let server = thread::spawn(move || PrivilegedScsiServer::new(device, EVERYTHING).serve(there));
        transmit(&here, &message).unwrap();
        let error = server.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{:x?}", &message[..1]);
        assert_eq!(receive(&here, &mut [0; 64]).unwrap(), 0, "the socket is closed");
    }
}

/// The rules again, in other words than the table's.
fn may_execute(policy: HelperPolicy, cdb: &[u8], data: &DataBuffer<'_>) -> bool {
    let number =
        |range: std::ops::Range<usize>| cdb[range].iter().fold(0, |sum, b| sum << 8 | usize::from(*b));
    let naca = cdb.last().is_some_and(|control| control & 4 != 0);
    !naca
        && match (cdb.first(), cdb.len(), data) {
            (Some(0x5e), 10, DataBuffer::In(data)) => {
                policy.reservations && cdb[1] & 0x1f < 4 && number(7..9) == data.len()
            }
            (Some(0x5e), 10, DataBuffer::None) => {
                policy.reservations && cdb[1] & 0x1f < 4 && number(7..9) == 0
            }
            (Some(0x5f), 10, DataBuffer::Out(data)) => {
                policy.reservations && cdb[1] & 0x1f < 7 && number(5..9) == data.len()
            }
            (Some(0x5f), 10, DataBuffer::None) => {
                policy.reservations && cdb[1] & 0x1f < 7 && number(5..9) == 0
            }
            (Some(0x89), 16, DataBuffer::Out(data)) => {
                let sizes = (8..=16).map(|exponent| (2 * usize::from(cdb[13])) << exponent);
                policy.writable && cdb[1] >> 5 == 0 && sizes.into_iter().any(|size| size == data.len())
            }
            (Some(0x89), 16, DataBuffer::None) => policy.writable && cdb[1] >> 5 == 0 && cdb[13] == 0,
            (Some(0x91), 16, DataBuffer::None) => policy.writable,
            _ => false,
        }
}

/// Messages of any bytes, and messages that come close to what the server executes.
fn messages() -> impl Strategy<Value = Vec<u8>> {
    let opcode = prop_oneof![4 => prop::sample::select(PRIVILEGED_OPCODES.to_vec()), 1 => any::<u8>()];
    let near = (
        opcode,
        prop::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], 15),
        prop::sample::select(vec![0usize, 6, 10, 12, 16]),
        prop_oneof![4 => 0..3u8, 1 => any::<u8>()],
        prop::sample::select(vec![0usize, 8, 24, 40, 1024, 2048, 8192, MAX_DATA]),
        any::<u32>(),
        any::<bool>(),
    );
    let near = near.prop_map(|(opcode, rest, cdb_len, direction, len, timeout, consistent)| {
        let mut message = vec![direction, cdb_len as u8, 0, 0];
        message.extend((len as u32).to_le_bytes());
        message.extend(timeout.to_le_bytes());
        let mut cdb = [&[opcode][..], &rest].concat();
        if consistent {
            // Lengths where the commands have them.
            cdb[5..9].copy_from_slice(&(len as u32).to_be_bytes());
            cdb[13] = (len / 1024) as u8;
        }
        message.extend(cdb);
        if direction == 2 {
            message.extend(vec![0; len]);
        }
        message
    });
    prop_oneof![4 => near, 1 => prop::collection::vec(any::<u8>(), 0..200)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// No message makes the server execute a command outside the rules, exceed a timeout or panic.
    #[test]
    fn only_allowed_commands_reach_the_device(message in messages(), writable: bool, reservations: bool) {
        let policy = HelperPolicy { writable, reservations };
        let mut executed = false;
        let response = respond(&message, policy, |cdb, data, timeout| {
            executed = true;
            assert!(may_execute(policy, cdb, &data), "{cdb:x?} {data:?}");
            assert!((1..=120).contains(&timeout.as_secs()), "{timeout:?}");
            if cdb[0] != 0x91 {
                assert!(timeout.as_secs() <= 30, "{timeout:?}");
            }
            Ok(ScsiCompletion::default())
        });
        match response {
            Ok(response) => prop_assert!(executed || response[0] == 1 && response[4] == libc::EPERM as u8),
            Err(error) => prop_assert!(!executed && error.kind() == io::ErrorKind::InvalidData),
        }
    }

    /// A request that the rules allow is executed.
    #[test]
    fn allowed_commands_are_executed(
        list in prop::sample::select(vec![8usize, 24, 48, 4096]),
        action in 0..7u8,
        kind in 0..3u8,
    ) {
        let mut cdb = reserve_out(action, 0);
        cdb[5..9].copy_from_slice(&(list as u32).to_be_bytes());
        cdb[2] = kind;
        let data_out = vec![0; list];
        let request = Request {
            direction: Direction::Out,
            cdb: &cdb,
            data_len: list,
            data_out: &data_out,
            timeout: SECOND,
        };
        let mut executed = false;
        respond(&request.to_message(), EVERYTHING, |_, _, _| {
            executed = true;
            Ok(ScsiCompletion::default())
        }).unwrap();
        prop_assert!(executed);
    }
}
