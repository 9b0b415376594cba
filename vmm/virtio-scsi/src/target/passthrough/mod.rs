//! Logical units that pass commands through to a device of the host (KubeVirt: `lun`).
//!
//! A guest may send the commands in [`allowed_commands`]; all others end with INVALID COMMAND OPERATION CODE. The CDB
//! gives a command's data length, in blocks of the device; it must fit the initiator's buffers and the host's limits.
//! The guest gets the device's own answer, except where it would be wrong in the guest: maximum transfer length, write
//! protection, supported commands.

mod allowed_commands;
mod forwarded_command;
mod response_filter;

#[cfg(test)]
mod tests;

pub(crate) use forwarded_command::begin;
