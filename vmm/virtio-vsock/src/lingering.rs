//! Bytes of connections that the guest has closed, for hosts that read them more slowly.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{ErrorKind, Write};

/// Numbers are less than this: they are the lower half of an epoll token.
const NUMBERS: u32 = 1 << 31;

/// A socket that takes the last bytes of a connection.
#[derive(Debug)]
struct LingeringSocket {
    host: File,
    left: VecDeque<u8>,
}

impl LingeringSocket {
    /// Writes as much as the host takes. Returns false when there is no more to do.
    fn write(&mut self) -> bool {
        while !self.left.is_empty() {
            match self.host.write(self.left.as_slices().0) {
                Ok(count @ 1..) => drop(self.left.drain(..count)),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return true,
                Ok(0) | Err(_) => return false,
            }
        }
        false
    }
}

/// These sockets, by number.
#[derive(Debug, Default)]
pub(crate) struct LingeringSockets {
    sockets: BTreeMap<u32, LingeringSocket>,
    next: u32,
}

impl LingeringSockets {
    pub fn len(&self) -> usize {
        self.sockets.len()
    }

    /// Takes a nonblocking socket. Returns its number and descriptor, or `None` if the host has taken all bytes.
    pub fn add(&mut self, host: File, left: VecDeque<u8>) -> Option<(u32, &File)> {
        let mut socket = LingeringSocket { host, left };
        if !socket.write() {
            return None;
        }
        let after = |number: u32| (number + 1) % NUMBERS;
        while self.sockets.contains_key(&self.next) {
            self.next = after(self.next);
        }
        let number = self.next;
        self.next = after(number);
        Some((number, &self.sockets.entry(number).or_insert(socket).host))
    }

    /// The socket may be ready. Returns it when it has taken all.
    pub fn ready(&mut self, number: u32) -> Option<File> {
        if self.sockets.get_mut(&number)?.write() {
            return None;
        }
        self.remove(number)
    }

    pub fn remove(&mut self, number: u32) -> Option<File> {
        self.sockets.remove(&number).map(|socket| socket.host)
    }
}
