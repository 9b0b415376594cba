//! The worker of the device: one thread for all ports and the control queues. It sleeps while nothing happens, and no
//! port waits for another: each gets a limited part of a pass.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use husk_devices::virtio::{ActiveQueue, VirtioInterrupt, chain};
use husk_devices::{GuestMem, GuestMemMmap, throttle::Throttle};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::GuestAddressSpace;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::config::{CONTROL_RECEIVE, CONTROL_TRANSMIT, receive_queue};
use crate::control::{self, MESSAGE_LEN};
use crate::device::GuestOpenFn;
use crate::port::{DeviceError, PassOutcome, Port, broken, gather, room, scatter};

const STOP: u64 = 0;
const KICK: u64 = 1;
/// First of the event numbers of the hosts' sockets.
const HOST: u64 = 2;

/// The queues and the ports of a worker that has ended.
pub(crate) type StoppedConsole = (Vec<ActiveQueue>, Vec<Port>);

/// The worker.
pub(crate) struct ConsoleWorker {
    /// By index. `None` for a queue that the driver has not enabled.
    pub queues: Vec<Option<ActiveQueue>>,
    /// By number.
    pub ports: Vec<Port>,
    pub mem: GuestMem,
    pub interrupt: Arc<dyn VirtioInterrupt>,
    pub on_guest_open: GuestOpenFn,
}

impl ConsoleWorker {
    /// Serves until `stop` or a malformed ring.
    pub fn run(mut self, stop: &EventFd) -> StoppedConsole {
        if let Err(reason) = self.serve(stop) {
            self.interrupt.needs_reset(&reason);
            // Nobody serves the ports until the driver resets the device.
            for port in self.ports.iter().filter(|port| port.guest_open) {
                (self.on_guest_open)(&port.name, false);
            }
        }
        (self.queues.into_iter().flatten().collect(), self.ports)
    }

    fn serve(&mut self, stop: &EventFd) -> Result<(), DeviceError> {
        let epoll = self.watch(stop).map_err(|e| format!("epoll: {e}"))?;
        let mut events = [EpollEvent::default(); 8];
        let mut throttle = Throttle::new(Instant::now());
        // Buffers may have arrived before the events were watched.
        loop {
            let timeout = self.pass(&mut throttle)?;
            let count = match epoll.wait(timeout, &mut events) {
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
                Err(e) => return Err(format!("epoll: {e}")),
            };
            for event in &events[..count] {
                match event.data() {
                    STOP => return Ok(()),
                    KICK => {}
                    host => {
                        let closed = EventSet::HANG_UP | EventSet::READ_HANG_UP | EventSet::ERROR;
                        let hung_up = event.event_set().intersects(closed);
                        if let Some(port) = self.ports.get_mut((host - HOST) as usize) {
                            port.host_event(hung_up);
                        }
                    }
                }
            }
        }
    }

    /// All events are edge-triggered except the stop event.
    fn watch(&self, stop: &EventFd) -> io::Result<Epoll> {
        let epoll = Epoll::new()?;
        let add = |fd, events, data| epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(events, data));
        let edge = EventSet::IN | EventSet::EDGE_TRIGGERED;
        add(stop.as_raw_fd(), EventSet::IN, STOP)?;
        for queue in self.queues.iter().flatten() {
            add(queue.kick.as_raw_fd(), edge, KICK)?;
        }
        for (data, port) in (HOST..).zip(&self.ports) {
            if let Some(host) = port.host() {
                add(
                    host.as_raw_fd(),
                    edge | EventSet::OUT | EventSet::READ_HANG_UP,
                    data,
                )?;
            }
        }
        Ok(epoll)
    }

    /// Serves each queue at most once around, so that a guest cannot prevent a stop. Returns the time in milliseconds
    /// after which there is more to do, or -1.
    fn pass(&mut self, throttle: &mut Throttle) -> Result<i32, DeviceError> {
        let mem = self.mem.memory();
        let mut timeout = self.serve_control(&mem, throttle)?;
        for number in 0..self.ports.len() {
            let receive = receive_queue(number);
            for index in [receive, receive + 1] {
                let Some(active) = self.queues.get_mut(index).and_then(Option::as_mut) else {
                    continue;
                };
                let port = &mut self.ports[number];
                let outcome = match index == receive {
                    true => port.receive(active, &mem),
                    false => port.transmit(active, &mem),
                };
                let outcome = outcome.map_err(|reason| format!("queue {index}: {reason}"))?;
                if self.finish(index, &mem, outcome).again {
                    timeout = 0;
                }
            }
        }
        // Last, with what the ports have found out.
        self.tell_driver(&mem)
            .map_err(|reason| format!("control receive queue: {reason}"))?;
        Ok(timeout)
    }

    /// Interrupts the driver if it wants to know that buffers were used.
    fn finish(&mut self, index: usize, mem: &GuestMemMmap, outcome: PassOutcome) -> PassOutcome {
        if outcome.used
            && let Some(active) = &mut self.queues[index]
            && active.needs_notification(mem)
        {
            self.interrupt.signal_queue(active.index);
        }
        outcome
    }

    /// Obeys the driver's messages. Returns the time as [`ConsoleWorker::pass`] does.
    fn serve_control(&mut self, mem: &GuestMemMmap, throttle: &mut Throttle) -> Result<i32, DeviceError> {
        let Some(mut active) = self.queues[CONTROL_TRANSMIT].take() else {
            return Ok(-1);
        };
        let timeout = self.obey(&mut active, mem, throttle);
        self.queues[CONTROL_TRANSMIT] = Some(active);
        timeout.map_err(|reason| format!("control transmit queue: {reason}"))
    }

    fn obey(
        &mut self,
        active: &mut ActiveQueue,
        mem: &GuestMemMmap,
        throttle: &mut Throttle,
    ) -> Result<i32, DeviceError> {
        let (mut readable, mut writable) = (Vec::new(), Vec::new());
        let (mut used, mut timeout) = (false, 0);
        for _ in 0..active.queue.size() {
            if throttle.is_exhausted()
                && let Some(pause) = throttle.wait(Instant::now())
            {
                timeout = pause.as_millis() as i32;
                break;
            }
            let Some(chain) = active.queue.iter(mem).map_err(broken)?.next() else {
                timeout = -1;
                break;
            };
            let head = chain.head_index();
            chain::segments(&active.queue, head, mem, &mut readable, &mut writable).map_err(broken)?;
            let mut message = [0; MESSAGE_LEN];
            // A shorter message is ignored.
            if gather(mem, &readable, &mut message)? == MESSAGE_LEN
                && let Some((number, open)) = control::apply(message, &mut self.ports)
            {
                throttle.charge();
                let port = &mut self.ports[number];
                port.set_guest_open(open);
                (self.on_guest_open)(&port.name, open);
            }
            active.queue.add_used(mem, head, 0).map_err(broken)?;
            used = true;
        }
        if used && active.needs_notification(mem) {
            self.interrupt.signal_queue(active.index);
        }
        Ok(timeout)
    }

    /// Sends the messages that are due, as far as the driver has buffers for them.
    fn tell_driver(&mut self, mem: &GuestMemMmap) -> Result<(), DeviceError> {
        let Some(active) = &mut self.queues[CONTROL_RECEIVE] else {
            return Ok(());
        };
        let (mut readable, mut writable) = (Vec::new(), Vec::new());
        let mut used = false;
        while let Some((number, message)) = control::next_message(&self.ports) {
            let Some(chain) = active.queue.iter(mem).map_err(broken)?.next() else {
                break;
            };
            let head = chain.head_index();
            chain::segments(&active.queue, head, mem, &mut readable, &mut writable).map_err(broken)?;
            if room(&writable) < message.len() as u64 {
                return Err(format!("buffer with less than {} bytes", message.len()));
            }
            scatter(mem, &writable, &message)?;
            active
                .queue
                .add_used(mem, head, message.len() as u32)
                .map_err(broken)?;
            control::sent(&mut self.ports[number].control);
            used = true;
        }
        let again = false;
        self.finish(CONTROL_RECEIVE, mem, PassOutcome { used, again });
        Ok(())
    }
}
