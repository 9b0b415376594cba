//! Responses of a hostile SCSI helper to the VMM's client over a SEQPACKET socket. Asserts that the client fills no more
//! than its buffer, and that a lost response ends its use.
#![no_main]

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use arbitrary::Arbitrary;
use husk_fuzz::host::{Splice, splice};
use husk_scsi_helper::{DataBuffer, MAX_DATA, PrivilegedScsiClient};
use libfuzzer_sys::fuzz_target;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

#[derive(Arbitrary, Debug)]
struct Program {
    exchanges: Vec<Exchange>,
}

#[derive(Arbitrary, Debug)]
struct Exchange {
    cdb: Vec<u8>,
    direction: u8,
    length: u32,
    response: Response,
}

#[derive(Arbitrary, Debug)]
enum Response {
    Well {
        kind: u8,
        status: u8,
        sense: Vec<u8>,
        host: u32,
        residual: u32,
        data: u16,
        damage: Vec<Splice>,
    },
    Bytes(Vec<u8>),
    TooLong,
    Closed,
}

impl Response {
    fn bytes(&self) -> Option<Vec<u8>> {
        match self {
            Response::Well {
                kind,
                status,
                sense,
                host,
                residual,
                data,
                damage,
            } => {
                let sense = &sense[..sense.len().min(255)];
                let mut bytes = vec![kind % 3, *status, sense.len() as u8, 0];
                bytes.extend(host.to_le_bytes());
                bytes.extend(residual.to_le_bytes());
                bytes.extend(sense);
                bytes.resize(bytes.len() + usize::from(*data), 9);
                splice(&mut bytes, damage);
                Some(bytes)
            }
            Response::Bytes(bytes) => Some(bytes.clone()),
            Response::TooLong => Some(vec![0; 12 + 255 + MAX_DATA + 1]),
            Response::Closed => None,
        }
    }
}

fuzz_target!(|program: Program| {
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let (here, there) = socketpair(kind.0, kind.1, kind.2, None).expect("sockets");
    let client = PrivilegedScsiClient::new(here);
    let mut there: Option<OwnedFd> = Some(there);
    let mut broken = false;
    let mut request = vec![0; 28 + MAX_DATA];
    for exchange in program.exchanges.iter().take(8) {
        let length = exchange.length as usize % (MAX_DATA + 3);
        let is_sent = exchange.cdb.len() <= 16 && (length <= MAX_DATA || exchange.direction % 3 == 2);
        let response = exchange.response.bytes();
        // The response waits for the request.
        match (&there, &response) {
            (Some(socket), Some(bytes)) if is_sent && !broken => {
                send(socket, bytes, SendFlags::NOSIGNAL).expect("sent");
            }
            (Some(_), None) => there = None,
            _ => {}
        }
        let mut room = vec![1; length + 8];
        let data = match exchange.direction % 3 {
            0 => DataBuffer::In(&mut room[..length]),
            1 => DataBuffer::Out(&[2; MAX_DATA + 3][..length]),
            _ => DataBuffer::None,
        };
        let done = client.execute(&exchange.cdb, data, Duration::from_secs(1));
        assert!(room[length..] == [1; 8], "written behind the buffer");
        if let Some(socket) = &there
            && let Ok((_, length)) = recv(socket, &mut request[..], RecvFlags::DONTWAIT)
        {
            assert!(is_sent && length >= 28, "a request of {length} bytes");
            assert!(length == 28 || length == 28 + exchange.length as usize % (MAX_DATA + 3));
        }
        match &done {
            Ok(done) => {
                assert!(is_sent && !broken);
                assert!(done.residual <= length && done.sense.len() <= 255);
            }
            Err(error) if broken && is_sent => assert_eq!(error.kind(), io::ErrorKind::BrokenPipe),
            Err(error) if !is_sent => assert_eq!(error.kind(), io::ErrorKind::InvalidInput),
            Err(_) => {}
        }
        let lost = there.is_none()
            || response.is_none_or(|bytes| bytes.is_empty() || bytes.len() > 12 + 255 + MAX_DATA);
        broken |= is_sent && lost;
    }
});
