//! The control queue: task management and asynchronous notification (virtio 1.2, section 5.6.6.2).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use husk_devices::GuestMemMmap;
use husk_devices::virtio::chain::{self, Segment};
use virtio_bindings::virtio_scsi::{
    VIRTIO_SCSI_T_AN_QUERY, VIRTIO_SCSI_T_AN_SUBSCRIBE, VIRTIO_SCSI_T_TMF, VIRTIO_SCSI_T_TMF_ABORT_TASK,
    VIRTIO_SCSI_T_TMF_ABORT_TASK_SET, VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET, VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET,
    VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET, VIRTIO_SCSI_T_TMF_QUERY_TASK, VIRTIO_SCSI_T_TMF_QUERY_TASK_SET,
};
use virtio_queue::{QueueOwnedT, QueueT};

use super::{Controller, FatalError};
use crate::UnitAddress;
use crate::address::LunField;
use crate::memory;
use crate::pending_events::MEDIA_CHANGE;
use crate::request::ResponseCode;
use crate::target::{DeviceKind, UnitAttention};
use crate::virtqueues::CONTROL;

/// Device-readable bytes of a task management request and of an asynchronous notification request.
const TMF_LEN: usize = 24;
const AN_LEN: usize = 16;

/// Device-writable bytes of an asynchronous notification request: event_actual and response.
const AN_ANSWER: usize = 5;

/// A task management function that waits for its tasks to end. Until then the disks use memory of the driver.
#[derive(Debug)]
pub(super) struct PendingFunction {
    mem: Arc<GuestMemMmap>,
    head: u16,
    response: Vec<Segment>,
    tags: Vec<u16>,
}

/// A task management request.
#[derive(Clone, Copy, Debug)]
struct TaskManagement {
    kind: u32,
    lun: [u8; 8],
    /// Identifier of the task.
    id: u64,
}

impl Controller {
    /// Number of functions that are in the control queue now.
    pub(super) fn available_functions(&mut self, mem: &GuestMemMmap) -> Result<u16, FatalError> {
        let Some(vq) = self.virtqueues.queue(CONTROL).filter(|vq| vq.ready) else {
            return Ok(0);
        };
        let queue = &vq.active.queue;
        let end = queue.avail_idx(mem, Ordering::Acquire).map_err(|e| broken(&e))?;
        Ok(end.0.wrapping_sub(queue.next_avail()))
    }

    /// Executes at most `count` functions, in a queue that had as many before the request queues were served.
    pub(super) fn serve_control(&mut self, mem: &Arc<GuestMemMmap>, count: u16) -> Result<(), FatalError> {
        // Each of them searches the backlog, whose requests are parsed for that.
        let count = if self.backlog.is_empty() {
            count
        } else {
            count.min(1)
        };
        for _ in 0..count {
            let Some(vq) = self.virtqueues.queue(CONTROL) else {
                return Ok(());
            };
            let queue = &mut vq.active.queue;
            let Some(chain) = queue.iter(&**mem).map_err(|e| broken(&e))?.next() else {
                break;
            };
            let head = chain.head_index();
            chain::segments(queue, head, mem, &mut self.readable, &mut self.writable)
                .map_err(|e| broken(&e))?;
            self.control(head, mem).map_err(|e| broken(&e))?;
        }
        if let Some(vq) = self.virtqueues.queue(CONTROL).filter(|vq| vq.ready) {
            let more = vq.active.queue.enable_notification(&**mem);
            vq.ready = more.map_err(|e| broken(&e))?;
        }
        Ok(())
    }

    fn control(&mut self, head: u16, mem: &Arc<GuestMemMmap>) -> Result<(), FatalError> {
        let mut bytes = [0; TMF_LEN];
        let readable = std::mem::take(&mut self.readable);
        let len = memory::len(&readable).min(TMF_LEN as u64) as usize;
        memory::read(mem, &readable, 0, &mut bytes[..len]).map_err(|e| e.to_string())?;
        self.readable = readable;
        let kind = u32::from_le_bytes(std::array::from_fn(|i| bytes[i]));
        match kind {
            VIRTIO_SCSI_T_TMF if len >= TMF_LEN => {
                let function = TaskManagement {
                    kind: u32::from_le_bytes(std::array::from_fn(|i| bytes[4 + i])),
                    lun: std::array::from_fn(|i| bytes[8 + i]),
                    id: u64::from_le_bytes(std::array::from_fn(|i| bytes[16 + i])),
                };
                let (code, tags) = self.task_management(function, mem)?;
                if tags.is_empty() {
                    return self.answer_function(mem, head, &[code as u8]);
                }
                let size = self
                    .virtqueues
                    .queue(CONTROL)
                    .map_or(0, |vq| vq.active.queue.size());
                if self.functions.len() >= size.into() {
                    return Err("more functions than entries of the queue".into());
                }
                // The function ends tasks, and always succeeds.
                self.functions.push(PendingFunction {
                    mem: Arc::clone(mem),
                    head,
                    response: std::mem::take(&mut self.writable),
                    tags,
                });
                Ok(())
            }
            VIRTIO_SCSI_T_AN_QUERY | VIRTIO_SCSI_T_AN_SUBSCRIBE if len >= AN_LEN => {
                let lun = std::array::from_fn(|i| bytes[4 + i]);
                let wanted = u32::from_le_bytes(std::array::from_fn(|i| bytes[12 + i]));
                let (actual, code) = self.async_notification(lun, wanted, kind == VIRTIO_SCSI_T_AN_SUBSCRIBE);
                let mut answer = [0; AN_ANSWER];
                answer[..4].copy_from_slice(&actual.to_le_bytes());
                answer[4] = code as u8;
                self.answer_function(mem, head, &answer)
            }
            VIRTIO_SCSI_T_TMF => self.answer_function(mem, head, &[ResponseCode::Failure as u8]),
            VIRTIO_SCSI_T_AN_QUERY | VIRTIO_SCSI_T_AN_SUBSCRIBE => {
                self.answer_function(mem, head, &[0, 0, 0, 0, ResponseCode::Failure as u8])
            }
            // For an unknown request it is unknown where the response is.
            _ => {
                self.virtqueues.used(CONTROL, mem, head, 0);
                Ok(())
            }
        }
    }

    fn answer_function(&mut self, mem: &GuestMemMmap, head: u16, answer: &[u8]) -> Result<(), FatalError> {
        match memory::write(mem, &self.writable, 0, answer) {
            Ok(len) if len == answer.len() => {
                self.virtqueues.used(CONTROL, mem, head, len as u32);
                Ok(())
            }
            Ok(_) => Err("a request without room for its response".into()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Executes a task management function (SAM-5, section 7). It has succeeded when the returned tasks have ended.
    fn task_management(
        &mut self,
        function: TaskManagement,
        mem: &GuestMemMmap,
    ) -> Result<(ResponseCode, Vec<u16>), FatalError> {
        let unit_indices = match self.units_of(function) {
            Ok(unit_indices) => unit_indices,
            Err(code) => return Ok((code, Vec::new())),
        };
        let tags = match function.kind {
            VIRTIO_SCSI_T_TMF_QUERY_TASK | VIRTIO_SCSI_T_TMF_QUERY_TASK_SET => {
                let id = (function.kind == VIRTIO_SCSI_T_TMF_QUERY_TASK).then_some(function.id);
                let begun = self.slots.tasks().any(|(_, slot)| {
                    unit_indices.contains(&slot.unit_index) && id.is_none_or(|id| id == slot.id)
                });
                let code = if begun || self.backlog_has(&unit_indices, id, mem)? {
                    ResponseCode::FunctionSucceeded
                } else {
                    ResponseCode::Ok
                };
                return Ok((code, Vec::new()));
            }
            // A task that its disk holds after an I/O error ends when the fault was fixed.
            VIRTIO_SCSI_T_TMF_ABORT_TASK => {
                let (id, code) = (Some(function.id), ResponseCode::Aborted);
                self.cancel_backlog(&unit_indices, id, code, mem)?;
                self.cancel(&unit_indices, id, code)
            }
            // All tasks of a unit belong to the only initiator.
            VIRTIO_SCSI_T_TMF_ABORT_TASK_SET | VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET => {
                self.cancel_all(&unit_indices, ResponseCode::Aborted, mem)?
            }
            _ => {
                let attention = if function.kind == VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET {
                    UnitAttention::UnitReset
                } else {
                    UnitAttention::NexusLoss
                };
                let tags = self.cancel_all(&unit_indices, ResponseCode::Reset, mem)?;
                for unit_index in unit_indices {
                    if let Some(unit) = self.table.unit_mut(unit_index) {
                        unit.logical.reset(attention);
                    }
                }
                tags
            }
        };
        Ok((ResponseCode::Ok, tags))
    }

    fn cancel_all(
        &mut self,
        unit_indices: &[u32],
        code: ResponseCode,
        mem: &GuestMemMmap,
    ) -> Result<Vec<u16>, FatalError> {
        self.cancel_backlog(unit_indices, None, code, mem)?;
        let tags = self.cancel(unit_indices, None, code);
        for unit_index in unit_indices {
            if let Some(disk) = self.table.unit(*unit_index).and_then(|unit| unit.disk) {
                self.fail_held(disk);
            }
        }
        Ok(tags)
    }

    /// The units that a function applies to. This includes units without an address, as they may have tasks.
    fn units_of(&self, function: TaskManagement) -> Result<Vec<u32>, ResponseCode> {
        let whole = match function.kind {
            VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET => true,
            VIRTIO_SCSI_T_TMF_ABORT_TASK
            | VIRTIO_SCSI_T_TMF_ABORT_TASK_SET
            | VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET
            | VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET
            | VIRTIO_SCSI_T_TMF_QUERY_TASK
            | VIRTIO_SCSI_T_TMF_QUERY_TASK_SET => false,
            // CLEAR ACA: there is no auto contingent allegiance.
            _ => return Err(ResponseCode::FunctionRejected),
        };
        let (target, address) = match LunField::parse(function.lun) {
            LunField::Unit(address) => (address.target, Some(address)),
            LunField::Target(target) => (target, None),
            LunField::Nowhere => return Err(ResponseCode::BadTarget),
        };
        let wanted = |at: UnitAddress| at.target == target && (whole || Some(at) == address);
        let all = self.table.iter().filter(|(_, unit)| wanted(unit.address));
        let unit_indices: Vec<_> = all.map(|(unit_index, _)| unit_index).collect();
        match (unit_indices.is_empty(), self.table.luns(target)) {
            (false, _) => Ok(unit_indices),
            (true, Some(_)) => Err(ResponseCode::IncorrectLun),
            (true, None) => Err(ResponseCode::BadTarget),
        }
    }

    /// Answers the functions that waited for this cancelled task, which has been answered.
    pub(super) fn task_ended(&mut self, tag: u16) {
        let mut at = 0;
        while let Some(function) = self.functions.get_mut(at) {
            function.tags.retain(|other| *other != tag);
            if !function.tags.is_empty() {
                at += 1;
                continue;
            }
            let function = self.functions.swap_remove(at);
            self.writable = function.response;
            if let Err(reason) = self.answer_function(&function.mem, function.head, &[ResponseCode::Ok as u8])
            {
                self.virtqueues.fail(&format!("control queue: {reason}"));
            }
        }
    }

    /// The events among `wanted` that a unit supports. With `subscribe`, the driver gets them from now on.
    fn async_notification(&mut self, lun: [u8; 8], wanted: u32, subscribe: bool) -> (u32, ResponseCode) {
        let addressed = LunField::parse(lun);
        let (target, unit_index) = match addressed {
            LunField::Unit(address) => (address.target, self.table.find(address)),
            LunField::Target(target) => (target, None),
            LunField::Nowhere => return (0, ResponseCode::BadTarget),
        };
        let Some(unit) = unit_index.and_then(|unit_index| self.table.unit_mut(unit_index)) else {
            let there = self.table.luns(target).is_some();
            return (
                0,
                if there {
                    ResponseCode::IncorrectLun
                } else {
                    ResponseCode::BadTarget
                },
            );
        };
        let can = match unit.logical.kind() {
            DeviceKind::CdRom => MEDIA_CHANGE,
            DeviceKind::Disk | DeviceKind::Passthrough => 0,
        };
        if subscribe {
            unit.media_events = wanted & can != 0;
        }
        (wanted & can, ResponseCode::Ok)
    }
}

fn broken(error: &dyn std::fmt::Display) -> FatalError {
    format!("control queue: {error}")
}
