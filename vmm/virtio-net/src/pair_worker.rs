//! The worker of a queue pair, where frames pass through this process.
//!
//! One thread serves both directions. The data and acknowledgements of a flow pass through the same pair, so one
//! wake-up serves both, with one batch and one interrupt each. A guest with one vCPU per pair has as many workers as
//! it can keep busy.

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

use crate::filter::Filter;
use crate::handle::Shared;
use crate::rx::Receiver;
use crate::rx_buffers::DeviceError;
use crate::tap::Tap;
use crate::tx::Transmitter;
use crate::tx_coalescing::{self, TxCoalescing};

const STOP: u64 = 0;
const WAKEUP: u64 = 1;
const RECEIVE: u64 = 2;
const TRANSMIT: u64 = 3;
const TAP: u64 = 4;

/// The state of a pair that the control queue and the host set.
#[derive(Clone, Debug)]
pub(crate) struct PairRules {
    /// The driver uses the pair.
    pub enabled: bool,
    /// The link is up.
    pub link: bool,
    pub filter: Arc<Filter>,
}

impl PairRules {
    fn open(&self) -> bool {
        self.enabled && self.link
    }
}

/// New rules, and the channel that reports that they are in force.
struct RulesUpdate {
    rules: PairRules,
    done: mpsc::SyncSender<()>,
}

/// The sending end of a pair worker's mailbox.
#[derive(Debug)]
pub(crate) struct PairMailbox {
    updates: mpsc::Sender<RulesUpdate>,
    wakeup: EventFd,
}

/// The receiving end of a pair worker's mailbox.
#[derive(Debug)]
pub(crate) struct PairInbox {
    updates: mpsc::Receiver<RulesUpdate>,
    wakeup: EventFd,
}

/// Creates the mailbox of a pair worker.
pub(crate) fn pair_mailbox() -> io::Result<(PairMailbox, PairInbox)> {
    let (sender, receiver) = mpsc::channel();
    let wakeup = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
    let mailbox = PairMailbox {
        updates: sender,
        wakeup: wakeup.try_clone()?,
    };
    let inbox = PairInbox {
        updates: receiver,
        wakeup,
    };
    Ok((mailbox, inbox))
}

impl PairMailbox {
    /// Sends `rules` to the worker. The returned channel yields a value when they are in force, or closes if the
    /// worker has ended.
    pub fn set_rules(&self, rules: PairRules) -> mpsc::Receiver<()> {
        let (done, applied) = mpsc::sync_channel(1);
        if self.updates.send(RulesUpdate { rules, done }).is_ok() {
            // A full counter means that a wake-up is already pending.
            let _ = self.wakeup.write(1);
        }
        applied
    }
}

#[cfg(test)]
impl PairInbox {
    /// Waits for new rules, in place of a worker.
    pub fn rules(&self) -> PairRules {
        let RulesUpdate { rules, done } = self.updates.recv().unwrap();
        let _ = done.send(());
        rules
    }
}

/// The queues of a pair and everything its worker uses.
pub(crate) struct PairWorker {
    pub tap: Arc<Tap>,
    pub receive: ActiveQueue,
    pub transmit: ActiveQueue,
    pub mem: GuestMem,
    pub interrupt: Arc<dyn VirtioInterrupt>,
    pub shared: Arc<Shared>,
    pub features: u64,
    pub mergeable: bool,
    /// The MTU, if negotiated.
    pub mtu: Option<u16>,
    pub rules: PairRules,
    pub inbox: PairInbox,
}

/// The state of a running pair worker.
struct PairState {
    pair: PairWorker,
    receiver: Receiver,
    transmitter: Transmitter,
    epoll: Epoll,
    sched_policy: SchedPolicy,
    coalescing: TxCoalescing,
    /// True if there may be frames to receive, or to send.
    receive: bool,
    transmit: bool,
}

impl PairWorker {
    /// Serves the queues until `stop` or a malformed ring.
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
        // Requests may have arrived before the events were watched.
        let mut state = PairState {
            pair: self,
            receiver,
            transmitter,
            epoll,
            sched_policy: SchedPolicy::default(),
            coalescing: TxCoalescing::default(),
            receive: true,
            transmit: true,
        };
        if let Err(reason) = state.serve().and_then(|()| state.flush_interrupt()) {
            state.pair.interrupt.needs_reset(&reason);
        }
        let mut pair = state.pair;
        state.receiver.release(&mut pair.receive.queue);
        pair.shared.received.take(&mut state.receiver.counters);
        [pair.receive, pair.transmit]
    }

    /// All events are edge-triggered except the stop event, which stays set, and the wake-up event, which is read.
    fn watch(&self, stop: &EventFd) -> io::Result<Epoll> {
        let epoll = Epoll::new()?;
        let edge = EventSet::IN | EventSet::EDGE_TRIGGERED;
        for (fd, events, data) in [
            (stop.as_raw_fd(), EventSet::IN, STOP),
            (self.inbox.wakeup.as_raw_fd(), EventSet::IN, WAKEUP),
            (self.receive.kick.as_raw_fd(), edge, RECEIVE),
            (self.transmit.kick.as_raw_fd(), edge, TRANSMIT),
            (self.tap.as_raw_fd(), edge | EventSet::OUT, TAP),
        ] {
            epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(events, data))?;
        }
        Ok(epoll)
    }
}

impl PairState {
    fn serve(&mut self) -> Result<(), DeviceError> {
        let mut events = [EpollEvent::default(); 5];
        loop {
            self.pass()?;
            let timeout = match (self.receive || self.transmit, self.coalescing.is_pending()) {
                (true, _) => 0,
                (false, true) => tx_coalescing::MAX_DELAY.as_millis() as i32,
                (false, false) => -1,
            };
            let count = match self.epoll.wait(timeout, &mut events) {
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
                Err(e) => return Err(format!("epoll: {e}")),
            };
            if count == 0 && timeout > 0 {
                self.flush_interrupt()?;
            }
            for event in &events[..count] {
                match event.data() {
                    STOP => return Ok(()),
                    WAKEUP => self.apply_updates(),
                    RECEIVE => self.receive = true,
                    TRANSMIT => self.transmit = true,
                    _ => (self.receive, self.transmit) = (true, true),
                }
            }
        }
    }

    /// Moves one batch in each direction, so that neither guest nor network can prevent a stop.
    fn pass(&mut self) -> Result<(), DeviceError> {
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
            if self.coalescing.frames_sent(&mem, queue, before, &outcome)? {
                pair.interrupt.signal_queue(pair.transmit.index);
            }
            self.transmit = outcome.again;
            sent = Some(outcome.requests());
            pair.shared.sent.take(&mut self.transmitter.counters);
            if full {
                self.wait_for_tap()?;
            }
        }
        // A frame and the reply to it count as one request.
        self.sched_policy
            .record_pass(received.max(sent).unwrap_or_default());
        if self.coalescing.is_overdue() {
            self.flush_interrupt()
        } else {
            Ok(())
        }
    }

    /// Raises a delayed transmit interrupt, if the driver still needs it.
    fn flush_interrupt(&mut self) -> Result<(), DeviceError> {
        let pair = &self.pair;
        if self.coalescing.flush(&pair.mem.memory(), &pair.transmit.queue)? {
            pair.interrupt.signal_queue(pair.transmit.index);
        }
        Ok(())
    }

    /// Re-arms the tap event: the tap reports that it accepts frames again only to a waiter that saw it full.
    fn wait_for_tap(&self) -> Result<(), DeviceError> {
        let interest = EpollEvent::new(EventSet::IN | EventSet::OUT | EventSet::EDGE_TRIGGERED, TAP);
        self.epoll
            .ctl(ControlOperation::Modify, self.pair.tap.as_raw_fd(), interest)
            .map_err(|e| format!("epoll: {e}"))
    }

    fn apply_updates(&mut self) {
        let _ = self.pair.inbox.wakeup.read();
        while let Ok(RulesUpdate { rules, done }) = self.pair.inbox.updates.try_recv() {
            let before = std::mem::replace(&mut self.pair.rules, rules);
            let rules = &self.pair.rules;
            if !rules.open() {
                self.receiver.release(&mut self.pair.receive.queue);
            } else if !before.link {
                // Drop the frames that arrived while the link was down.
                self.pair.tap.drain();
            }
            (self.receive, self.transmit) = (true, true);
            let _ = done.send(());
        }
    }
}
