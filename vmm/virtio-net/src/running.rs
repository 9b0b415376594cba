//! What a device has while it is active: its queues, sorted, and whoever serves them.

use std::io;
use std::sync::Arc;

use husk_devices::virtio::{ActivateError, Activation, ActiveQueue, VirtioInterrupt};
use husk_devices::worker::Worker;
use husk_devices::{GuestMem, GuestMemMmap};
use husk_seccomp::Role;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU};
use vm_memory::GuestAddressSpace;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::config::control_index;
use crate::control::{Datapath, State, Wiring};
use crate::control_worker::{Call, ControlWorker, Parked};
use crate::handle::Shared;
use crate::pair::{Pair, Rules, mailbox};
use crate::tap::Tap;
use crate::vhost::{Bells, VhostPair};

/// What a device is made of, whatever its driver.
#[derive(Debug)]
pub(crate) struct Parts {
    pub name: String,
    pub mtu: Option<u16>,
    pub shared: Arc<Shared>,
    pub taps: Vec<Arc<Tap>>,
    /// As many, or none.
    pub vhost: Vec<Arc<VhostPair>>,
}

/// The queues of a driver, by what they are for.
#[derive(Debug, Default)]
struct Queues {
    pairs: Vec<[ActiveQueue; 2]>,
    control: Option<ActiveQueue>,
    idle: Vec<ActiveQueue>,
}

impl Queues {
    /// Pairs count as far as they are complete.
    fn sort(mut queues: Vec<ActiveQueue>, control: u16) -> Self {
        queues.sort_by_key(|queue| queue.index);
        let mut sorted = Self::default();
        let mut queues = queues.into_iter().peekable();
        while let Some(queue) = queues.next() {
            let next = 2 * sorted.pairs.len() as u16;
            if queue.index == control {
                sorted.control = Some(queue);
            } else if queue.index == next
                && next < control
                && let Some(transmit) = queues.next_if(|other| other.index == next + 1)
            {
                sorted.pairs.push([queue, transmit]);
            } else {
                sorted.idle.push(queue);
            }
        }
        sorted
    }
}

/// A driver being served.
#[derive(Debug)]
pub(crate) struct Running {
    // Before the others, which it waits for.
    control: Option<Worker<Parked>>,
    pairs: Vec<Worker<[ActiveQueue; 2]>>,
    /// Those that vhost has, pair by pair.
    in_vhost: Vec<ActiveQueue>,
    idle: Vec<ActiveQueue>,
    mem: Arc<GuestMemMmap>,
}

/// What all workers get.
struct Common {
    mem: GuestMem,
    interrupt: Arc<dyn VirtioInterrupt>,
    state: State,
    link: bool,
}

impl Common {
    fn spawn<T: Send + 'static>(
        &self,
        role: Role,
        name: &str,
        body: impl FnOnce(&EventFd) -> T + Send + 'static,
    ) -> io::Result<Worker<T>> {
        let interrupt = Arc::clone(&self.interrupt);
        Worker::spawn(role, name, move |message| interrupt.needs_reset(message), body)
    }
}

impl Running {
    /// Starts to serve a driver that left the device in `state`.
    pub fn start(parts: &Parts, activation: Activation, state: State) -> Result<Self, ActivateError> {
        let control = control_index(state.features, parts.taps.len() as u16);
        let queues = Queues::sort(activation.queues, control);
        if queues.pairs.is_empty() {
            let receive = queues.idle.iter().any(|queue| queue.index == 0);
            return Err(ActivateError::MissingQueue(receive.into()));
        }
        let mut running = Self {
            control: None,
            pairs: Vec::new(),
            in_vhost: Vec::new(),
            idle: queues.idle,
            mem: activation.mem.memory().into_inner(),
        };
        let common = Common {
            mem: activation.mem,
            interrupt: activation.interrupt,
            link: parts.shared.link(),
            state,
        };
        match running.serve(parts, common, queues.pairs, queues.control) {
            Ok(()) => Ok(running),
            Err(error) => {
                running.stop(parts);
                Err(error.into())
            }
        }
    }

    fn serve(
        &mut self,
        parts: &Parts,
        common: Common,
        pairs: Vec<[ActiveQueue; 2]>,
        control: Option<ActiveQueue>,
    ) -> io::Result<()> {
        parts.taps[0].set_offloads(common.state.offloads)?;
        let (mut calls, mut error) = (Vec::new(), None);
        let datapath = if parts.vhost.is_empty() {
            self.start_workers(parts, &common, pairs)?
        } else {
            let bell = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
            calls = self.start_vhost(parts, &common, pairs, &bell)?;
            error = Some(bell);
            Datapath::Vhost(parts.vhost[..self.in_vhost.len() / 2].to_vec())
        };
        let mut wiring = Wiring::new(parts.taps.clone(), datapath, common.link);
        wiring.apply_pairs(&common.state)?;
        wiring.apply_filter(&common.state);
        let worker = ControlWorker {
            queue: control,
            state: common.state.clone(),
            wiring,
            mem: common.mem.clone(),
            interrupt: Arc::clone(&common.interrupt),
            shared: Arc::clone(&parts.shared),
            calls,
            error,
        };
        self.control = Some(common.spawn(Role::NetControl, &parts.name, |stop| worker.run(stop))?);
        Ok(())
    }

    /// Starts a worker for each pair.
    fn start_workers(
        &mut self,
        parts: &Parts,
        common: &Common,
        pairs: Vec<[ActiveQueue; 2]>,
    ) -> io::Result<Datapath> {
        let has = |bit: u32| common.state.features & 1 << bit != 0;
        let mut lines = Vec::new();
        for (index, [receive, transmit]) in pairs.into_iter().enumerate() {
            let (line, mailbox) = mailbox()?;
            let pair = Pair {
                tap: Arc::clone(&parts.taps[index]),
                receive,
                transmit,
                mem: common.mem.clone(),
                interrupt: Arc::clone(&common.interrupt),
                shared: Arc::clone(&parts.shared),
                features: common.state.features,
                mergeable: has(VIRTIO_NET_F_MRG_RXBUF),
                mtu: parts.mtu.filter(|_| has(VIRTIO_NET_F_MTU)),
                rules: Rules::new(&common.state, index, common.link),
                mailbox,
            };
            let name = format!("{}-{index}", parts.name);
            self.pairs
                .push(common.spawn(Role::Net, &name, |stop| pair.run(stop))?);
            lines.push(line);
        }
        Ok(Datapath::Workers(lines))
    }

    /// Gives each pair to its vhost, which rings `error` when a ring is broken. Returns what is to be passed on.
    fn start_vhost(
        &mut self,
        parts: &Parts,
        common: &Common,
        pairs: Vec<[ActiveQueue; 2]>,
        error: &EventFd,
    ) -> io::Result<Vec<Call>> {
        let mut calls = Vec::new();
        for (vhost, queues) in parts.vhost.iter().zip(&pairs) {
            let mut call = |active: &ActiveQueue| {
                let queue = active.index;
                if let Some(direct) = common.interrupt.queue_event(queue) {
                    return Ok(direct);
                }
                let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
                let ours = event.try_clone()?;
                calls.push(Call { queue, event: ours });
                Ok::<_, io::Error>(event)
            };
            let bells = [call(&queues[0])?, call(&queues[1])?];
            let with_bells = |at: usize| {
                (
                    &queues[at],
                    Bells {
                        call: &bells[at],
                        error,
                    },
                )
            };
            vhost.start(&self.mem, common.state.features, [0, 1].map(with_bells))?;
        }
        self.in_vhost = pairs.into_iter().flatten().collect();
        Ok(calls)
    }

    /// Stops whoever serves. Returns the queues and what the driver set; what a worker had that panicked is lost.
    pub fn stop(self, parts: &Parts) -> (Vec<ActiveQueue>, Option<State>) {
        let (mut queues, mut state) = (self.idle, None);
        match self.control.map(Worker::stop) {
            Some(Ok((queue, left))) => {
                queues.extend(queue);
                state = Some(left);
            }
            Some(Err(error)) => tracing::error!(device = parts.name, %error, "the control queue is lost"),
            None => {}
        }
        for worker in self.pairs {
            match worker.stop() {
                Ok(pair) => queues.extend(pair),
                Err(error) => tracing::error!(device = parts.name, %error, "a queue pair is lost"),
            }
        }
        let mut in_vhost = self.in_vhost;
        for (vhost, pair) in parts.vhost.iter().zip(in_vhost.chunks_exact_mut(2)) {
            let [receive, transmit] = pair else { break };
            if let Err(error) = vhost.stop(&self.mem, [receive, transmit]) {
                tracing::error!(device = parts.name, %error, "vhost does not let go of a queue pair");
            }
        }
        queues.append(&mut in_vhost);
        (queues, state)
    }
}
