//! The monitor's end of the privileged SCSI helper.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use crate::allowed_commands::{self, HelperPolicy};
use crate::protocol::{Direction, MAX_REQUEST, Request, receive, transmit, write_response};
use crate::{DataBuffer, ScsiCompletion, execute};

/// Executes commands of one client on one device.
///
/// The client is confined and may be hostile. A command that the table of allowed commands does not hold, with its
/// service action, lengths and direction, is answered with `EPERM` and never reaches the device. The table also bounds
/// the timeout. A request whose framing is wrong ends the service.
#[derive(Debug)]
pub struct PrivilegedScsiServer<D> {
    device: D,
    policy: HelperPolicy,
}

impl<D: AsFd> PrivilegedScsiServer<D> {
    /// A server that executes commands on `device` as far as `policy` allows them.
    pub fn new(device: D, policy: HelperPolicy) -> Self {
        Self { device, policy }
    }

    /// Serves a client on a connected, blocking SOCK_SEQPACKET socket until the client closes it.
    ///
    /// # Errors
    /// The socket failed, or a request was malformed (`InvalidData`).
    pub fn serve(&self, socket: impl AsFd) -> io::Result<()> {
        let mut message = vec![0; MAX_REQUEST];
        loop {
            let len = receive(&socket, &mut message)?;
            if len == 0 {
                return Ok(());
            }
            let response = respond(&message[..len], self.policy, |cdb, data, timeout| {
                execute(&self.device, cdb, data, timeout)
            })?;
            transmit(&socket, &response)?;
        }
    }
}

/// Executes the request in a message with `execute` if it is allowed. Returns the response.
pub fn respond(
    message: &[u8],
    policy: HelperPolicy,
    execute: impl FnOnce(&[u8], DataBuffer<'_>, Duration) -> io::Result<ScsiCompletion>,
) -> io::Result<Vec<u8>> {
    let request = Request::parse(message)?;
    let Some(timeout) = allowed_commands::check(policy, &request) else {
        return Ok(write_response(
            Err(io::Error::from_raw_os_error(libc::EPERM)),
            &[],
        ));
    };
    let mut data_in = match request.direction {
        Direction::In => vec![0; request.data_len],
        Direction::None | Direction::Out => Vec::new(),
    };
    let data = match request.direction {
        Direction::None => DataBuffer::None,
        Direction::In => DataBuffer::In(&mut data_in),
        Direction::Out => DataBuffer::Out(request.data_out),
    };
    let result = execute(request.cdb, data, timeout);
    Ok(write_response(result, &data_in))
}

#[cfg(test)]
mod tests;
