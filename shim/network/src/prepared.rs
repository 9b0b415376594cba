//! Result of a preparation.

use std::os::fd::OwnedFd;

use super::device_names::DeviceNames;
use super::lease::{DhcpLease, Dhcpv6Lease};
use super::mac::MacAddr;
use super::nic::PodNic;

/// An interface that is ready for its guest. Dropping it closes the descriptors; the devices stay.
#[derive(Debug)]
pub struct PreparedNic {
    /// Name in the manifest.
    pub name: String,
    /// The guest's MAC address.
    pub mac: MacAddr,
    /// In bytes.
    pub mtu: u32,
    /// One descriptor of the tap per queue pair. Frames start with the 12-byte header of virtio 1.
    pub taps: Vec<OwnedFd>,
    /// One descriptor of vhost-net per queue pair; empty if vhost-net is not available.
    pub vhost: Vec<OwnedFd>,
    pub devices: DeviceNames,
    /// The pod's NIC as the CNI plugin left it.
    pub nic: PodNic,
    /// `None` if the pod has no IPv4 address. Without this and `lease6` no DHCP server runs.
    pub lease: Option<DhcpLease>,
    pub lease6: Option<Dhcpv6Lease>,
}
