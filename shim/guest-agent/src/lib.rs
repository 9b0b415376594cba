//! A client of the QEMU guest agent (qemu-ga): QAPI commands as JSON, one value a line, over a stream that the guest
//! has the other end of.
//!
//! The guest is hostile. What it sends is bounded before it is parsed, in bytes, in elements and in the length of a
//! text, and a fault costs one command: [`GuestAgent`] brings the stream back into step before the next.
//!
//! [`Poller`] and [`FreezeGuard`] have no timers: their owner asks them with the present time.
//!
//! Reference: QEMU Guest Agent Protocol Reference, <https://qemu.org/docs/master/interop/qemu-ga-ref.html>.

mod bounded;
mod client;
mod decoder;
mod error;
mod freeze;
mod poller;
mod reply;
mod support;
mod types;
mod visible;

pub use client::{GuestAgent, limit};
pub use error::{AgentError, Fault};
pub use freeze::FreezeGuard;
pub use poller::{Answer, Answers, Intervals, Poller, Query};
pub use support::{
    BASIC_COMMANDS, PASSWORD_COMMANDS, RequiredCommands, SSH_COMMANDS, Unsupported, check_support,
};
pub use types::{
    AgentInfo, CommandInfo, DiskAddress, Exec, ExecOutput, ExecStatus, FileSystem, FsFreezeStatus, IpAddress,
    IpAddressType, LoadAverage, NetworkInterface, OsInfo, PciAddress, ShutdownMode, System, TimeZone, User,
};
pub use visible::visible;
