//! One connection: moves bytes between packets and the host's socket, and follows how each side ends it.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::time::Instant;

use rustix::net::{Shutdown, shutdown};

use crate::credit::Credit;
use crate::packet::{
    CREDIT_REQUEST, CREDIT_UPDATE, Header, REQUEST, RESPONSE, RW, SHUTDOWN, SHUTDOWN_BOTH, SHUTDOWN_RCV,
    SHUTDOWN_SEND,
};

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The guest has sent REQUEST, and nobody has answered this number.
    RequestedByGuest(u64),
    /// The guest is sent REQUEST, and has not answered.
    RequestedByHost,
    /// Both sides have agreed.
    Established,
}

/// The guest broke a rule: the connection ends with RST.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Violation;

/// The next packet of a connection to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outgoing {
    Nothing,
    /// A packet: its operation, flags and bytes of payload.
    Packet(u16, u32, usize),
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub phase: Phase,
    /// `None` until the host has accepted.
    pub host: Option<File>,
    credit: Credit,
    /// Bytes from the guest that the host has not taken.
    to_host: VecDeque<u8>,
    /// REQUEST or RESPONSE, which comes first.
    opening: Option<u16>,
    /// Reading or writing the socket may not block.
    readable: bool,
    writable: bool,
    /// The host has closed its end for both directions. There may be bytes to read.
    pub hung_up: bool,
    /// Flags of SHUTDOWN that the guest has sent.
    guest_done: u32,
    /// Flags of SHUTDOWN that are due, and those that the guest was sent.
    host_done: u32,
    shutdown_sent: u32,
    /// The guest was sent CREDIT_REQUEST, and has no room yet.
    credit_asked: bool,
    /// The guest has sent CREDIT_REQUEST.
    credit_wanted: bool,
    /// Time at which the connection ends if the guest does not act.
    pub deadline: Option<Instant>,
    /// It is in the queue of those that may have something for the guest.
    pub queued: bool,
}

impl Connection {
    /// A connection that the guest has asked for, by the REQUEST with this header.
    pub fn asked(id: u64, request: &Header) -> Self {
        let mut connection = Self::new(Phase::RequestedByGuest(id), None, None);
        connection.credit.update(request);
        connection
    }

    /// A connection that the guest is asked for, from a nonblocking stream socket.
    pub fn offered(host: File) -> Self {
        Self::new(Phase::RequestedByHost, Some(host), Some(REQUEST))
    }

    fn new(phase: Phase, host: Option<File>, opening: Option<u16>) -> Self {
        Self {
            phase,
            host,
            credit: Credit::default(),
            to_host: VecDeque::new(),
            opening,
            readable: true,
            writable: true,
            hung_up: false,
            guest_done: 0,
            host_done: 0,
            shutdown_sent: 0,
            credit_asked: false,
            credit_wanted: false,
            deadline: None,
            queued: false,
        }
    }

    /// The host has accepted the guest's request with this nonblocking stream socket.
    pub fn accept(&mut self, host: File) {
        self.host = Some(host);
        self.phase = Phase::Established;
        self.opening = Some(RESPONSE);
    }

    /// The guest has accepted. The host is told `greeting`.
    pub fn accepted(&mut self, response: &Header, greeting: &str) -> Result<(), Violation> {
        if self.phase != Phase::RequestedByHost || self.opening.is_some() {
            return Err(Violation);
        }
        self.phase = Phase::Established;
        self.credit.update(response);
        // The socket is empty, so that it takes all. If the host is gone, an event says so.
        let _ = self.host.as_ref().map(|mut host| host.write(greeting.as_bytes()));
        Ok(())
    }

    /// True if the host has begun the connection, and the guest was not sent REQUEST yet.
    pub fn is_unknown_to_guest(&self) -> bool {
        self.phase == Phase::RequestedByHost && self.opening.is_some()
    }

    /// True once both sides may send: the guest knows it.
    fn is_open(&self) -> bool {
        self.phase == Phase::Established && self.opening.is_none()
    }

    /// Takes a packet of the guest with its payload, other than REQUEST, RESPONSE and RST. Returns true if the guest
    /// has ended the connection.
    pub fn take(&mut self, header: &Header, payload: &[u8]) -> Result<bool, Violation> {
        if !self.is_open() {
            return Err(Violation);
        }
        let was_full = self.credit.is_full_of_packets();
        self.credit.update(header);
        // The request before was for bytes. Only one for packets is repeated.
        let has_become_full = !was_full && self.credit.is_full_of_packets();
        self.credit_asked &= self.credit.guest_room() == 0 && !has_become_full;
        match header.op {
            RW => {
                if self.guest_done & SHUTDOWN_SEND != 0 || !self.credit.receive(payload.len() as u32) {
                    return Err(Violation);
                }
                self.send_to_host(payload);
            }
            SHUTDOWN => {
                self.guest_done |= header.flags & SHUTDOWN_BOTH;
                if self.guest_done == SHUTDOWN_BOTH {
                    return Ok(true);
                }
                self.follow_guest();
            }
            CREDIT_UPDATE => {}
            // The answer is one packet, however often the guest asks.
            CREDIT_REQUEST => self.credit_wanted = true,
            _ => return Err(Violation),
        }
        Ok(false)
    }

    /// Sends bytes to the host, as far as it takes them, and keeps the others.
    fn send_to_host(&mut self, bytes: &[u8]) {
        let sent = match self.to_host.is_empty() {
            true => self.write(bytes),
            false => 0,
        };
        if self.host_done & SHUTDOWN_RCV != 0 {
            self.credit.forward((bytes.len() - sent) as u32);
        } else {
            self.to_host.extend(&bytes[sent..]);
        }
    }

    /// Sends the host what was kept for it.
    pub fn flush(&mut self) {
        while !self.to_host.is_empty() && self.writable && self.host_done & SHUTDOWN_RCV == 0 {
            let kept = std::mem::take(&mut self.to_host);
            let sent = self.write(kept.as_slices().0);
            self.to_host = kept;
            self.to_host.drain(..sent);
            if sent == 0 {
                break;
            }
        }
        if self.host_done & SHUTDOWN_RCV != 0 {
            self.credit.forward(self.to_host.len() as u32);
            self.to_host = VecDeque::new();
        }
        if self.to_host.is_empty() {
            // A slow reader costs memory only while it is slow.
            self.to_host = VecDeque::new();
        }
        self.follow_guest();
    }

    /// Writes to the host. Returns the number of bytes that it took.
    fn write(&mut self, bytes: &[u8]) -> usize {
        let mut done = 0;
        while done < bytes.len() && self.writable && self.host_done & SHUTDOWN_RCV == 0 {
            let Some(mut host) = self.host.as_ref() else { break };
            match host.write(&bytes[done..]) {
                Ok(count @ 1..) => done += count,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => self.writable = false,
                // It will take no more.
                Ok(0) | Err(_) => self.host_done |= SHUTDOWN_RCV,
            }
        }
        self.credit.forward(done as u32);
        done
    }

    /// Passes on to the host that the guest sends or receives no more.
    fn follow_guest(&self) {
        let Some(host) = &self.host else { return };
        // These fail only if the host is gone.
        if self.guest_done & SHUTDOWN_SEND != 0 && self.to_host.is_empty() {
            let _ = shutdown(host, Shutdown::Write);
        }
        if self.guest_done & SHUTDOWN_RCV != 0 {
            let _ = shutdown(host, Shutdown::Read);
        }
    }

    /// True if a credit request has no answer that helps yet, and must be repeated.
    pub fn may_have_to_ask_again(&self) -> bool {
        self.credit_asked && self.credit.is_full_of_packets()
    }

    /// Has the next pass send another credit request, if there is still no room.
    pub fn ask_again(&mut self) {
        self.credit_asked = false;
    }

    /// Notes that the socket may be ready, and whether the host has closed it.
    pub fn host_event(&mut self, hung_up: bool) {
        (self.readable, self.writable) = (true, true);
        self.hung_up |= hung_up;
        self.flush();
    }

    /// The next packet for the guest. Its payload is written to `room`. Call it again until it has none.
    pub fn next_packet(&mut self, room: &mut [u8]) -> Outgoing {
        if let Some(op) = self.opening.take() {
            return Outgoing::Packet(op, 0, 0);
        }
        if self.phase != Phase::Established {
            return Outgoing::Nothing;
        }
        let mut wants_credit = false;
        if self.readable && (self.host_done & SHUTDOWN_SEND) == 0 && (self.guest_done & SHUTDOWN_RCV) == 0 {
            let most = room.len().min(self.credit.guest_room() as usize);
            match most {
                0 => wants_credit = true,
                _ => {
                    let len = self.read(&mut room[..most]);
                    if len > 0 {
                        self.credit.sent(len as u32);
                        return Outgoing::Packet(RW, 0, len);
                    }
                }
            }
        }
        let read_all = self.host_done & SHUTDOWN_SEND != 0 || self.guest_done & SHUTDOWN_RCV != 0;
        if self.hung_up && read_all {
            self.host_done = SHUTDOWN_BOTH;
        }
        if self.host_done & !self.shutdown_sent != 0 {
            self.shutdown_sent = self.host_done;
            return Outgoing::Packet(SHUTDOWN, self.shutdown_sent, 0);
        }
        if self.credit.is_update_due() || self.credit_wanted {
            return Outgoing::Packet(CREDIT_UPDATE, 0, 0);
        }
        if wants_credit && !self.credit_asked {
            self.credit_asked = true;
            return Outgoing::Packet(CREDIT_REQUEST, 0, 0);
        }
        Outgoing::Nothing
    }

    /// Reads from the host. Returns 0 if it has nothing now, or will have nothing more.
    fn read(&mut self, room: &mut [u8]) -> usize {
        loop {
            let Some(mut host) = self.host.as_ref() else {
                return 0;
            };
            match host.read(room) {
                Ok(count @ 1..) => return count,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == ErrorKind::WouldBlock => self.readable = false,
                Ok(0) => self.host_done |= SHUTDOWN_SEND,
                Err(_) => self.host_done = SHUTDOWN_BOTH,
            }
            return 0;
        }
    }

    /// Writes the counters into a packet of this connection.
    pub fn stamp(&mut self, header: &mut Header) {
        self.credit_wanted = false;
        self.credit.write_header(header);
    }

    /// True if the guest was told that the host has closed the connection for both directions.
    pub fn is_closed_by_host(&self) -> bool {
        self.shutdown_sent == SHUTDOWN_BOTH
    }

    /// The socket, and the bytes that the host has not taken.
    pub fn into_rest(self) -> (Option<File>, VecDeque<u8>) {
        (self.host, self.to_host)
    }
}
