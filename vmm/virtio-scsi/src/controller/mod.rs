//! The state of the controller. The [actor](crate::actor) calls it for one event after the other.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use husk_devices::GuestMemMmap;
use husk_devices::sched_policy::SchedPolicy;
use husk_devices::virtio::ActiveQueue;
use husk_devices::virtio::chain::Segment;
use husk_disk::{Disk, DiskId, Engine, ErrorPolicy, IoBuffer};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::EventFd;

use crate::UnitAddress;
use crate::handle::ControllerMessage;
use crate::lun_table::LunTable;
use crate::pending_events::PendingEvents;
use crate::request::{RequestChain, ResponseCode};
use crate::target::UnitAttention;
use crate::task_slots::TaskSlots;
use crate::unit::Unit;
use crate::virtqueues::{CONTROL, Driver, REQUEST, Virtqueues};

mod backlog;
mod control;
mod event_queue;
mod hotplug;
mod media;
mod passthrough;
mod state;
mod tasks;

pub(crate) use state::ControllerState;

/// Maximum rounds of completions and their consequences before other work is done.
const ROUNDS: usize = 4;

/// Called on the actor's thread with the name of a disk that began to hold requests, and with the error. The requests
/// are retried when the device is quiesced and activated again.
pub type OnIoError = Arc<dyn Fn(&str, io::Error) + Send + Sync>;

/// Text of an error after which the actor cannot continue.
pub(crate) type FatalError = String;

/// Settings that do not change.
#[derive(Clone)]
pub(crate) struct ControllerConfig {
    pub max_target: u8,
    /// Time that the driver has to release a unit.
    pub removal_timeout: Duration,
    pub on_io_error: OnIoError,
}

/// The controller.
pub(crate) struct Controller {
    // Before `slots`, so that it is dropped before the memory that it reads and writes.
    engine: Engine,
    slots: TaskSlots,
    table: LunTable,
    /// Commands in flight at passthrough devices.
    passthrough: passthrough::PassthroughState,
    virtqueues: Virtqueues,
    events: PendingEvents,
    config: ControllerConfig,
    /// Task management functions that wait for tasks to end.
    functions: Vec<control::PendingFunction>,
    /// Indices of units on which a waiting task may run now.
    runnable_units: Vec<u32>,
    /// Disks that hold requests.
    held: Vec<DiskId>,
    /// Indices of units that are being removed.
    removing: Vec<u32>,
    /// Discs that were taken out of their drives.
    ejected: Vec<media::EjectedDisc>,
    /// Addresses of removed units whose removal the driver has not handled yet, and the buffer of the event.
    unacknowledged: HashMap<UnitAddress, Option<GuestAddress>>,
    /// Requests (queue and head) that were held when the device was saved, in the order of their arrival. The next
    /// activation starts them again.
    restored: Vec<(u16, u16)>,
    /// Requests (queue and head) that were taken from their queues and have not begun, in the order of their arrival.
    backlog: VecDeque<(u16, u16)>,
    sched_policy: SchedPolicy,
    // Scratch buffers.
    parsed: RequestChain,
    buffers: Vec<IoBuffer>,
    readable: Vec<Segment>,
    writable: Vec<Segment>,
}

impl Controller {
    /// `wakeup` is signalled when a passthrough device has completed a command.
    pub fn new(engine: Engine, config: ControllerConfig, wakeup: EventFd) -> Self {
        Self {
            slots: TaskSlots::new(engine.depth()),
            engine,
            table: LunTable::default(),
            passthrough: passthrough::PassthroughState::new(wakeup),
            virtqueues: Virtqueues::default(),
            events: PendingEvents::default(),
            config,
            functions: Vec::new(),
            runnable_units: Vec::new(),
            held: Vec::new(),
            removing: Vec::new(),
            ejected: Vec::new(),
            unacknowledged: HashMap::new(),
            restored: Vec::new(),
            backlog: VecDeque::new(),
            sched_policy: SchedPolicy::default(),
            parsed: RequestChain::default(),
            buffers: Vec::new(),
            readable: Vec::new(),
            writable: Vec::new(),
        }
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    pub fn virtqueues(&mut self) -> &mut Virtqueues {
        &mut self.virtqueues
    }

    /// Handles a message. Returns true if the queues changed.
    pub fn handle_message(&mut self, message: ControllerMessage) -> Result<bool, FatalError> {
        // Sending a reply fails only if its receiver is gone.
        match message {
            ControllerMessage::Activate(driver, ack) => {
                self.activate(*driver);
                let _ = ack.send(());
                return Ok(true);
            }
            ControllerMessage::Quiesce(ack) => {
                let _ = ack.send(self.quiesce()?);
                return Ok(true);
            }
            ControllerMessage::Reset(ack) => {
                self.reset()?;
                let _ = ack.send(());
                return Ok(true);
            }
            ControllerMessage::Save(ack) => drop(ack.send(self.save())),
            ControllerMessage::Restore(state, features, ack) => {
                let _ = ack.send(self.restore(*state, features)?);
            }
            ControllerMessage::Add(unit, reply) => drop(reply.send(self.add(*unit))),
            ControllerMessage::AddAtFreeLun(unit, reply) => drop(reply.send(self.add_at_free_lun(*unit))),
            ControllerMessage::Remove(id, reply) => self.remove(&id, reply),
            ControllerMessage::Find(id, reply) => drop(reply.send(self.find(&id))),
            ControllerMessage::Resized(id, reply) => drop(reply.send(self.resized(&id))),
            ControllerMessage::Insert(id, disc, reply) => drop(reply.send(self.insert(&id, &disc))),
            ControllerMessage::Eject(id, force, reply) => self.eject(&id, force, reply),
            ControllerMessage::List(reply) => drop(reply.send(Ok(self.list()))),
        }
        Ok(false)
    }

    /// A driver activated the device, or continues after a pause.
    fn activate(&mut self, driver: Driver) {
        self.events.begin(driver.features);
        self.virtqueues = Virtqueues::new(driver);
        self.restart_removal_deadlines();
        self.engine.resume_zeroing();
        for disk in std::mem::take(&mut self.held) {
            let leaves = |(_, unit): (u32, &Unit)| unit.disk == Some(disk) && unit.removal.is_some();
            let ejected = self.ejected.iter().any(|ejected| ejected.disc == disk);
            if ejected || self.table.iter().any(leaves) {
                // The owner that removes a disk is not notified of its errors again.
                let _ = self.engine.set_error_policy(disk, ErrorPolicy::Report);
            }
            self.engine.retry_held(disk);
        }
        if let Err(reason) = self.start_restored() {
            self.virtqueues.fail(&reason);
        }
    }

    /// Completes the tasks that run, except those that disks hold after an I/O error and those that write zeroes
    /// without `fallocate`, and returns the queues.
    fn quiesce(&mut self) -> Result<Vec<ActiveQueue>, FatalError> {
        self.engine.suspend_zeroing();
        self.drain()?;
        self.virtqueues.signal();
        let queues = self.virtqueues.take();
        self.virtqueues = Virtqueues::default();
        Ok(queues)
    }

    fn drain(&mut self) -> Result<(), FatalError> {
        loop {
            while self.reap()? {}
            self.kick()?;
            if self.engine.is_busy() {
                self.engine.wait();
            } else if self.passthrough.under_way > 0 {
                self.wait_for_passthrough();
            } else {
                return Ok(());
            }
        }
    }

    /// Drops the driver and its requests, after those that run have ended. The units are as after power on.
    fn reset(&mut self) -> Result<(), FatalError> {
        self.virtqueues = Virtqueues::default();
        self.events.end();
        self.functions.clear();
        self.unacknowledged.clear();
        self.held.clear();
        self.restored.clear();
        self.backlog.clear();
        let unit_indices: Vec<_> = self.table.iter().map(|(unit_index, _)| unit_index).collect();
        self.cancel(&unit_indices, None, ResponseCode::Reset);
        let busy = |disk: &DiskId| self.engine.in_flight(*disk) > 0;
        let disks = self.table.iter().filter_map(|(_, unit)| unit.disk);
        let ejected = self.ejected.iter().map(|ejected| ejected.disc);
        let busy: Vec<_> = disks.chain(ejected).filter(busy).collect();
        for disk in &busy {
            self.fail_requests(*disk);
        }
        self.drain()?;
        debug_assert!(self.slots.tasks().next().is_none(), "none outlives its driver");
        self.engine.resume_zeroing();
        // Units that the driver was to release, before there is another driver, which knows nothing of them.
        self.poll_removals();
        for (_, unit) in self.table.iter_mut() {
            unit.logical.reset(UnitAttention::PowerOn);
            unit.media_events = false;
            if let Some(disk) = unit.disk.filter(|disk| busy.contains(disk))
                && unit.removal.is_none()
            {
                let policy = self.engine.disk(disk).map(Disk::error_policy);
                let policy = policy.unwrap_or_default();
                let restored = self.engine.set_error_policy(disk, policy);
                restored.map_err(|error| format!("disk {}: {error}", unit.id))?;
            }
        }
        Ok(())
    }

    /// Makes a disk complete all its requests, with errors if need be.
    fn fail_requests(&mut self, disk: DiskId) {
        // Fails only for a disk that is not attached, which has no requests.
        let _ = self.engine.set_error_policy(disk, ErrorPolicy::Report);
        self.fail_held(disk);
    }

    /// Fails the requests of a disk that are held (error policy `stop`). The next request to be held notifies the owner
    /// again.
    fn fail_held(&mut self, disk: DiskId) {
        self.engine.fail_held(disk);
        self.engine.retry_held(disk);
        self.held.retain(|held| *held != disk);
    }

    /// True if a driver exists whose queues were taken back.
    fn is_paused(&self) -> bool {
        self.events.driver() && self.virtqueues.queues.is_empty()
    }

    /// Does all work that needs no waiting, with one interrupt for each queue. Returns true if there is more. Takes at
    /// most one queue's worth of requests from each queue, so that no guest can keep the actor from stopping.
    pub fn pass(&mut self) -> Result<bool, FatalError> {
        let mut more = self.reap()?;
        if let Some(mem) = self.virtqueues.memory() {
            match self.serve_queues(&mem) {
                Ok(found) => self.sched_policy.record_pass(found),
                Err(reason) => self.virtqueues.fail(&reason),
            }
        }
        self.kick()?;
        more |= self.reap()?;
        self.poll_removals();
        self.kick()?;
        if !self.removing.is_empty() {
            // The last flush of an image in memory has ended already, and no event says so.
            more |= self.reap()?;
        }
        self.deliver();
        self.virtqueues.signal();
        Ok(more || self.has_requests())
    }

    /// True if a queue may hold what can be served now. Without a free tag, a completion triggers another pass.
    fn has_requests(&mut self) -> bool {
        let functions = self.virtqueues.queue(CONTROL).is_some_and(|vq| vq.ready);
        let requests = !self.backlog.is_empty() || self.virtqueues.queues.iter().any(|vq| vq.ready);
        self.virtqueues.are_served() && (functions || requests && self.slots.has_room())
    }

    fn kick(&mut self) -> Result<(), FatalError> {
        self.engine.kick().map_err(|error| format!("disks: {error}"))
    }

    /// Continues tasks whose steps have ended, including those that end at once. Returns true if there may be more.
    fn reap(&mut self) -> Result<bool, FatalError> {
        let mut more = true;
        for _ in 0..ROUNDS {
            let mut any = false;
            while let Some(completion) = self.engine.complete() {
                any = true;
                self.completed(completion);
            }
            any |= self.take_passthrough_results();
            any |= self.start_waiting_tasks();
            if !any {
                more = false;
                break;
            }
            self.kick()?;
        }
        self.virtqueues.publish();
        while let Some(stopped) = self.engine.take_stopped() {
            let unit = self
                .table
                .iter()
                .find(|(_, unit)| unit.disk == Some(stopped.disk));
            let id = unit.map_or("", |(_, unit)| &unit.id);
            tracing::warn!(disk = id, error = %stopped.error, "disk request failed and is held");
            self.held.push(stopped.disk);
            (self.config.on_io_error)(id, stopped.error);
        }
        Ok(more)
    }

    /// Serves the request queues, then the functions that were there before: a function applies to each request that
    /// the driver made available before it. Returns the number of requests.
    fn serve_queues(&mut self, mem: &Arc<GuestMemMmap>) -> Result<usize, FatalError> {
        let functions = self.available_functions(mem)?;
        if functions > 0 {
            // There may be requests whose notification has not arrived.
            let queues = self.virtqueues.queues.iter_mut();
            let requests = queues.filter(|vq| vq.active.index >= REQUEST);
            requests.for_each(|vq| vq.ready = true);
        }
        let found = self.serve_requests(mem)?;
        if functions > 0 {
            self.fill_backlog(mem)?;
        }
        self.serve_control(mem, functions)?;
        Ok(found)
    }

    /// Takes requests from the backlog and from all queues. Returns their number.
    fn serve_requests(&mut self, mem: &Arc<GuestMemMmap>) -> Result<usize, FatalError> {
        let mut found = self.serve_backlog(mem)?;
        let turn = found;
        let count = self.virtqueues.queues.len();
        let first = self.virtqueues.first.min(count);
        for at in (first..count).chain(0..first) {
            let vq = &self.virtqueues.queues[at];
            if vq.active.index < REQUEST || !vq.ready {
                continue;
            }
            let (before, room) = (found, self.slots.has_room());
            self.virtqueues.queues[at].ready = self.serve(at, mem, &mut found)?;
            if room && !self.slots.has_room() {
                // A queue that took all slots is the last one of the next pass.
                self.virtqueues.first = at + usize::from(before == turn);
            }
        }
        Ok(found)
    }

    /// Takes requests from one queue and adds their number to `found`. Returns true if there are more.
    fn serve(&mut self, at: usize, mem: &Arc<GuestMemMmap>, found: &mut usize) -> Result<bool, FatalError> {
        let active = &mut self.virtqueues.queues[at].active;
        let (index, size) = (active.index, active.queue.size());
        let broken = |error: &dyn std::fmt::Display| format!("queue {index}: {error}");
        active
            .queue
            .disable_notification(&**mem)
            .map_err(|e| broken(&e))?;
        let sizes = self.virtqueues.sizes.ok_or("no driver")?;
        for _ in 0..size {
            if !self.slots.has_room() {
                return Ok(true);
            }
            let queue = &mut self.virtqueues.queues[at].active.queue;
            let Some(chain) = queue.iter(&**mem).map_err(|e| broken(&e))?.next() else {
                return queue.enable_notification(&**mem).map_err(|e| broken(&e));
            };
            let head = chain.head_index();
            let parsed = self.parsed.parse(mem, queue, head, sizes);
            parsed.map_err(|e| broken(&e))?;
            let begun = self.command((index, head), mem);
            begun.map_err(|e| broken(&e))?;
            *found += 1;
        }
        Ok(true)
    }
}
