//! A pod's network, from what the container network plugin left to taps and what the guest should learn.
//!
//! [`prepare`] builds what the bindings ask for inside the pod's network namespace, once: a second call finds it done
//! and only opens the taps, and one that follows an interrupted preparation fails for good, as in KubeVirt.
//! [`tear_down`] gives the pod its network back. Then [`dhcp::DhcpServer`] tells the guest what it may.

mod bridge;
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

/// Removes what killed monitors left of this machine's network. Blocks.
pub fn clean_up() -> Result<(), NetworkError> {
    StandaloneNetwork::default().clean_up()
}
