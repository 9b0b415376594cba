//! Results and arguments of commands, with the names of QEMU's schema (`qga/qapi-schema.json`).

mod exec;
mod file_system;
mod network;
mod system;

pub use exec::{Exec, ExecOutput, ExecStatus};
pub use file_system::{DiskAddress, FileSystem, FsFreezeStatus, PciAddress};
pub use network::{IpAddress, IpAddressType, NetworkInterface};
pub use system::{AgentInfo, CommandInfo, LoadAverage, OsInfo, ShutdownMode, System, TimeZone, User};

pub(crate) use exec::{RawStatus, Started};
pub(crate) use system::{AuthorizedKeys, HostName};
