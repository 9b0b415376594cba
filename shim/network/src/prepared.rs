//! The result of a preparation.

use std::os::fd::OwnedFd;

use super::device_names::DeviceNames;
use super::lease::{DhcpLease, Dhcpv6Lease};
use super::mac::MacAddr;
use super::nic::PodNic;

/// An interface that is ready for its guest. Dropping it closes the descriptors; the devices stay.
#[derive(Debug)]
pub struct PreparedNic {
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
