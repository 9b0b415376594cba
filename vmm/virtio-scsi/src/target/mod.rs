//! SCSI logical units: from a CDB to data and sense data (SPC-4, SBC-3, MMC-6). No virtio, files or threads here.
//!
//! A [`LogicalUnit`] is the state of one LUN. [`LogicalUnit::begin`] turns a command into a [`Task`], which its owner
//! drives:
//!
//! 1. [`Task::next`] returns a [`Step`]: I/O on the medium, data of the initiator to fetch, or the end.
//! 2. The owner executes the step, alone or with those of other tasks, and calls [`Task::complete_step`] with its result
//!    ([`Task::complete_extent_step`] for [`Step::Extent`]). Then again from 1, until [`Step::Done`].
//!
//! Rules for the owner:
//! - A task has one step at a time. Plain reads and writes move data directly between the medium and the initiator's
//!   buffers ([`DataLocation::Initiator`]). A few commands have a bounded buffer of their own
//!   ([`DataLocation::Scratch`], [`Task::scratch`]), which stays in place in memory during a step, even if the task is
//!   moved.
//! - While a task with an [`exclusive`](Task::exclusive) range runs, no other task writes there.
//! - Beside a task that [runs alone](Task::runs_alone), no other task of its unit runs.
//! - The owner implements task attributes, task management and the order of commands. It may drop a task between steps,
//!   which ends the task.
//! - The owner reports changes from outside: [`LogicalUnit::reset`], [`LogicalUnit::resize`],
//!   [`LogicalUnit::luns_changed`], [`LogicalUnit::insert`], [`LogicalUnit::eject`].
//!
//! A passthrough device ([`LogicalUnit::passthrough`]) has one kind of step, [`Step::Passthrough`], settled by
//! [`Task::complete_passthrough_step`]. Its owner executes it with a [`PassthroughDevice`], on a thread that may block.
//!
//! [`absent`] answers commands to a LUN that does not exist.
#![forbid(unsafe_code)]

mod block_commands;
mod cdb;
mod command_descriptor;
mod command_error;
mod command_table;
mod dispatch;
mod inquiry;
mod logical_unit;
mod mmc;
mod mode_pages;
mod mode_parameters;
mod passthrough;
mod passthrough_device;
mod persistent_reserve;
mod properties;
mod provisioning;
mod report_luns;
mod report_opcodes;
mod reservation_state;
mod saved_unit;
mod sense;
mod start_stop;
mod step;
mod task;
mod tray;
mod tray_state;
mod unit_attention;
mod unit_status;
mod verify;

#[cfg(test)]
mod tests;

pub(crate) use cdb::MAX as LONGEST_CDB;
pub use logical_unit::{LogicalUnit, RemovalPrevented};
pub use passthrough_device::{
    CommandResult, DeliveryFailure, PassthroughCommand, PassthroughData, PassthroughDevice,
    PassthroughLimits, PassthroughResult, Transfer,
};
pub use properties::{DeviceKind, Identity, InvalidLimits, MediumLimits};
pub use report_luns::absent;
pub(crate) use saved_unit::SavedUnit;
pub use sense::{Field, Sense, SenseKey};
pub use step::{DataLocation, Extent, Lun, ScsiCommand, ScsiResponse, ScsiStatus, Step};
pub use task::Task;
pub use unit_attention::UnitAttention;
