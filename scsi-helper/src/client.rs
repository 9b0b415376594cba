//! The VMM's end of the privileged SCSI helper.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::protocol::{
    Direction, MAX_CDB, MAX_DATA, MAX_RESPONSE, Request, read_response, receive, transmit,
};
use crate::{DataBuffer, ScsiCompletion};

/// Sends commands to a [`PrivilegedScsiServer`](crate::PrivilegedScsiServer), one at a time.
#[derive(Debug)]
pub struct PrivilegedScsiClient(Mutex<ClientState>);

#[derive(Debug)]
struct ClientState {
    socket: OwnedFd,
    /// A response was lost. The client would take the next response for it.
    broken: bool,
}

impl PrivilegedScsiClient {
    /// A client on one end of a pair of connected, blocking SOCK_SEQPACKET sockets.
    #[must_use]
    pub fn new(socket: OwnedFd) -> Self {
        let broken = false;
        Self(Mutex::new(ClientState { socket, broken }))
    }

    /// Executes a command on the server's device, as [`execute`](crate::execute) does.
    ///
    /// # Errors
    /// As [`execute`](crate::execute). `PermissionDenied`: the server does not allow the command.
    pub fn execute(&self, cdb: &[u8], data: DataBuffer<'_>, timeout: Duration) -> io::Result<ScsiCompletion> {
        let (direction, data_len, data_out) = match &data {
            DataBuffer::In(bytes) if !bytes.is_empty() => (Direction::In, bytes.len(), &[][..]),
            DataBuffer::Out(bytes) if !bytes.is_empty() => (Direction::Out, bytes.len(), *bytes),
            _ => (Direction::None, 0, &[][..]),
        };
        if cdb.len() > MAX_CDB || data_len > MAX_DATA {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let message = Request {
            direction,
            cdb,
            data_len,
            data_out,
            timeout,
        }
        .to_message();
        let mut response = vec![0; MAX_RESPONSE];
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let exchanged =
            transmit(&state.socket, &message).and_then(|()| receive(&state.socket, &mut response));
        state.broken = !matches!(exchanged, Ok(len) if len > 0);
        drop(state);
        match exchanged? {
            0 => Err(io::ErrorKind::BrokenPipe.into()),
            len => read_response(&response[..len], data),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::protocol::{MAX_REQUEST, write_response};

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_client_returns_what_the_device_answered() {
        let kind = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (here, there) = socketpair(kind.0, kind.1, kind.2, None).unwrap();
        let client = PrivilegedScsiClient::new(here);
        let server = thread::spawn(move || {
            let mut request = vec![0; MAX_REQUEST];
            let short = ScsiCompletion {
                residual: 3,
                ..ScsiCompletion::default()
            };
            let check_condition = ScsiCompletion {
                status: 2,
                sense: vec![0x70, 0, 5],
                residual: 8,
                host_status: 0,
            };
            for (done, data) in [
                (short, &b"12345678"[..]),
                (check_condition, &[0; 8][..]),
                (ScsiCompletion::default(), &[1; 9][..]),
            ] {
                receive(&there, &mut request).unwrap();
                transmit(&there, &write_response(Ok(done), data)).unwrap();
            }
        });
        let mut data = [0; 8];
        let mut read = || client.execute(&[0x5e; 10], DataBuffer::In(&mut data), SECOND);
        let done = read().unwrap();
        assert_eq!((done.status, done.residual), (0, 3));
        let done = read().unwrap();
        assert_eq!(
            (done.status, done.residual, &done.sense[..]),
            (2, 8, &[0x70, 0, 5][..])
        );
        assert_eq!(read().unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(&data, b"12345\0\0\0");
        server.join().unwrap();
        // The server closed the socket.
        let closed = || client.execute(&[0x5e; 10], DataBuffer::None, SECOND).unwrap_err();
        closed();
        assert_eq!(closed().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn the_client_sends_no_more_than_a_message_holds() {
        let kind = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (here, _there) = socketpair(kind.0, kind.1, kind.2, None).unwrap();
        let client = PrivilegedScsiClient::new(here);
        let long = vec![0; MAX_DATA + 1];
        for (cdb, data) in [(&[0x5f; 10][..], &long[..]), (&[0x89; 17], &[])] {
            let error = client.execute(cdb, DataBuffer::Out(data), SECOND).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
    }
}
