//! The active device: its queues by purpose, and the workers or vhost that serve them.

use std::io;
use std::sync::Arc;

use husk_devices::virtio::{ActivateError, Activation, ActiveQueue, VirtioInterrupt};
use husk_devices::worker::Worker;
use husk_devices::{GuestMem, GuestMemMmap};
use husk_seccomp::ThreadRole;
use husk_vhost::{VhostCall, VringNotifiers, call_event};
use virtio_bindings::virtio_net::{VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU};
use vm_memory::GuestAddressSpace;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::config::control_index;
use crate::control_state::{Backend, ControlState, Datapath};
use crate::control_worker::{ControlWorker, StoppedControl};
use crate::handle::Shared;
use crate::pair_worker::{PairRules, PairWorker, pair_mailbox};
use crate::shared_throttle::SharedThrottle;
use crate::tap::{Tap, TapFilter};
use crate::vhost::VhostPair;

/// The parts of a device that outlive a driver.
#[derive(Debug)]
pub(crate) struct NetResources {
    pub name: String,
    pub mtu: Option<u16>,
    pub shared: Arc<Shared>,
    pub throttle: SharedThrottle,
    pub taps: Vec<Arc<Tap>>,
    /// One per tap, or none.
    pub vhost: Vec<Arc<VhostPair>>,
}

impl NetResources {
    /// Resets the taps to the state that a new driver expects: no offloads, no filter, one queue.
    pub fn reset_taps(&self) -> io::Result<()> {
        self.taps[1..].iter().try_for_each(|tap| tap.attach(false))?;
        let changed = self.taps[0].set_filter(TapFilter::default())? | self.taps[0].set_offloads(0)?;
        if changed {
            self.throttle.charge();
        }
        Ok(())
    }
}

/// The queues of a driver by purpose.
#[derive(Debug, Default)]
struct Queues {
    pairs: Vec<[ActiveQueue; 2]>,
    control: Option<ActiveQueue>,
    idle: Vec<ActiveQueue>,
}

impl Queues {
    /// Only complete pairs count.
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

/// An active device.
#[derive(Debug)]
pub(crate) struct ActiveDevice {
    // Dropped before the others, because it waits for them.
    control: Option<Worker<StoppedControl>>,
    pairs: Vec<Worker<[ActiveQueue; 2]>>,
    /// The queues that vhost owns, pair by pair.
    in_vhost: Vec<ActiveQueue>,
    idle: Vec<ActiveQueue>,
    mem: Arc<GuestMemMmap>,
}

/// State that all workers of an activation share.
struct WorkerContext {
    mem: GuestMem,
    interrupt: Arc<dyn VirtioInterrupt>,
    state: ControlState,
    link: bool,
}

impl WorkerContext {
    fn spawn<T: Send + 'static>(
        &self,
        role: ThreadRole,
        name: &str,
        body: impl FnOnce(&EventFd) -> T + Send + 'static,
    ) -> io::Result<Worker<T>> {
        let interrupt = Arc::clone(&self.interrupt);
        Worker::spawn(role, name, move |message| interrupt.needs_reset(message), body)
    }
}

impl ActiveDevice {
    /// Activates the device with the `state` that the driver set.
    pub fn start(
        resources: &NetResources,
        activation: Activation,
        state: ControlState,
    ) -> Result<Self, ActivateError> {
        let control = control_index(state.features, resources.taps.len() as u16);
        let queues = Queues::sort(activation.queues, control);
        let wanted = usize::from(state.pairs);
        if !queues.pairs.is_empty() && queues.pairs.len() < wanted {
            return Err(ActivateError::MissingQueue(2 * queues.pairs.len() as u16));
        }
        if queues.pairs.is_empty() {
            let receive = queues.idle.iter().any(|queue| queue.index == 0);
            return Err(ActivateError::MissingQueue(receive.into()));
        }
        let mut active = Self {
            control: None,
            pairs: Vec::new(),
            in_vhost: Vec::new(),
            idle: queues.idle,
            mem: activation.mem.memory().into_inner(),
        };
        let context = WorkerContext {
            mem: activation.mem,
            interrupt: activation.interrupt,
            link: resources.shared.link(),
            state,
        };
        match active.serve(resources, context, queues.pairs, queues.control) {
            Ok(()) => Ok(active),
            Err(error) => {
                active.stop(resources);
                Err(error.into())
            }
        }
    }

    fn serve(
        &mut self,
        resources: &NetResources,
        context: WorkerContext,
        pairs: Vec<[ActiveQueue; 2]>,
        control: Option<ActiveQueue>,
    ) -> io::Result<()> {
        let mut changed = resources.taps[0].set_offloads(context.state.offloads)?;
        let (mut calls, mut error) = (Vec::new(), None);
        let backend = if resources.vhost.is_empty() {
            self.start_workers(resources, &context, pairs)?
        } else {
            let error_event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
            calls = self.start_vhost(resources, &context, pairs, &error_event)?;
            error = Some(error_event);
            Backend::Vhost(resources.vhost[..self.in_vhost.len() / 2].to_vec())
        };
        let mut datapath = Datapath::new(resources.taps.clone(), backend, context.link);
        datapath.apply_pairs(&context.state)?;
        changed |= datapath.apply_filter(&context.state);
        if changed {
            resources.throttle.charge();
        }
        let worker = ControlWorker {
            queue: control,
            state: context.state.clone(),
            datapath,
            mem: context.mem.clone(),
            interrupt: Arc::clone(&context.interrupt),
            shared: Arc::clone(&resources.shared),
            throttle: resources.throttle.clone(),
            calls,
            error,
        };
        self.control = Some(context.spawn(ThreadRole::NetControl, &resources.name, |stop| worker.run(stop))?);
        Ok(())
    }

    /// Starts a worker for each pair.
    fn start_workers(
        &mut self,
        resources: &NetResources,
        context: &WorkerContext,
        pairs: Vec<[ActiveQueue; 2]>,
    ) -> io::Result<Backend> {
        let has = |bit: u32| context.state.features & 1 << bit != 0;
        let mut mailboxes = Vec::new();
        for (index, [receive, transmit]) in pairs.into_iter().enumerate() {
            let (mailbox, inbox) = pair_mailbox()?;
            let pair = PairWorker {
                tap: Arc::clone(&resources.taps[index]),
                receive,
                transmit,
                mem: context.mem.clone(),
                interrupt: Arc::clone(&context.interrupt),
                shared: Arc::clone(&resources.shared),
                features: context.state.features,
                mergeable: has(VIRTIO_NET_F_MRG_RXBUF),
                mtu: resources.mtu.filter(|_| has(VIRTIO_NET_F_MTU)),
                rules: PairRules::new(&context.state, index, context.link),
                inbox,
            };
            let name = format!("{}-{index}", resources.name);
            self.pairs
                .push(context.spawn(ThreadRole::Net, &name, |stop| pair.run(stop))?);
            mailboxes.push(mailbox);
        }
        Ok(Backend::Workers(mailboxes))
    }

    /// Starts vhost for each pair. vhost signals `error` when a ring is malformed. Returns the interrupts that the
    /// control worker has to forward.
    fn start_vhost(
        &mut self,
        resources: &NetResources,
        context: &WorkerContext,
        pairs: Vec<[ActiveQueue; 2]>,
        error: &EventFd,
    ) -> io::Result<Vec<VhostCall>> {
        let mut calls = Vec::new();
        for (vhost, queues) in resources.vhost.iter().zip(&pairs) {
            let mut call = |active: &ActiveQueue| call_event(&*context.interrupt, active.index, &mut calls);
            let notifiers = [call(&queues[0])?, call(&queues[1])?];
            let with_notifiers = |at: usize| {
                (
                    &queues[at],
                    VringNotifiers {
                        call: &notifiers[at],
                        error,
                    },
                )
            };
            vhost.start(&self.mem, context.state.features, [0, 1].map(with_notifiers))?;
        }
        self.in_vhost = pairs.into_iter().flatten().collect();
        Ok(calls)
    }

    /// Stops the workers and vhost. Returns the queues and the state that the driver set. The queues of a worker that
    /// panicked, and those that vhost does not release, are lost.
    pub fn stop(self, resources: &NetResources) -> (Vec<ActiveQueue>, Option<ControlState>) {
        let (mut queues, mut state) = (self.idle, None);
        match self.control.map(Worker::stop) {
            Some(Ok((queue, left))) => {
                queues.extend(queue);
                state = Some(left);
            }
            Some(Err(error)) => tracing::error!(device = resources.name, %error, "control queue lost"),
            None => {}
        }
        for worker in self.pairs {
            match worker.stop() {
                Ok(pair) => queues.extend(pair),
                Err(error) => tracing::error!(device = resources.name, %error, "queue pair lost"),
            }
        }
        let mut in_vhost = self.in_vhost;
        let mut lost = Vec::new();
        for (vhost, pair) in resources.vhost.iter().zip(in_vhost.chunks_exact_mut(2)) {
            let [receive, transmit] = pair else { break };
            let indices = [receive.index, transmit.index];
            if let Err(error) = vhost.stop(&self.mem, [receive, transmit]) {
                tracing::error!(device = resources.name, %error, "vhost did not release a queue pair");
                lost.extend(indices);
            }
        }
        // Without its position in the rings, a pair cannot go on.
        queues.extend(
            in_vhost
                .into_iter()
                .filter(|active| !lost.contains(&active.index)),
        );
        (queues, state)
    }
}
