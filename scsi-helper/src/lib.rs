//! SCSI commands for a device of the host: SG_IO on a descriptor, and a channel on which a process without privileges
//! has another one send the few commands that the kernel would not take from it.
//!
//! Which commands a guest may send is decided elsewhere; what is here sends what it is given.

mod channel;
mod sg_io;

pub use channel::{MAX_DATA, PRIVILEGED, PrivilegedScsiClient, serve};
pub use sg_io::{DataBuffer, ScsiCompletion, execute, is_scsi, max_sectors};
