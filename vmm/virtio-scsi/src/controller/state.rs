//! Saves and restores the controller, while no driver has queues.

use std::collections::{HashMap, HashSet, VecDeque};

use husk_devices::component::{RestoreError, SaveError, check};
use husk_disk::Disk;
use serde::{Deserialize, Serialize};
use vm_memory::GuestAddress;

use super::{Controller, FatalError};
use crate::pending_events::{PendingEvents, UnitEvent};
use crate::target::{Lun, SavedUnit};
use crate::unit::Unit;
use crate::virtqueues::REQUEST;
use crate::{MAX_REQUEST_QUEUES, QUEUE_SIZE, UnitAddress};

/// COMPARE AND WRITE, the only command that does not do the same when it is carried out again.
const COMPARE_AND_WRITE: u8 = 0x89;

/// All that the controller holds beside the queues.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ControllerState {
    /// There is a driver.
    driver: bool,
    units: Vec<UnitState>,
    /// Events that the driver has not got, in order.
    events: Vec<EventsState>,
    /// Events were lost, and the driver does not know.
    events_missed: bool,
    /// Addresses of removed units whose removal the driver has not handled.
    unacknowledged: Vec<RemovedState>,
    /// Requests that are held after an I/O error, or suspended while they write zeroes, and those that wait for them,
    /// in the order of their arrival. The device has taken them from the available ring. A request is carried out again
    /// from its start.
    requests: Vec<RequestState>,
    /// Requests that the device has taken from the available ring too, and has not begun, in the same order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    backlog: Vec<RequestState>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UnitState {
    /// The disk's name.
    id: String,
    target: u8,
    lun: u16,
    /// The driver subscribed to media change events.
    media_events: bool,
    logical: SavedUnit,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct EventsState {
    target: u8,
    lun: u16,
    /// Bits: removed, added, capacity changed, media changed.
    events: u8,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RemovedState {
    target: u8,
    lun: u16,
    /// Guest-physical address of the buffer of the event, if it was delivered.
    buffer: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestState {
    /// Index of the virtqueue.
    queue: u16,
    /// First descriptor of the chain.
    head: u16,
}

impl RequestState {
    fn of((queue, head): (u16, u16)) -> Self {
        Self { queue, head }
    }
}

fn address(target: u8, lun: u16, field: &'static str) -> Result<UnitAddress, RestoreError> {
    let lun = Lun::new(lun).ok_or_else(|| RestoreError::field(field, "has a LUN above 16383"))?;
    Ok(UnitAddress { target, lun })
}

fn parse_requests(states: &[RequestState], field: &'static str) -> Result<Vec<(u16, u16)>, RestoreError> {
    let queues = REQUEST..REQUEST + MAX_REQUEST_QUEUES;
    let exists = |state: &RequestState| queues.contains(&state.queue) && state.head < QUEUE_SIZE;
    let exist = states.iter().all(exists);
    check(exist, field, "has a chain that does not exist")?;
    Ok(states.iter().map(|state| (state.queue, state.head)).collect())
}

fn refuse(reason: String) -> SaveError {
    SaveError::Refused(reason)
}

/// The first request that is in the list before.
fn twice(mut requests: impl Iterator<Item = (u16, u16)>) -> Option<(u16, u16)> {
    let mut seen = HashSet::new();
    requests.find(|request| !seen.insert(*request))
}

/// A state whose fields were checked by themselves and against the controller.
struct CheckedState {
    events: Vec<(UnitAddress, u8)>,
    unacknowledged: HashMap<UnitAddress, Option<GuestAddress>>,
    requests: Vec<(u16, u16)>,
    backlog: VecDeque<(u16, u16)>,
}

impl Controller {
    pub fn save(&mut self) -> Result<ControllerState, SaveError> {
        if !self.virtqueues.queues.is_empty() {
            return Err(SaveError::Running);
        }
        let units = self.table.iter().map(|(_, unit)| self.save_unit(unit));
        let units = units.collect::<Result<_, _>>()?;
        if !self.ejected.is_empty() {
            return Err(refuse("a disc is being ejected".into()));
        }
        if !self.functions.is_empty() {
            let reason = "a task management function waits for a request that is held after an I/O error";
            return Err(refuse(reason.into()));
        }
        let requests = self.save_requests()?;
        let (events, events_missed) = self.events.save();
        let events = events.into_iter().map(|(address, events)| EventsState {
            target: address.target,
            lun: address.lun.number(),
            events,
        });
        let removed = self.unacknowledged.iter().map(|(address, buffer)| RemovedState {
            target: address.target,
            lun: address.lun.number(),
            buffer: buffer.map(|address| address.0),
        });
        let mut unacknowledged: Vec<_> = removed.collect();
        unacknowledged.sort_by_key(|removed| (removed.target, removed.lun));
        Ok(ControllerState {
            driver: self.events.driver(),
            units,
            events: events.collect(),
            events_missed,
            unacknowledged,
            requests,
            backlog: self.backlog.iter().copied().map(RequestState::of).collect(),
        })
    }

    fn save_unit(&self, unit: &Unit) -> Result<UnitState, SaveError> {
        let id = &unit.id;
        if unit.removal.is_some() {
            return Err(refuse(format!("disk {id:?} is being removed")));
        }
        let disk = unit.disk.and_then(|disk| self.engine.disk(disk));
        if disk.is_some_and(Disk::lost_writes) {
            let reason = format!("a flush of disk {id:?} failed, and earlier writes may be lost");
            return Err(refuse(reason));
        }
        let logical = SavedUnit::of(&unit.logical)
            .ok_or_else(|| refuse(format!("disk {id:?} is a device of the host (LUN passthrough)")))?;
        Ok(UnitState {
            id: id.clone(),
            target: unit.address.target,
            lun: unit.address.lun.number(),
            media_events: unit.media_events,
            logical,
        })
    }

    fn save_requests(&mut self) -> Result<Vec<RequestState>, SaveError> {
        let mut held = Vec::new();
        for (_, slot) in self.slots.tasks() {
            if slot.opcode == COMPARE_AND_WRITE && !slot.waiting {
                let id = self.table.unit(slot.unit_index).map_or("", |unit| &unit.id);
                let reason = format!("a COMPARE AND WRITE of disk {id:?} is held after an I/O error");
                return Err(refuse(reason));
            }
            held.push((slot.order, slot.queue, slot.head));
        }
        held.sort_unstable();
        let held = held.into_iter().map(|(_, queue, head)| (queue, head));
        let requests: Vec<_> = self.restored.iter().copied().chain(held).collect();
        // Such a state is refused later, when the VM is gone.
        let all = requests.iter().chain(&self.backlog);
        if let Some((queue, _)) = twice(all.copied()) {
            return Err(refuse(format!(
                "queue {queue}: the driver made a chain available twice"
            )));
        }
        Ok(requests.into_iter().map(RequestState::of).collect())
    }

    /// The outer error ends the controller.
    pub fn restore(
        &mut self,
        state: ControllerState,
        features: u64,
    ) -> Result<Result<(), RestoreError>, FatalError> {
        let checked = match self.check(&state) {
            Ok(checked) => checked,
            Err(error) => return Ok(Err(error)),
        };
        self.reset()?;
        if state.driver {
            self.events.begin(features);
        }
        self.events.restore(checked.events, state.events_missed);
        self.unacknowledged = checked.unacknowledged;
        (self.restored, self.backlog) = (checked.requests, checked.backlog);
        for saved in state.units {
            let unit = self.table.by_id(&saved.id);
            if let Some(unit) = unit.and_then(|unit_index| self.table.unit_mut(unit_index)) {
                unit.media_events = saved.media_events;
                if saved.logical.apply(&mut unit.logical) {
                    self.events.post(unit.address, UnitEvent::CapacityChanged);
                }
            }
        }
        Ok(Ok(()))
    }

    fn check(&self, state: &ControllerState) -> Result<CheckedState, RestoreError> {
        if !self.virtqueues.queues.is_empty() {
            return Err(RestoreError::Running);
        }
        let mut ids = HashSet::new();
        for saved in &state.units {
            self.check_unit(saved)?;
            check(ids.insert(&saved.id), "device.units", "has a disk twice")?;
        }
        let missing = self.table.iter().find(|(_, unit)| !ids.contains(&unit.id));
        if let Some((_, unit)) = missing {
            let reason = format!("has no disk {:?}, which the machine has", unit.id);
            return Err(RestoreError::field("device.units", reason));
        }
        let mut events = Vec::new();
        for saved in &state.events {
            let address = address(saved.target, saved.lun, "device.events")?;
            events.push((address, saved.events));
        }
        let possible = PendingEvents::are_possible(&events) && (state.driver || events.is_empty());
        check(possible, "device.events", "cannot be pending")?;
        let mut unacknowledged = HashMap::new();
        for saved in &state.unacknowledged {
            let address = address(saved.target, saved.lun, "device.unacknowledged")?;
            unacknowledged.insert(address, saved.buffer.map(GuestAddress));
        }
        let requests = parse_requests(&state.requests, "device.requests")?;
        let backlog = VecDeque::from(parse_requests(&state.backlog, "device.backlog")?);
        let all = requests.iter().chain(&backlog).copied();
        check(twice(all).is_none(), "device.requests", "has a chain twice")?;
        let fit = requests.len() <= usize::from(self.engine.depth()) && (state.driver || requests.is_empty());
        check(fit, "device.requests", "cannot be in flight")?;
        let possible = state.driver || backlog.is_empty();
        check(possible, "device.backlog", "belongs to no driver")?;
        Ok(CheckedState {
            events,
            unacknowledged,
            requests,
            backlog,
        })
    }

    fn check_unit(&self, saved: &UnitState) -> Result<(), RestoreError> {
        let refuse = |what: &str| {
            let reason = format!("disk {:?}: {what}", saved.id);
            RestoreError::field("device.units", reason)
        };
        let unit = self.table.by_id(&saved.id);
        let unit = unit.and_then(|unit_index| self.table.unit(unit_index));
        let unit = unit.ok_or_else(|| refuse("the machine has no such disk"))?;
        if unit.removal.is_some() {
            return Err(refuse("it is being removed"));
        }
        let address = address(saved.target, saved.lun, "device.units")?;
        if address != unit.address {
            return Err(refuse("it has another address"));
        }
        let checked = saved.logical.check(&unit.logical);
        checked.map_err(|mismatch| refuse(&format!("it has another {mismatch}, or cannot have it")))
    }

    /// Starts the requests that were held when the device was saved. They began before the unit attentions that are
    /// pending now, and so do not report them.
    pub(super) fn start_restored(&mut self) -> Result<(), FatalError> {
        let requests = std::mem::take(&mut self.restored);
        let Some(mem) = self.virtqueues.memory() else {
            return Ok(());
        };
        if requests.is_empty() {
            return Ok(());
        }
        let units = self.table.iter_mut();
        let attentions: Vec<_> = units
            .map(|(unit_index, unit)| (unit_index, unit.logical.take_unit_attentions()))
            .collect();
        let mut outcome = Ok(());
        for from in requests {
            outcome = self.start_again(from, &mem);
            if outcome.is_err() {
                break;
            }
        }
        for (unit_index, earlier) in attentions {
            if let Some(unit) = self.table.unit_mut(unit_index) {
                unit.logical.give_unit_attentions(earlier);
            }
        }
        outcome
    }
}
