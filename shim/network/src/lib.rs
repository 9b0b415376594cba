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
mod privilege;
mod record;
mod standalone;
mod sysctl;
mod tap;

use std::os::fd::OwnedFd;

pub use device_names::{DeviceNames, PRIMARY_NIC, secondary_nic};
pub use error::{NetworkError, NetworkFault};
pub use interface::{Binding, Interface, Masquerade, Port, Protocol, TapOwner};
pub use lease::{DhcpLease, Dhcpv6Lease};
pub use location::{NetworkLocation, is_state_file, tear_down_saved, uses_netns};
pub use mac::{MacAddr, ParseMacAddrError};
pub use netns::Netns;
pub use nic::{Neighbour, PodNic, Route};
pub use prepare::{prepare, tear_down, tear_down_interface};
pub use privilege::{PrivilegeError, check_privileges};
pub use standalone::{StandaloneNetns, StandaloneNetwork};

/// Removes what killed monitors left of this machine's network. Blocks.
pub fn clean_up() -> Result<(), NetworkError> {
    StandaloneNetwork::default().clean_up()
}

/// An interface that is ready for its guest. Dropping it closes the descriptors; the devices stay.
#[derive(Debug)]
pub struct PreparedInterface {
    /// Its name in the manifest.
    pub name: String,
    /// The guest's Ethernet address.
    pub mac: MacAddr,
    /// Bytes of the largest packet.
    pub mtu: u32,
    /// The tap, once for each pair of queues; frames have virtio 1's header of 12 bytes.
    pub taps: Vec<OwnedFd>,
    /// vhost-net, as often; none where it is not to be had.
    pub vhost: Vec<OwnedFd>,
    /// What its devices are called.
    pub devices: DeviceNames,
    /// The pod's device as the plugin left it.
    pub nic: PodNic,
    /// What the guest gets by DHCP; none if the pod has no address, and no server is to run.
    pub lease: Option<DhcpLease>,
    /// What it gets by DHCPv6 and router advertisements.
    pub lease6: Option<Dhcpv6Lease>,
}
