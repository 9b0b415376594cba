//! SCSI commands to a block device of the host through `SG_IO`, and the privileged SCSI helper.
//!
//! The kernel takes some commands only from a process with CAP_SYS_RAWIO. The VMM has no capabilities. It sends these
//! commands through a [`PrivilegedScsiClient`] to the monitor, where a [`PrivilegedScsiServer`] executes them on its
//! own descriptor of the device. The server does not trust the VMM: it executes only the commands in its own table.

mod allowed_commands;
mod client;
mod protocol;
mod server;
mod sg_io;

pub use allowed_commands::{HelperPolicy, PRIVILEGED_OPCODES};
pub use client::PrivilegedScsiClient;
pub use protocol::MAX_DATA;
pub use server::PrivilegedScsiServer;
#[cfg(feature = "testing")]
pub use server::respond;
pub use sg_io::{DataBuffer, ScsiCompletion, execute, is_scsi, max_sectors};
