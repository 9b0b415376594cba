//! Commands that need a privilege, sent by who has it: the kernel takes them only from CAP_SYS_RAWIO.
//!
//! One message each way for a command, on a socket of packets: the other end executes what it has agreed to, on a
//! descriptor of its own, and nothing else.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::{DataBuffer, ScsiCompletion, execute};

/// What is sent this way: PERSISTENT RESERVE IN, PERSISTENT RESERVE OUT, COMPARE AND WRITE, SYNCHRONIZE CACHE (16).
pub const PRIVILEGED: [u8; 4] = [0x5e, 0x5f, 0x89, 0x91];

/// Most bytes of a command's data.
pub const MAX_DATA: usize = 64 << 10;

/// Longest CDB.
const MAX_CDB: usize = 16;

/// Bytes before a request's data: direction, bytes of the CDB, two unused, bytes of data, milliseconds, CDB.
const REQUEST: usize = 12 + MAX_CDB;

/// Bytes before an answer's sense data, which its data follow: whether it was executed, SCSI status, bytes of sense data,
/// one unused, host status or error number, residual.
const ANSWER: usize = 12;

const NONE: u8 = 0;
const IN: u8 = 1;
const OUT: u8 = 2;

const EXECUTED: u8 = 0;
const ERROR: u8 = 1;

/// The end of who has commands executed. They go one after the other.
#[derive(Debug)]
pub struct PrivilegedScsiClient(Mutex<State>);

#[derive(Debug)]
struct State {
    socket: OwnedFd,
    /// An answer was lost: the next one would be taken for it.
    broken: bool,
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn malformed(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// One message; none at the end.
fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match recv(&socket, &mut *buffer, RecvFlags::TRUNC) {
            Ok((_, len)) if len > buffer.len() => return Err(malformed("a message that is too long")),
            Ok((_, len)) => return Ok(len),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn transmit(socket: impl AsFd, message: &[u8]) -> io::Result<()> {
    loop {
        match send(&socket, message, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

impl PrivilegedScsiClient {
    /// A channel on one end of a pair of connected sockets of packets, which must be blocking.
    #[must_use]
    pub fn new(socket: OwnedFd) -> Self {
        let broken = false;
        Self(Mutex::new(State { socket, broken }))
    }

    /// As [`execute`], at the other end.
    ///
    /// # Errors
    /// As [`execute`]; `PermissionDenied` where the other end has not agreed to the command.
    pub fn execute(&self, cdb: &[u8], data: DataBuffer<'_>, timeout: Duration) -> io::Result<ScsiCompletion> {
        let (direction, len, out) = match &data {
            DataBuffer::None => (NONE, 0, &[][..]),
            DataBuffer::In(bytes) => (IN, bytes.len(), &[][..]),
            DataBuffer::Out(bytes) => (OUT, bytes.len(), *bytes),
        };
        if cdb.len() > MAX_CDB || len > MAX_DATA {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut message = vec![0; REQUEST];
        (message[0], message[1]) = (direction, cdb.len() as u8);
        message[4..8].copy_from_slice(&(len as u32).to_le_bytes());
        let limit = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        message[8..12].copy_from_slice(&limit.to_le_bytes());
        message[12..][..cdb.len()].copy_from_slice(cdb);
        message.extend(out);
        let mut answer = vec![0; ANSWER + usize::from(u8::MAX) + MAX_DATA];
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let exchanged = transmit(&state.socket, &message).and_then(|()| receive(&state.socket, &mut answer));
        state.broken = !matches!(exchanged, Ok(len) if len >= ANSWER);
        drop(state);
        match exchanged? {
            0 => Err(io::ErrorKind::BrokenPipe.into()),
            len => read_answer(answer.get(..len).unwrap_or_default(), data),
        }
    }
}

fn read_answer(answer: &[u8], data: DataBuffer<'_>) -> io::Result<ScsiCompletion> {
    let (head, rest) = answer
        .split_at_checked(ANSWER)
        .ok_or_else(|| malformed("a short answer"))?;
    if head[0] != EXECUTED {
        return Err(io::Error::from_raw_os_error(word(head, 4) as i32));
    }
    let (sense, sent) = rest
        .split_at_checked(head[2].into())
        .ok_or_else(|| malformed("a short answer"))?;
    let room = match data {
        DataBuffer::In(bytes) => {
            let into = bytes.get_mut(..sent.len());
            into.ok_or_else(|| malformed("more data than there is room for"))?
                .copy_from_slice(sent);
            bytes.len()
        }
        DataBuffer::Out(bytes) => bytes.len(),
        DataBuffer::None => 0,
    };
    Ok(ScsiCompletion {
        status: head[1],
        host_status: word(head, 4) as u16,
        sense: sense.to_vec(),
        residual: (word(head, 8) as usize).min(room),
    })
}

/// The other end: executes on `device` the commands that begin with one of `opcodes`, until the channel is closed.
///
/// # Errors
/// Of the socket, or what came was no request.
pub fn serve(socket: impl AsFd, device: impl AsFd, opcodes: &[u8]) -> io::Result<()> {
    let mut request = vec![0; REQUEST + MAX_DATA];
    loop {
        let len = receive(&socket, &mut request)?;
        if len == 0 {
            return Ok(());
        }
        let (head, sent) = request[..len]
            .split_at_checked(REQUEST)
            .ok_or_else(|| malformed("a short request"))?;
        let room = word(head, 4) as usize;
        let cdb = head[12..].get(..head[1].into());
        let cdb = cdb.filter(|cdb| cdb.first().is_some_and(|opcode| opcodes.contains(opcode)));
        let mut received = vec![0; if head[0] == IN { room.min(MAX_DATA) } else { 0 }];
        let data = match head[0] {
            NONE => DataBuffer::None,
            IN => DataBuffer::In(&mut received),
            _ => DataBuffer::Out(sent),
        };
        let timeout = Duration::from_millis(word(head, 8).into());
        let done = match cdb {
            Some(cdb) => execute(&device, cdb, data, timeout),
            None => Err(io::Error::from_raw_os_error(libc::EPERM)),
        };
        transmit(&socket, &write_answer(done, &received))?;
    }
}

fn write_answer(done: io::Result<ScsiCompletion>, received: &[u8]) -> Vec<u8> {
    let mut answer = vec![0; ANSWER];
    match done {
        Ok(done) => {
            answer[..3].copy_from_slice(&[EXECUTED, done.status, done.sense.len() as u8]);
            answer[4..8].copy_from_slice(&u32::from(done.host_status).to_le_bytes());
            answer[8..12].copy_from_slice(&(done.residual as u32).to_le_bytes());
            answer.extend(&done.sense);
            answer.extend(&received[..received.len().saturating_sub(done.residual)]);
        }
        Err(error) => {
            answer[0] = ERROR;
            let number = error.raw_os_error().unwrap_or(libc::EIO);
            answer[4..8].copy_from_slice(&number.to_le_bytes());
        }
    }
    answer
}

#[cfg(test)]
mod tests {
    use std::thread;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap()
    }

    #[test]
    fn only_what_was_agreed_to_reaches_the_device() {
        let (here, there) = pair();
        let device = tempfile::tempfile().unwrap();
        let server = thread::spawn(move || serve(there, device, &PRIVILEGED));
        let client = PrivilegedScsiClient::new(here);
        let error = |cdb: &[u8], data: DataBuffer<'_>| client.execute(cdb, data, SECOND).unwrap_err();
        // The device is none: whoever asks it is told so.
        let asked = Some(libc::ENOTTY);
        assert_eq!(
            error(&[0x5e; 10], DataBuffer::In(&mut [0; 8])).raw_os_error(),
            asked
        );
        assert_eq!(
            error(&[0x5f; 10], DataBuffer::Out(&[0; 24])).raw_os_error(),
            asked
        );
        assert_eq!(error(&[0x91; 16], DataBuffer::None).raw_os_error(), asked);
        for opcode in (0..=u8::MAX).filter(|opcode| !PRIVILEGED.contains(opcode)) {
            assert_eq!(
                error(&[opcode; 6], DataBuffer::None).raw_os_error(),
                Some(libc::EPERM)
            );
        }
        assert_eq!(error(&[], DataBuffer::None).raw_os_error(), Some(libc::EPERM));
        let long = vec![0; MAX_DATA + 1];
        assert_eq!(
            error(&[0x5f], DataBuffer::Out(&long)).kind(),
            io::ErrorKind::InvalidInput
        );
        drop(client);
        server.join().unwrap().unwrap();
    }

    #[test]
    fn an_answer_is_what_the_device_said() {
        let (here, there) = pair();
        let client = PrivilegedScsiClient::new(here);
        let server = thread::spawn(move || {
            let mut request = vec![0; REQUEST + MAX_DATA];
            for (done, data) in [
                (
                    ScsiCompletion {
                        residual: 3,
                        ..ScsiCompletion::default()
                    },
                    &b"12345678"[..],
                ),
                (
                    ScsiCompletion {
                        status: 2,
                        sense: vec![0x70, 0, 5],
                        residual: 8,
                        host_status: 0,
                    },
                    &[0; 8][..],
                ),
                (ScsiCompletion::default(), &[1; 9][..]),
            ] {
                receive(&there, &mut request).unwrap();
                transmit(&there, &write_answer(Ok(done), data)).unwrap();
            }
        });
        let mut room = [0; 8];
        let done = client
            .execute(&[0x5e; 10], DataBuffer::In(&mut room), SECOND)
            .unwrap();
        assert_eq!((done.status, done.residual, &room), (0, 3, b"12345\0\0\0"));
        let done = client
            .execute(&[0x5e; 10], DataBuffer::In(&mut room), SECOND)
            .unwrap();
        assert_eq!(
            (done.status, done.residual, &done.sense[..]),
            (2, 8, &[0x70, 0, 5][..])
        );
        let error = client
            .execute(&[0x5e; 10], DataBuffer::In(&mut room), SECOND)
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        server.join().unwrap();
        // Nobody is there any more.
        assert!(client.execute(&[0x5e; 10], DataBuffer::None, SECOND).is_err());
        assert_eq!(
            client
                .execute(&[0x5e; 10], DataBuffer::None, SECOND)
                .unwrap_err()
                .kind(),
            io::ErrorKind::BrokenPipe
        );
    }
}
