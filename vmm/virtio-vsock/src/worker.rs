//! The worker of the active device: one thread for all connections. It sleeps while nothing happens.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use husk_devices::virtio::ActiveQueue;
use vmm_sys_util::epoll::{ControlOperation, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::connections::{Connections, FIRST_TOKEN};
use crate::handle::{Message, VsockHandle};
use crate::queues::{DeviceError, PacketQueues};

const STOP: u64 = FIRST_TOKEN;
const KICK: u64 = FIRST_TOKEN + 1;
const MESSAGE: u64 = FIRST_TOKEN + 2;

/// VIRTIO_VSOCK_EVENT_TRANSPORT_RESET
const TRANSPORT_RESET: u32 = 0;

/// Events taken at a time.
const EVENTS: usize = 32;

/// The state that a stopped worker returns.
pub(crate) struct StoppedVsock {
    pub queues: Vec<ActiveQueue>,
    pub connections: Connections,
    pub messages: Receiver<Message>,
    /// The driver has not been told yet.
    pub transport_reset: bool,
}

pub(crate) struct VsockWorker {
    pub queues: PacketQueues,
    /// Of section 5.10.6.7.
    pub event_queue: Option<ActiveQueue>,
    /// The driver is to be told that its connections have ended, and to read its CID again.
    pub transport_reset: bool,
    pub connections: Connections,
    pub messages: Receiver<Message>,
    pub handle: VsockHandle,
}

impl VsockWorker {
    /// Serves until `stop` or a malformed ring.
    pub fn run(mut self, stop: &EventFd) -> StoppedVsock {
        self.connections.resume(Instant::now());
        let watched = self.watch(stop).map_err(|e| format!("epoll: {e}"));
        let served = watched.and_then(|()| self.serve());
        self.unwatch(stop);
        if let Err(reason) = served {
            self.queues.interrupt.needs_reset(&reason);
            // Nobody serves them until the driver resets the device.
            self.connections.end_all();
            self.handle.close();
        }
        let mut queues = vec![self.queues.receive, self.queues.transmit];
        queues.extend(self.event_queue);
        StoppedVsock {
            queues,
            connections: self.connections,
            messages: self.messages,
            transport_reset: self.transport_reset,
        }
    }

    /// The file descriptors that the worker polls besides the hosts' sockets.
    fn events<'a>(&'a self, stop: &'a EventFd) -> impl Iterator<Item = (&'a EventFd, EpollEvent)> {
        let edge = EventSet::IN | EventSet::EDGE_TRIGGERED;
        let kick = move |active: &'a ActiveQueue| (&active.kick, EpollEvent::new(edge, KICK));
        let queues = [&self.queues.receive, &self.queues.transmit].into_iter();
        [
            (stop, EpollEvent::new(EventSet::IN, STOP)),
            (self.handle.wake(), EpollEvent::new(edge, MESSAGE)),
        ]
        .into_iter()
        .chain(queues.chain(&self.event_queue).map(kick))
    }

    fn watch(&self, stop: &EventFd) -> io::Result<()> {
        self.events(stop).try_for_each(|(event, wanted)| {
            self.connections
                .epoll
                .ctl(ControlOperation::Add, event.as_raw_fd(), wanted)
        })
    }

    fn unwatch(&self, stop: &EventFd) {
        for (event, wanted) in self.events(stop) {
            // Fails only if the event was not added.
            let _ = self
                .connections
                .epoll
                .ctl(ControlOperation::Delete, event.as_raw_fd(), wanted);
        }
    }

    fn serve(&mut self) -> Result<(), DeviceError> {
        let mut events = [EpollEvent::default(); EVENTS];
        // Packets and messages may have arrived before their events were watched.
        loop {
            let timeout = self.pass()?;
            let count = match self.connections.epoll.wait(timeout, &mut events) {
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
                Err(e) => return Err(format!("epoll: {e}")),
            };
            let now = Instant::now();
            let mut stops = false;
            for event in &events[..count] {
                match event.data() {
                    // The others are edges of sockets, which stay watched and do not come again.
                    STOP => stops = true,
                    KICK | MESSAGE => {}
                    token => {
                        let hung_up = event.event_set().intersects(EventSet::HANG_UP | EventSet::ERROR);
                        self.connections.host_event(token, hung_up, now);
                    }
                }
            }
            if stops {
                return Ok(());
            }
        }
    }

    /// Does a limited part of what there is to do, so that a guest cannot prevent a stop. Returns the time in
    /// milliseconds after which there is more, or -1.
    fn pass(&mut self) -> Result<i32, DeviceError> {
        if self.transport_reset
            && let Some(active) = &mut self.event_queue
        {
            let sent = self.queues.send_event(active, TRANSPORT_RESET);
            self.transport_reset = !sent.map_err(|reason| format!("event queue: {reason}"))?;
        }
        let now = Instant::now();
        while let Ok(message) = self.messages.try_recv() {
            match message {
                Message::Connect(port, host) => self.connections.connect(port, host, now),
                Message::Answer(id, host) => self.connections.answer(id, host, now),
            }
        }
        self.connections.expire(now);
        let more = self.queues.transmit(&mut self.connections, now);
        let mut again = more.map_err(|reason| format!("transmit queue: {reason}"))?;
        let was_full = self.connections.is_full();
        let more = self.queues.receive(&mut self.connections, now);
        again |= more.map_err(|reason| format!("receive queue: {reason}"))?;
        // The transmit queue goes on when RSTs have left.
        again |= was_full && !self.connections.is_full();
        Ok(match (again, self.connections.until_deadline(now)) {
            (true, _) => 0,
            // Rounded up, so as not to wake before it.
            (false, Some(wait)) => wait.as_millis() as i32 + 1,
            (false, None) => -1,
        })
    }
}
