//! All connections of a device: takes the guest's packets and the host's events, and finds what the guest is to be
//! sent.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::connection::{Connection, Outgoing, Phase, Violation};
use crate::lingering::LingeringSockets;
use crate::packet::{CREDIT_REQUEST, HOST_CID, Header, Key, REQUEST, RESPONSE, RST, STREAM};

/// Most connections of a device, with those that begin or end.
pub const MAX_CONNECTIONS: usize = 1023;

/// Called with a number and the port of the host (CID 2) to which the guest wants to connect. The answer comes by
/// [`crate::VsockHandle::answer`] with this number. Returns false if nobody can answer now: the guest is refused then.
/// Called on the device's thread; must not block.
pub type RequestFn = Arc<dyn Fn(u64, u32) -> bool + Send + Sync>;

/// Time to answer a request, on either side, and for the guest to end a connection that the host has closed.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which a credit request is repeated.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// Packets of the guest stay in the queue while so many of its packets wait for their RST.
const MAX_RESETS: usize = 64;
/// First port of the host that is given to a connection which the host begins.
pub(crate) const FIRST_HOST_PORT: u32 = 1 << 30;
/// Tokens from here on are of no connection.
pub(crate) const FIRST_TOKEN: u64 = (u32::MAX as u64) << 32;
/// Tokens of sockets that take the last bytes of a connection: the upper half of those.
const LINGERING_TOKEN: u64 = FIRST_TOKEN | 1 << 31;

/// The connections.
pub(crate) struct Connections {
    guest_cid: u64,
    /// Watches the hosts' sockets. The worker adds what else it waits for.
    pub epoll: Epoll,
    table: BTreeMap<Key, Connection>,
    lingering: LingeringSockets,
    /// Requests of the guest that nobody has answered.
    asked: BTreeMap<u64, Key>,
    /// Connections that may have something for the guest.
    ready: VecDeque<Key>,
    /// RSTs that the guest is to be sent.
    resets: VecDeque<Header>,
    deadlines: BTreeSet<(Instant, Key)>,
    /// Connections whose credit request is repeated, and the time of that.
    asking: BTreeSet<Key>,
    ask_at: Option<Instant>,
    /// A snapshot contains it: a restored guest may still have sockets of connections from before.
    next_host_port: Arc<AtomicU32>,
    /// Never repeats, so that a late answer meets no later request.
    ids: Arc<AtomicU64>,
    on_request: RequestFn,
}

impl std::fmt::Debug for Connections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connections")
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}

impl Connections {
    pub fn new(
        guest_cid: u64,
        next_host_port: Arc<AtomicU32>,
        ids: Arc<AtomicU64>,
        on_request: RequestFn,
    ) -> io::Result<Self> {
        Ok(Self {
            guest_cid,
            epoll: Epoll::new()?,
            table: BTreeMap::new(),
            lingering: LingeringSockets::default(),
            asked: BTreeMap::new(),
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            deadlines: BTreeSet::new(),
            asking: BTreeSet::new(),
            ask_at: None,
            next_host_port,
            ids,
            on_request,
        })
    }

    /// True if packets of the guest have to wait.
    pub fn is_full(&self) -> bool {
        self.resets.len() >= MAX_RESETS
    }

    /// Takes a packet of the guest. `payload` is `None` if it is shorter than its header says, or longer than any
    /// connection allows.
    pub fn take(&mut self, header: &Header, payload: Option<&[u8]>, now: Instant) {
        // An answer could not reach its sender.
        if header.src_cid != self.guest_cid {
            return;
        }
        let key = Key {
            guest_port: header.src_port,
            host_port: header.dst_port,
        };
        if header.kind != STREAM || header.dst_cid != HOST_CID {
            return self.refuse(header);
        }
        let Some(connection) = self.table.get_mut(&key) else {
            return match header.op {
                REQUEST => self.request(key, header, now),
                _ => self.refuse(header),
            };
        };
        let ended = match (header.op, payload) {
            (RST, _) => Ok(true),
            (RESPONSE, _) => connection
                .accepted(header, &format!("OK {}\n", key.host_port))
                .map(|()| false),
            (_, Some(payload)) => connection.take(header, payload),
            (_, None) => Err(Violation),
        };
        match ended {
            Ok(false) if header.op == RESPONSE => self.clear_deadline(key),
            Ok(false) => {}
            ended => {
                if header.op != RST {
                    self.resets.push_back(header.reset());
                }
                if ended.is_err() {
                    tracing::debug!(?header, "the guest broke a rule of a vsock connection");
                }
                self.end(key);
                return;
            }
        }
        self.look_at(key, now);
    }

    fn refuse(&mut self, header: &Header) {
        if header.op != RST {
            self.resets.push_back(header.reset());
        }
    }

    /// The guest asks for a connection.
    fn request(&mut self, key: Key, header: &Header, now: Instant) {
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        if key.token() >= FIRST_TOKEN
            || self.len() >= MAX_CONNECTIONS
            || !(self.on_request)(id, key.host_port)
        {
            return self.refuse(header);
        }
        self.table.insert(key, Connection::asked(id, header));
        self.asked.insert(id, key);
        self.set_deadline(key, now);
    }

    fn len(&self) -> usize {
        self.table.len() + self.lingering.len()
    }

    /// The host answers the guest's request `id` with a nonblocking stream socket, or refuses it. Does nothing if the
    /// guest does not wait any more.
    pub fn answer(&mut self, id: u64, host: Option<File>, now: Instant) {
        let Some(key) = self.asked.remove(&id) else { return };
        match (self.table.get_mut(&key), host) {
            (Some(connection), Some(host)) if watch(&self.epoll, &host, key.token()) => {
                connection.accept(host);
                self.clear_deadline(key);
                self.look_at(key, now);
            }
            _ => self.abort(key),
        }
    }

    /// The host asks for a connection to a port of the guest, from a nonblocking stream socket. It is closed if that is
    /// not possible.
    pub fn connect(&mut self, guest_port: u32, host: File, now: Instant) {
        let key = self.free_key(guest_port);
        if guest_port == u32::MAX || self.len() >= MAX_CONNECTIONS || !watch(&self.epoll, &host, key.token())
        {
            return;
        }
        self.table.insert(key, Connection::offered(host));
        self.set_deadline(key, now);
        self.look_at(key, now);
    }

    fn free_key(&mut self, guest_port: u32) -> Key {
        loop {
            let host_port = self.next_host_port.load(Ordering::Relaxed);
            let next = FIRST_HOST_PORT | ((host_port + 1) % FIRST_HOST_PORT);
            self.next_host_port.store(next, Ordering::Relaxed);
            let key = Key {
                guest_port,
                host_port,
            };
            if !self.table.contains_key(&key) {
                return key;
            }
        }
    }

    /// An event of a socket.
    pub fn host_event(&mut self, token: u64, hung_up: bool, now: Instant) {
        if token >= LINGERING_TOKEN {
            if let Some(host) = self.lingering.ready((token - LINGERING_TOKEN) as u32) {
                unwatch(&self.epoll, &host);
            }
            return;
        }
        let key = Key::from_token(token);
        let Some(connection) = self.table.get_mut(&key) else {
            return;
        };
        connection.host_event(hung_up);
        if connection.hung_up && connection.phase == Phase::RequestedByHost {
            return self.abort(key);
        }
        self.look_at(key, now);
    }

    /// Puts a connection into the queue of those that may have something for the guest.
    fn look_at(&mut self, key: Key, now: Instant) {
        let Some(connection) = self.table.get_mut(&key) else {
            return;
        };
        if !std::mem::replace(&mut connection.queued, true) {
            self.ready.push_back(key);
        }
        if connection.is_closed_by_host() && connection.deadline.is_none() {
            self.set_deadline(key, now);
        }
    }

    fn set_deadline(&mut self, key: Key, now: Instant) {
        if let Some(connection) = self.table.get_mut(&key) {
            let at = now + ANSWER_TIMEOUT;
            connection.deadline = Some(at);
            self.deadlines.insert((at, key));
        }
    }

    fn clear_deadline(&mut self, key: Key) {
        if let Some(at) = self
            .table
            .get_mut(&key)
            .and_then(|connection| connection.deadline.take())
        {
            self.deadlines.remove(&(at, key));
        }
    }

    /// Ends a connection, and tells the guest if it knows of the connection.
    fn abort(&mut self, key: Key) {
        if self.table.get(&key).is_some_and(Connection::is_unknown_to_guest) {
            return self.end(key);
        }
        self.resets.push_back(Header {
            src_cid: HOST_CID,
            dst_cid: self.guest_cid,
            src_port: key.host_port,
            dst_port: key.guest_port,
            kind: STREAM,
            op: RST,
            ..Header::default()
        });
        self.end(key);
    }

    /// Forgets a connection. The host still gets the bytes that the guest has sent.
    fn end(&mut self, key: Key) {
        self.clear_deadline(key);
        self.asking.remove(&key);
        let Some(connection) = self.table.remove(&key) else {
            return;
        };
        if connection.queued {
            // Without receive buffers nothing else takes it out.
            self.ready.retain(|other| *other != key);
        }
        if let Phase::RequestedByGuest(id) = connection.phase {
            self.asked.remove(&id);
        }
        if let (Some(host), left) = connection.into_rest() {
            unwatch(&self.epoll, &host);
            if let Some((number, host)) = self.lingering.add(host, left)
                && !watch(&self.epoll, host, LINGERING_TOKEN + u64::from(number))
            {
                tracing::warn!("the last bytes of a vsock connection are lost");
                self.lingering.remove(number);
            }
        }
    }

    /// Ends connections whose deadline has passed, and repeats credit requests.
    pub fn expire(&mut self, now: Instant) {
        while let Some((at, key)) = self.deadlines.first().copied()
            && at <= now
        {
            self.abort(key);
        }
        if self.ask_at.is_some_and(|at| at <= now) {
            self.ask_at = None;
            for key in std::mem::take(&mut self.asking) {
                if let Some(connection) = self.table.get_mut(&key) {
                    connection.ask_again();
                    self.look_at(key, now);
                }
            }
        }
    }

    /// Time until there is something to expire.
    pub fn until_deadline(&self, now: Instant) -> Option<Duration> {
        let end = self.deadlines.first().map(|(at, _)| *at);
        let at = end.into_iter().chain(self.ask_at).min()?;
        Some(at.saturating_duration_since(now))
    }

    /// Ends all connections without a word to the guest.
    pub fn end_all(&mut self) {
        while let Some((key, _)) = self.table.first_key_value() {
            self.end(*key);
        }
        self.lingering = LingeringSockets::default();
    }

    /// Starts the time limits again: the device was stopped meanwhile.
    pub fn resume(&mut self, now: Instant) {
        for (_, key) in std::mem::take(&mut self.deadlines) {
            self.set_deadline(key, now);
        }
    }

    /// True if there may be a packet for the guest.
    pub fn has_outgoing(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// The next packet for the guest. Its payload is written to `room`. Connections take turns.
    pub fn next_packet(&mut self, room: &mut [u8], now: Instant) -> Option<(Header, usize)> {
        if let Some(reset) = self.resets.pop_front() {
            return Some((reset, 0));
        }
        while let Some(key) = self.ready.pop_front() {
            let Some(connection) = self.table.get_mut(&key) else {
                continue;
            };
            connection.queued = false;
            let Outgoing::Packet(op, flags, len) = connection.next_packet(room) else {
                continue;
            };
            let mut header = Header {
                src_cid: HOST_CID,
                dst_cid: self.guest_cid,
                src_port: key.host_port,
                dst_port: key.guest_port,
                len: len as u32,
                kind: STREAM,
                op,
                flags,
                ..Header::default()
            };
            connection.stamp(&mut header);
            if op == CREDIT_REQUEST && connection.may_have_to_ask_again() {
                self.asking.insert(key);
                self.ask_at.get_or_insert(now + ASK_AGAIN);
            }
            self.look_at(key, now);
            return Some((header, len));
        }
        None
    }
}

/// Watches a socket, edge-triggered. Returns false if the kernel refuses.
fn watch(epoll: &Epoll, host: &File, token: u64) -> bool {
    let events = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
    epoll
        .ctl(
            ControlOperation::Add,
            host.as_raw_fd(),
            EpollEvent::new(events, token),
        )
        .is_ok()
}

/// The socket may be open elsewhere, where it would keep its events.
fn unwatch(epoll: &Epoll, host: &File) {
    let _ = epoll.ctl(ControlOperation::Delete, host.as_raw_fd(), EpollEvent::default());
}

#[cfg(test)]
mod tests;
