//! The worker of a queue pair, where frames pass through this process.
//!
//! One thread has both directions: a flow's data and its acknowledgements pass through the same pair, so that one
//! wake-up serves both, with one batch and one interrupt each; and a guest with a vCPU for each pair has as many workers
//! as it can keep busy.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, mpsc};

use husk_devices::GuestMem;
use husk_devices::sched_policy::SchedPolicy;
use husk_devices::virtio::{ActiveQueue, VirtioInterrupt};
use virtio_queue::QueueT;
use vm_memory::GuestAddressSpace;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::buffers::Broken;
use crate::filter::Filter;
use crate::handle::Shared;
use crate::quiet::{self, Quiet};
use crate::rx::Receiver;
use crate::tap::Tap;
use crate::tx::Transmitter;

const STOP: u64 = 0;
const BELL: u64 = 1;
const RECEIVE: u64 = 2;
const TRANSMIT: u64 = 3;
const TAP: u64 = 4;

/// What the control queue and the host want of a pair.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    /// The driver uses the pair.
    pub enabled: bool,
    /// The link is up.
    pub link: bool,
    pub filter: Arc<Filter>,
}

impl Rules {
    fn open(&self) -> bool {
        self.enabled && self.link
    }
}

/// New rules, and where to say that they are in force.
struct Order {
    rules: Rules,
    done: mpsc::SyncSender<()>,
}

/// The sending end of a worker's mailbox.
#[derive(Debug)]
pub(crate) struct Line {
    orders: mpsc::Sender<Order>,
    bell: EventFd,
}

/// The other end.
#[derive(Debug)]
pub(crate) struct Mailbox {
    orders: mpsc::Receiver<Order>,
    bell: EventFd,
}

/// A mailbox.
pub(crate) fn mailbox() -> io::Result<(Line, Mailbox)> {
    let (sender, receiver) = mpsc::channel();
    let bell = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
    let line = Line {
        orders: sender,
        bell: bell.try_clone()?,
    };
    let mailbox = Mailbox {
        orders: receiver,
        bell,
    };
    Ok((line, mailbox))
}

impl Line {
    /// Has the worker take on `rules`; the receiver hears when they are in force, or that the worker is gone.
    pub fn order(&self, rules: Rules) -> mpsc::Receiver<()> {
        let (done, heard) = mpsc::sync_channel(1);
        if self.orders.send(Order { rules, done }).is_ok() {
            // A full counter is a bell that rings already.
            let _ = self.bell.write(1);
        }
        heard
    }
}

/// All that a pair has to do with.
pub(crate) struct Pair {
    pub tap: Arc<Tap>,
    pub receive: ActiveQueue,
    pub transmit: ActiveQueue,
    pub mem: GuestMem,
    pub interrupt: Arc<dyn VirtioInterrupt>,
    pub shared: Arc<Shared>,
    pub features: u64,
    pub mergeable: bool,
    /// If negotiated.
    pub mtu: Option<u16>,
    pub rules: Rules,
    pub mailbox: Mailbox,
}

/// A pair at work.
struct Serving {
    pair: Pair,
    receiver: Receiver,
    transmitter: Transmitter,
    epoll: Epoll,
    sched_policy: SchedPolicy,
    quiet: Quiet,
    /// Whether there may be frames to receive or to send.
    receive: bool,
    transmit: bool,
}

impl Pair {
    /// Serves the queues until `stop`, or until one is broken.
    pub fn run(self, stop: &EventFd) -> [ActiveQueue; 2] {
        let receiver = Receiver::new(self.mergeable, self.mtu);
        let transmitter = Transmitter::new(self.features);
        let epoll = match self.watch(stop) {
            Ok(epoll) => epoll,
            Err(error) => {
                self.interrupt.needs_reset(&format!("epoll: {error}"));
                return [self.receive, self.transmit];
            }
        };
        // Whatever was signalled before we came, look first.
        let mut serving = Serving {
            pair: self,
            receiver,
            transmitter,
            epoll,
            sched_policy: SchedPolicy::default(),
            quiet: Quiet::default(),
            receive: true,
            transmit: true,
        };
        if let Err(reason) = serving.serve().and_then(|()| serving.settle()) {
            serving.pair.interrupt.needs_reset(&reason);
        }
        let mut pair = serving.pair;
        serving.receiver.release(&mut pair.receive.queue);
        pair.shared.received.take(&mut serving.receiver.counters);
        [pair.receive, pair.transmit]
    }

    /// Edges, but for the stop, which stays, and the bell, which is read.
    fn watch(&self, stop: &EventFd) -> io::Result<Epoll> {
        let epoll = Epoll::new()?;
        let edge = EventSet::IN | EventSet::EDGE_TRIGGERED;
        for (fd, events, data) in [
            (stop.as_raw_fd(), EventSet::IN, STOP),
            (self.mailbox.bell.as_raw_fd(), EventSet::IN, BELL),
            (self.receive.kick.as_raw_fd(), edge, RECEIVE),
            (self.transmit.kick.as_raw_fd(), edge, TRANSMIT),
            (self.tap.as_raw_fd(), edge | EventSet::OUT, TAP),
        ] {
            epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(events, data))?;
        }
        Ok(epoll)
    }
}

impl Serving {
    fn serve(&mut self) -> Result<(), Broken> {
        let mut events = [EpollEvent::default(); 5];
        loop {
            self.pass()?;
            let timeout = match (self.receive || self.transmit, self.quiet.owes()) {
                (true, _) => 0,
                (false, true) => quiet::PATIENCE.as_millis() as i32,
                (false, false) => -1,
            };
            let count = match self.epoll.wait(timeout, &mut events) {
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
                Err(e) => return Err(format!("epoll: {e}")),
            };
            if count == 0 && timeout > 0 {
                self.settle()?;
            }
            for event in &events[..count] {
                match event.data() {
                    STOP => return Ok(()),
                    BELL => self.take_orders(),
                    RECEIVE => self.receive = true,
                    TRANSMIT => self.transmit = true,
                    _ => (self.receive, self.transmit) = (true, true),
                }
            }
        }
    }

    /// A batch each way. It gives up after that, so that no guest and no peer can keep us from stopping.
    fn pass(&mut self) -> Result<(), Broken> {
        let pair = &mut self.pair;
        let (mut received, mut sent) = (None, None);
        if self.receive && pair.rules.open() {
            let mem = pair.mem.memory().into_inner();
            let outcome = self
                .receiver
                .pass(&pair.tap, &mut pair.receive, &mem, &pair.rules.filter)?;
            if outcome.interrupt {
                pair.interrupt.signal_queue(pair.receive.index);
            }
            self.receive = outcome.again;
            received = Some(outcome.requests());
            pair.shared.received.take(&mut self.receiver.counters);
        } else {
            self.receive = false;
        }
        if self.transmit {
            let mem = pair.mem.memory();
            let before = pair.transmit.queue.next_used();
            let tap = pair.rules.open().then_some(&*pair.tap);
            let mut full = false;
            let outcome = self.transmitter.pass(tap, &mut pair.transmit, &mem, &mut full)?;
            let queue = &pair.transmit.queue;
            if self.quiet.sent(&mem, queue, before, &outcome)? {
                pair.interrupt.signal_queue(pair.transmit.index);
            }
            self.transmit = outcome.again;
            sent = Some(outcome.requests());
            pair.shared.sent.take(&mut self.transmitter.counters);
            if full {
                self.wait_for_tap()?;
            }
        }
        // A frame and the answer to it are one each.
        self.sched_policy
            .record_pass(received.max(sent).unwrap_or_default());
        if self.quiet.passed() {
            self.settle()
        } else {
            Ok(())
        }
    }

    /// Tells the driver what it is owed.
    fn settle(&mut self) -> Result<(), Broken> {
        let pair = &self.pair;
        if self.quiet.settle(&pair.mem.memory(), &pair.transmit.queue)? {
            pair.interrupt.signal_queue(pair.transmit.index);
        }
        Ok(())
    }

    /// Has the tap tell when it takes frames again: it does so only for those who saw that it does not.
    fn wait_for_tap(&self) -> Result<(), Broken> {
        let interest = EpollEvent::new(EventSet::IN | EventSet::OUT | EventSet::EDGE_TRIGGERED, TAP);
        self.epoll
            .ctl(ControlOperation::Modify, self.pair.tap.as_raw_fd(), interest)
            .map_err(|e| format!("epoll: {e}"))
    }

    fn take_orders(&mut self) {
        let _ = self.pair.mailbox.bell.read();
        while let Ok(Order { rules, done }) = self.pair.mailbox.orders.try_recv() {
            let before = std::mem::replace(&mut self.pair.rules, rules);
            let rules = &self.pair.rules;
            if !rules.open() {
                self.receiver.release(&mut self.pair.receive.queue);
            } else if !before.link {
                // What came while the link was down is lost.
                self.pair.tap.drain();
            }
            (self.receive, self.transmit) = (true, true);
            let _ = done.send(());
        }
    }
}
