//! The worker of the control queue. It also applies link changes and forwards the interrupts that vhost cannot raise
//! itself.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use husk_devices::virtio::chain::{self, Segment};
use husk_devices::virtio::{ActiveQueue, VirtioInterrupt};
use husk_devices::{GuestMem, GuestMemMmap};
use husk_vhost::VhostCall;
use virtio_bindings::virtio_net::{VIRTIO_NET_ERR, VIRTIO_NET_OK};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddressSpace};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::control_command::{Payload, parse};
use crate::control_state::{ControlState, Datapath, execute};
use crate::handle::Shared;
use crate::rx_buffers::{DeviceError, broken};
use crate::shared_throttle::SharedThrottle;

const STOP: u64 = 0;
const KICK: u64 = 1;
const WAKEUP: u64 = 2;
const ERROR: u64 = 3;
/// First of the event numbers of the forwarded interrupts.
const CALL: u64 = 4;

/// Time after which the worker looks for a stop, beside that of the command it is at.
const PASS_LIMIT: Duration = Duration::from_millis(10);

/// The result of the worker.
pub(crate) type StoppedControl = (Option<ActiveQueue>, ControlState);

/// The worker of the control queue, if the driver enabled it, and of the other events.
pub(crate) struct ControlWorker {
    pub queue: Option<ActiveQueue>,
    pub state: ControlState,
    pub datapath: Datapath,
    pub mem: GuestMem,
    pub interrupt: Arc<dyn VirtioInterrupt>,
    pub shared: Arc<Shared>,
    pub throttle: SharedThrottle,
    pub calls: Vec<VhostCall>,
    /// Signalled by vhost when a ring is malformed.
    pub error: Option<EventFd>,
}

impl ControlWorker {
    /// Serves until `stop`. After a malformed ring it still follows the link.
    pub fn run(mut self, stop: &EventFd) -> StoppedControl {
        if let Err(reason) = self.serve(stop) {
            // Nobody follows the link any more.
            self.datapath.close(&self.state);
            self.interrupt.needs_reset(&reason);
        }
        (self.queue, self.state)
    }

    fn serve(&mut self, stop: &EventFd) -> Result<(), DeviceError> {
        let epoll = self.watch(stop).map_err(|e| format!("epoll: {e}"))?;
        let mut events = [EpollEvent::default(); 8];
        // The link may have changed since activation.
        self.follow_link()?;
        let (mut more, mut broken) = (true, false);
        loop {
            let mut timeout = -1;
            if more {
                let pause = self.throttle.lock().wait(Instant::now());
                timeout = pause.map_or(0, |pause| pause.as_millis() as i32);
                if pause.is_none() {
                    more = self.pass().unwrap_or_else(|reason| {
                        self.interrupt.needs_reset(&reason);
                        broken = true;
                        false
                    });
                    timeout = if more { 0 } else { -1 };
                }
            }
            let count = match epoll.wait(timeout, &mut events) {
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
                Err(e) => return Err(format!("epoll: {e}")),
            };
            for event in &events[..count] {
                match event.data() {
                    STOP => return Ok(()),
                    KICK => more = !broken,
                    WAKEUP => {
                        let _ = self.shared.wakeup.read();
                        self.follow_link()?;
                    }
                    ERROR => {
                        self.interrupt.needs_reset("vhost: malformed ring");
                        self.ignore_errors(&epoll).map_err(|e| format!("epoll: {e}"))?;
                    }
                    call => self.forward_interrupt((call - CALL) as usize),
                }
            }
        }
    }

    fn watch(&self, stop: &EventFd) -> io::Result<Epoll> {
        let epoll = Epoll::new()?;
        let add = |event: &EventFd, events, data| {
            epoll.ctl(
                ControlOperation::Add,
                event.as_raw_fd(),
                EpollEvent::new(events, data),
            )
        };
        add(stop, EventSet::IN, STOP)?;
        add(&self.shared.wakeup, EventSet::IN, WAKEUP)?;
        if let Some(queue) = &self.queue {
            add(&queue.kick, EventSet::IN | EventSet::EDGE_TRIGGERED, KICK)?;
        }
        if let Some(error) = &self.error {
            add(error, EventSet::IN, ERROR)?;
        }
        for (data, call) in (CALL..).zip(&self.calls) {
            add(&call.event, EventSet::IN, data)?;
        }
        Ok(epoll)
    }

    /// vhost may signal an error again and again, but the driver was notified.
    fn ignore_errors(&mut self, epoll: &Epoll) -> io::Result<()> {
        let Some(error) = self.error.take() else {
            return Ok(());
        };
        let operation = ControlOperation::Delete;
        epoll.ctl(operation, error.as_raw_fd(), EpollEvent::default())
    }

    fn follow_link(&mut self) -> Result<(), DeviceError> {
        self.datapath
            .apply_link(&self.state, self.shared.link())
            .map_err(|e| format!("link: {e}"))
    }

    /// Raises an interrupt that vhost cannot raise itself.
    fn forward_interrupt(&self, call: usize) {
        if let Some(call) = self.calls.get(call) {
            call.forward(&*self.interrupt);
        }
    }

    /// Executes at most one queue's worth of commands, and only for some time, so that a guest cannot prevent a stop.
    /// Returns true if there are more.
    fn pass(&mut self) -> Result<bool, DeviceError> {
        let Some(mut active) = self.queue.take() else {
            return Ok(false);
        };
        let outcome = self.serve_queue(&mut active);
        self.queue = Some(active);
        outcome.map_err(|reason| format!("control queue: {reason}"))
    }

    fn serve_queue(&mut self, active: &mut ActiveQueue) -> Result<bool, DeviceError> {
        let mem = self.mem.memory();
        active.queue.disable_notification(&*mem).map_err(broken)?;
        let (mut used, mut exhausted) = (false, false);
        let start = Instant::now();
        let (mut readable, mut writable) = (Vec::new(), Vec::new());
        for _ in 0..active.queue.size() {
            if self.throttle.lock().is_exhausted() || start.elapsed() >= PASS_LIMIT {
                break;
            }
            let Some(chain) = active.queue.iter(&*mem).map_err(broken)?.next() else {
                exhausted = true;
                break;
            };
            let head = chain.head_index();
            chain::segments(&active.queue, head, &mem, &mut readable, &mut writable).map_err(broken)?;
            self.answer(&mem, &readable, &writable)?;
            active.queue.add_used(&*mem, head, 1).map_err(broken)?;
            used = true;
        }
        if used && active.needs_notification(&mem) {
            self.interrupt.signal_queue(active.index);
        }
        if exhausted {
            active.queue.enable_notification(&*mem).map_err(broken)
        } else {
            Ok(true)
        }
    }

    fn answer(
        &mut self,
        mem: &GuestMemMmap,
        readable: &[Segment],
        writable: &[Segment],
    ) -> Result<(), DeviceError> {
        let ack = writable
            .iter()
            .find(|segment| segment.len != 0)
            .ok_or("control command without a device-writable byte")?;
        let command = parse(Payload::new(mem, readable), self.state.features);
        let ok = command.is_some_and(|command| {
            let outcome = execute(command, &mut self.state, &mut self.datapath, &self.shared);
            if outcome.costly {
                self.throttle.lock().charge();
            }
            outcome.ok
        });
        let answer = if ok { VIRTIO_NET_OK } else { VIRTIO_NET_ERR };
        mem.write_obj(answer as u8, ack.address).map_err(broken)
    }
}
