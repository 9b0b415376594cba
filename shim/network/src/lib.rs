//! A pod's network: from the NIC that a CNI plugin made to taps and DHCP leases for a guest.
//!
//! [`prepare`] builds the bindings inside the pod's network namespace, once: a second call finds a finished preparation
//! and only opens the taps, and a call after an interrupted preparation fails permanently, as in KubeVirt.
//! [`tear_down`] restores the pod's network. [`dhcp::DhcpServer`] configures the guest.

mod bridge;
mod counters;
mod device_index;
mod device_names;
pub mod dhcp;
mod error;
mod ethtool;
mod interface;
mod lease;
mod location;
mod mac;
mod masquerade;
mod netlink;
mod netns;
mod nft;
mod nic;
mod nsfs;
pub mod ofd_lock;
mod preflight;
mod prepare;
mod prepared;
mod privilege;
mod record;
mod route;
mod saved_teardown;
mod standalone;
mod sysctl;
mod tap;
#[cfg(feature = "testing")]
pub mod testing;

pub use counters::{GuestCounters, LinkCounters, tap_counters};
pub use device_names::{DeviceNames, PRIMARY_NIC, secondary_nic};
pub use error::{NetworkError, NetworkFault};
pub use interface::{Binding, Interface, Masquerade, Port, Protocol, TapOwner};
pub use lease::{DhcpLease, Dhcpv6Lease};
pub use location::{NetworkLocation, is_state_file, uses_netns};
pub use mac::{MacAddr, ParseMacAddrError};
pub use netns::Netns;
pub use nic::PodNic;
pub use prepare::{prepare, tear_down, tear_down_interface};
pub use prepared::PreparedNic;
pub use privilege::{PrivilegeError, check_privileges};
pub use route::{Neighbour, Route};
pub use saved_teardown::tear_down_saved;
pub use standalone::{StandaloneNetns, StandaloneNetwork};
pub use tap::unconnected_tap;

/// Removes what killed monitors left in the host's network. Blocks.
pub fn clean_up() -> Result<(), NetworkError> {
    StandaloneNetwork::default().clean_up()
}
