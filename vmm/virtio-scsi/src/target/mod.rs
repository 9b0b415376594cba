//! SCSI logical units: from a CDB to data and sense, by SPC-4, SBC-3 and MMC-6. Knows no virtio, no files, no threads.
//!
//! A [`LogicalUnit`] is one LUN's state. A command becomes a [`Task`] by [`LogicalUnit::begin`], and its owner then
//! drives it:
//!
//! 1. [`Task::next`] tells one [`Step`]: some I/O on the medium, bytes of the initiator to be fetched, or the end.
//! 2. The owner carries the step out, alone or beside those of other tasks, and tells [`Task::settle`] how it went
//!    ([`Task::settle_extent`] for [`Step::Extent`]); then again from 1, until [`Step::Done`].
//!
//! What the owner keeps to:
//! - One step of a task at a time. Bytes of plain reads and writes go straight between the medium and the initiator's
//!   buffers ([`DataLocation::Initiator`]); a few commands have a bounded buffer of their own ([`DataLocation::Scratch`],
//!   [`Task::scratch`]), which stays where it is in memory while a step is under way, even if the task is moved.
//! - A task that has an [`exclusive`](Task::exclusive) range runs beside no other that writes there.
//! - Task attributes, task management and the order of commands are the owner's. A task may be dropped between steps;
//!   then nothing more of it happens.
//! - The owner says what happens to the unit from outside: [`LogicalUnit::reset`], [`LogicalUnit::resize`],
//!   [`LogicalUnit::luns_changed`], [`LogicalUnit::insert`], [`LogicalUnit::eject`].
//!
//! A device of the host ([`LogicalUnit::passthrough`]) has steps of its own, [`Step::Passthrough`], settled by
//! [`Task::settle_passthrough`]: its owner has a [`PassthroughDevice`] carry them out, where waiting for one does no harm.
//!
//! A command to a LUN that does not exist is answered by [`absent`].
#![forbid(unsafe_code)]

mod block_commands;
mod cdb;
mod command_table;
mod inquiry;
mod logical_unit;
mod mmc;
mod mode_pages;
mod passthrough;
mod persistent_reserve;
mod properties;
mod provisioning;
mod report_luns;
mod report_opcodes;
mod reservation_state;
mod sense;
mod start_stop;
mod step;
mod task;
mod tray;
mod unit_attention;
mod unit_status;
mod verify;

#[cfg(test)]
mod tests;

pub use logical_unit::{LogicalUnit, RemovalPrevented};
pub use passthrough::{
    CommandResult, DeliveryFailure, PassthroughCommand, PassthroughData, PassthroughDevice,
    PassthroughLimits, PassthroughResult, Transfer,
};
pub use properties::{DeviceKind, Identity, InvalidLimits, MediumLimits};
pub use report_luns::absent;
pub use sense::{Field, Sense, SenseKey};
pub use step::{DataLocation, Extent, Lun, ScsiCommand, ScsiResponse, ScsiStatus, Step};
pub use task::Task;
pub use unit_attention::UnitAttention;
