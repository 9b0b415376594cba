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
//!   buffers ([`Place::Initiator`]); a few commands have a bounded buffer of their own ([`Place::Scratch`],
//!   [`Task::scratch`]), which stays where it is in memory while a step is under way, even if the task is moved.
//! - A task that has an [`exclusive`](Task::exclusive) range runs beside no other that writes there.
//! - Task attributes, task management and the order of commands are the owner's. A task may be dropped between steps;
//!   then nothing more of it happens.
//! - The owner says what happens to the unit from outside: [`LogicalUnit::reset`], [`LogicalUnit::resize`],
//!   [`LogicalUnit::luns_changed`], [`LogicalUnit::insert`], [`LogicalUnit::eject`].
//!
//! A device of the host ([`LogicalUnit::host`]) has steps of its own, [`Step::Pass`], settled by
//! [`Task::settle_passage`]: its owner has a [`HostDevice`] carry them out, where waiting for one does no harm.
//!
//! A command to a LUN that does not exist is answered by [`absent`].
#![forbid(unsafe_code)]

mod attention;
mod block;
mod cdb;
mod host;
mod inquiry;
mod limits;
mod luns;
mod mmc;
mod mode;
mod opcode;
mod opcodes;
mod power;
mod provisioning;
mod reservation;
mod reserve;
mod sense;
mod status;
mod step;
mod task;
mod tray;
mod unit;
mod verify;

#[cfg(test)]
mod tests;

pub use attention::Attention;
pub use host::{Failure, HostData, HostDevice, HostLimits, Outcome, Passage, Passed, Transfer};
pub use limits::{BadLimits, Identity, Kind, Limits};
pub use luns::absent;
pub use sense::{Field, Sense, SenseKey};
pub use step::{Command, Extent, Lun, Place, Response, Status, Step};
pub use task::Task;
pub use unit::{LogicalUnit, RemovalPrevented};
