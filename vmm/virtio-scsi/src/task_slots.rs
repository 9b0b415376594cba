//! The tasks in flight, by tag. The engine uses the same tag for a task's steps.

use std::sync::Arc;

use husk_devices::GuestMemMmap;
use husk_devices::virtio::chain::Segment;
use husk_devices::virtio::dma::DmaMapping;

use crate::request::{RequestChain, ResponseCode};
use crate::target::Task;

/// A task in flight, or another use of a tag.
#[derive(Debug, Default)]
pub(crate) struct TaskSlot {
    pub kind: SlotUse,
    /// Keeps the memory mapped until the disk is done with it.
    pub mem: Option<Arc<GuestMemMmap>>,
    pub task: Option<Task>,
    /// Index of its unit.
    pub unit_index: u32,
    /// Index of the virtqueue, head of the chain, and the driver's identifier of the request.
    pub queue: u16,
    pub head: u16,
    pub id: u64,
    pub opcode: u8,
    /// Increases from task to task.
    pub order: u64,
    /// No other task of its unit runs beside it.
    pub exclusive: bool,
    /// A passthrough worker has it.
    pub with_worker: bool,
    /// It waits in the task set of its unit.
    pub waiting: bool,
    /// A step fills the data-in buffer.
    pub fills: bool,
    /// Response code for it when its step has ended.
    pub cancelled: Option<ResponseCode>,
    pub chain: RequestChain,
    /// The part of the data-in buffer that the disk is filling.
    dma: Option<DmaMapping<Arc<GuestMemMmap>, Vec<Segment>>>,
    /// An empty list for the next mapping, whose allocation is reused.
    spare: Vec<Segment>,
}

/// Segments whose allocation a slot keeps for its next mapping.
const SPARE_SEGMENTS: usize = 64;

impl TaskSlot {
    /// Keeps `len` bytes of the data-in buffer from `offset` on mapped while the disk fills them.
    pub fn begin_dma(&mut self, offset: u64, len: u64) {
        if let Some(mem) = &self.mem {
            let mut segments = std::mem::take(&mut self.spare);
            segments.extend(self.chain.data_in().part(offset, len));
            self.dma = Some(DmaMapping::writable(Arc::clone(mem), segments));
        }
    }

    /// Marks the bytes dirty that the disk may have filled, also after an error.
    pub fn end_dma(&mut self) {
        if let Some(dma) = self.dma.take() {
            self.spare = dma.finish().1;
            self.spare.clear();
            self.spare.shrink_to(SPARE_SEGMENTS);
        }
    }
}

/// Use of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SlotUse {
    #[default]
    Free,
    /// A driver's request.
    Task,
    /// The last flush of a unit that is being removed.
    Flush,
}

/// The slots of all tags.
#[derive(Debug)]
pub(crate) struct TaskSlots {
    /// As many as the highest tag used so far.
    slots: Vec<TaskSlot>,
    last_order: u64,
    /// The last freed slot is used first: its memory is in the cache.
    free: Vec<u16>,
}

impl TaskSlots {
    pub fn new(depth: u16) -> Self {
        Self {
            slots: Vec::new(),
            last_order: 0,
            free: (0..depth).rev().collect(),
        }
    }

    /// True if a task can start.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Takes a free slot.
    pub fn take(&mut self, kind: SlotUse, unit_index: u32) -> Option<(u16, &mut TaskSlot)> {
        let tag = self.free.pop()?;
        let index = usize::from(tag);
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, TaskSlot::default);
        }
        let slot = &mut self.slots[index];
        self.last_order += 1;
        slot.order = self.last_order;
        (slot.kind, slot.unit_index) = (kind, unit_index);
        Some((tag, slot))
    }

    /// The slot of a tag that was taken before.
    pub fn get(&mut self, tag: u16) -> &mut TaskSlot {
        &mut self.slots[usize::from(tag)]
    }

    /// True if the task of a tag runs beside no other.
    pub fn is_exclusive(&self, tag: u16) -> bool {
        self.slots[usize::from(tag)].exclusive
    }

    /// Frees a slot.
    pub fn free(&mut self, tag: u16) {
        let slot = &mut self.slots[usize::from(tag)];
        slot.kind = SlotUse::Free;
        slot.end_dma();
        (slot.mem, slot.task, slot.cancelled) = (None, None, None);
        (slot.exclusive, slot.waiting, slot.fills) = (false, false, false);
        slot.with_worker = false;
        slot.chain.clear();
        self.free.push(tag);
    }

    /// Slots of the driver's requests.
    pub fn tasks(&mut self) -> impl Iterator<Item = (u16, &mut TaskSlot)> {
        let slots = (0..).zip(&mut self.slots);
        slots.filter(|(_, slot)| slot.kind == SlotUse::Task)
    }
}
