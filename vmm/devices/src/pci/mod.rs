//! PCI: one root bus of single-function devices, and the parts of a function.
//!
//! [`PciDevice`] stands below virtio: a passed-through device implements it beside the virtio transport.

pub mod bridge;
pub mod config;
mod config_ports;
mod device;
#[cfg(any(test, feature = "testing"))]
#[allow(missing_docs, missing_debug_implementations)]
pub mod fake;
pub mod hotplug;
mod i6300esb;
pub mod msix;
pub mod root;

pub use config::{BarKind, ConfigSpace};
pub use config_ports::ConfigPorts;
pub use device::{Bar, PciDevice};
pub use hotplug::PciHotplug;
pub use i6300esb::{I6300esb, WatchdogTimer};
pub use msix::Msix;
pub use root::{PciRoot, PciRootError, SLOTS};
