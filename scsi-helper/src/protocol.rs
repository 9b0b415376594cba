//! The messages between client and server: one packet for a request and one for its response, on a SOCK_SEQPACKET
//! socket. Numbers are little-endian.
//!
//! A request is 28 bytes and the data-out buffer:
//!
//! | byte | field |
//! | --- | --- |
//! | 0 | direction: 0 none, 1 data-in, 2 data-out |
//! | 1 | bytes of the CDB, at most 16 |
//! | 4 to 7 | bytes of data |
//! | 8 to 11 | timeout in milliseconds |
//! | 12 to 27 | CDB, padded with zeroes |
//!
//! A response is 12 bytes, the sense data and the data-in buffer:
//!
//! | byte | field |
//! | --- | --- |
//! | 0 | 0: the kernel executed the command, 1: it did not |
//! | 1 | SCSI status |
//! | 2 | bytes of sense data |
//! | 4 to 7 | host status, or the error number if the command was not executed |
//! | 8 to 11 | residual |

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::{DataBuffer, ScsiCompletion};

/// Maximum data of one command, in bytes.
pub const MAX_DATA: usize = 64 << 10;

/// Maximum length of a CDB, in bytes.
pub(crate) const MAX_CDB: usize = 16;

/// Bytes of a request before its data.
const REQUEST_HEADER: usize = 12 + MAX_CDB;

/// Maximum length of a request, in bytes.
pub(crate) const MAX_REQUEST: usize = REQUEST_HEADER + MAX_DATA;

/// Bytes of a response before its sense data.
const RESPONSE_HEADER: usize = 12;

/// Maximum length of a response, in bytes.
pub(crate) const MAX_RESPONSE: usize = RESPONSE_HEADER + u8::MAX as usize + MAX_DATA;

const EXECUTED: u8 = 0;
const NOT_EXECUTED: u8 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Direction {
    None = 0,
    In = 1,
    Out = 2,
}

/// A request that is framed well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request<'a> {
    pub direction: Direction,
    pub cdb: &'a [u8],
    /// Bytes to transfer in `direction`, at most [`MAX_DATA`].
    pub data_len: usize,
    /// The data-out buffer: `data_len` bytes if the direction is out, else empty.
    pub data_out: &'a [u8],
    pub timeout: Duration,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn malformed(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl<'a> Request<'a> {
    /// Reads a request.
    ///
    /// # Errors
    /// `InvalidData`: the framing is wrong.
    pub fn parse(message: &'a [u8]) -> io::Result<Self> {
        let (header, data_out) = message
            .split_at_checked(REQUEST_HEADER)
            .ok_or_else(|| malformed("a request shorter than its header"))?;
        let direction = match header[0] {
            0 => Direction::None,
            1 => Direction::In,
            2 => Direction::Out,
            _ => return Err(malformed("a request with an unknown data direction")),
        };
        let cdb = header[12..]
            .get(..header[1].into())
            .ok_or_else(|| malformed("a request with a CDB of more than 16 bytes"))?;
        let data_len = u32_at(header, 4) as usize;
        let expected = match direction {
            Direction::Out => data_len,
            Direction::None | Direction::In => 0,
        };
        let fits = data_len <= MAX_DATA && (data_len == 0 || direction != Direction::None);
        if !fits || data_out.len() != expected {
            return Err(malformed(
                "a request whose data has another length than its header says",
            ));
        }
        Ok(Self {
            direction,
            cdb,
            data_len,
            data_out,
            timeout: Duration::from_millis(u32_at(header, 8).into()),
        })
    }

    /// Writes the request into one message. The CDB has at most [`MAX_CDB`] bytes, the data at most [`MAX_DATA`].
    pub fn to_message(self) -> Vec<u8> {
        let mut message = vec![0; REQUEST_HEADER];
        (message[0], message[1]) = (self.direction as u8, self.cdb.len() as u8);
        message[4..8].copy_from_slice(&(self.data_len as u32).to_le_bytes());
        let timeout = u32::try_from(self.timeout.as_millis()).unwrap_or(u32::MAX);
        message[8..12].copy_from_slice(&timeout.to_le_bytes());
        message[12..][..self.cdb.len()].copy_from_slice(self.cdb);
        message.extend(self.data_out);
        message
    }
}

/// Writes a response. `data_in` is the data-in buffer of the command.
pub(crate) fn write_response(result: io::Result<ScsiCompletion>, data_in: &[u8]) -> Vec<u8> {
    let mut response = vec![0; RESPONSE_HEADER];
    match result {
        Ok(done) => {
            let sense = &done.sense[..done.sense.len().min(u8::MAX.into())];
            response[..3].copy_from_slice(&[EXECUTED, done.status, sense.len() as u8]);
            response[4..8].copy_from_slice(&u32::from(done.host_status).to_le_bytes());
            response[8..12].copy_from_slice(&(done.residual as u32).to_le_bytes());
            response.extend(sense);
            response.extend(&data_in[..data_in.len().saturating_sub(done.residual)]);
        }
        Err(error) => {
            response[0] = NOT_EXECUTED;
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            response[4..8].copy_from_slice(&errno.to_le_bytes());
        }
    }
    response
}

/// Reads a response to a command with this data and fills its data-in buffer.
pub(crate) fn read_response(response: &[u8], data: DataBuffer<'_>) -> io::Result<ScsiCompletion> {
    let short = || malformed("a response shorter than its header says");
    let (header, rest) = response.split_at_checked(RESPONSE_HEADER).ok_or_else(short)?;
    if header[0] != EXECUTED {
        return Err(io::Error::from_raw_os_error(u32_at(header, 4) as i32));
    }
    let (sense, received) = rest.split_at_checked(header[2].into()).ok_or_else(short)?;
    let data_len = match data {
        DataBuffer::In(bytes) => {
            let into = bytes.get_mut(..received.len());
            into.ok_or_else(|| malformed("a response with more data than the command has room for"))?
                .copy_from_slice(received);
            bytes.len()
        }
        DataBuffer::Out(bytes) => bytes.len(),
        DataBuffer::None => 0,
    };
    Ok(ScsiCompletion {
        status: header[1],
        host_status: u32_at(header, 4) as u16,
        sense: sense.to_vec(),
        residual: (u32_at(header, 8) as usize).min(data_len),
    })
}

/// Receives one message. Returns its length, 0 if the peer closed the socket.
pub(crate) fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match recv(&socket, &mut *buffer, RecvFlags::TRUNC) {
            Ok((_, len)) if len > buffer.len() => return Err(malformed("a message that is too long")),
            Ok((_, len)) => return Ok(len),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Sends one message.
pub(crate) fn transmit(socket: impl AsFd, message: &[u8]) -> io::Result<()> {
    loop {
        match send(&socket, message, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
