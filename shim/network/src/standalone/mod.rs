//! Network for VMs on a host without a CNI plugin.
//!
//! ```text
//! other machines ── NAT ── husk0 (gateway) ─┬─ huskXXXXXXXX ══ eth0 in the VM's namespace ── as in a pod
//!                                           └─ huskYYYYYYYY ══ eth0 in another VM's namespace
//! ```
//!
//! The name of a port is its VM's IPv4 address in hexadecimal (XXXXXXXX), so the kernel assigns each address once. The
//! namespace has no name: the kernel removes it, and the port, with the last process that holds it, however that ends.
//! Bridge, NAT and forwarding are reverted with the last port, or by the next Husk process that finds none.

mod bridge;
mod forwarding;
mod host_state;
mod subnet;
mod uplinks;

use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use ipnet::{IpNet, Ipv4Net};

use super::device_names::PRIMARY_NIC;
use super::error::{NetworkError, NetworkFault};
use super::location::NetworkLocation;
use super::netlink::{Netlink, Veth};
use super::netns::Netns;
use super::privilege::check_privileges;
use super::route::Route;
use crate::ofd_lock;
use host_state::{HostChanges, HostState};

/// Lock file, held while the bridge and its ports change. It contains the changes to revert.
const LOCK: &str = "/run/husk-network.lock";

/// Network of the host, or of the calling thread's namespace.
#[derive(Debug, Clone)]
pub struct StandaloneNetwork {
    lock: PathBuf,
}

/// A VM's own namespace, configured as a CNI plugin configures a pod's.
#[derive(Debug)]
pub struct StandaloneNetns {
    /// The kernel removes the namespace with its last holder.
    pub netns: Netns,
    /// Location to save, for [`super::tear_down_saved`].
    pub location: NetworkLocation,
    /// Gateway address and network of all guests.
    pub net: Ipv4Net,
}

impl Default for StandaloneNetwork {
    fn default() -> StandaloneNetwork {
        StandaloneNetwork { lock: LOCK.into() }
    }
}

impl StandaloneNetwork {
    /// With another lock file.
    pub fn with_lock(path: &Path) -> StandaloneNetwork {
        StandaloneNetwork { lock: path.into() }
    }

    /// Creates a namespace for a VM and connects it to the bridge. Blocks.
    pub fn attach(&self, vm: &str) -> Result<StandaloneNetns, NetworkError> {
        let netns = Netns::create().map_err(NetworkFault::kernel("making a network namespace"))?;
        let (port, address, gateway) = self.change(|netlink, state| {
            let plugged = plug(netlink, state, &netns, vm);
            if plugged.is_err() {
                // Report the first error. The next cleanup retries.
                let _ = bridge::clean_up(netlink, state);
            }
            plugged
        })?;
        let location = NetworkLocation::Standalone {
            index: port.1,
            port: port.0,
        };
        let configured = netns
            .run(|| configure(address, gateway))
            .map_err(NetworkFault::Namespace)
            .flatten();
        if let Err(fault) = configured {
            self.detach(&location)?;
            return Err(fault.into());
        }
        Ok(StandaloneNetns {
            netns,
            location,
            net: gateway,
        })
    }

    /// Removes the port of a VM that has ended, and everything that no other VM needs. Blocks.
    pub fn detach(&self, location: &NetworkLocation) -> Result<(), NetworkError> {
        let NetworkLocation::Standalone { port, index } = location else {
            return Ok(());
        };
        let left = self.change(|netlink, state| {
            // Another VM may have the address and a port of the same name by now.
            if netlink
                .link_by_name(port)?
                .is_some_and(|link| link.index == *index)
            {
                netlink.delete(port)?;
            }
            bridge::clean_up(netlink, state)
        });
        Ok(left?)
    }

    /// Removes what killed monitors left.
    pub fn clean_up(&self) -> Result<(), NetworkError> {
        // Every change is made under the lock: without its file, none was made since the machine started. With it, there
        // is usually nothing left to remove, or this user may not remove it.
        let changed = self.lock.exists() && (bridge::exists() || self.is_kept());
        if !changed || check_privileges(true).is_err() {
            return Ok(());
        }
        Ok(self.change(bridge::clean_up)?)
    }

    /// True if changes in this namespace are recorded.
    fn is_kept(&self) -> bool {
        let kept = || {
            let file = std::fs::File::open(&self.lock)?;
            let state = HostState::load(&file, Netns::own()?.id()?)?;
            Ok::<_, io::Error>(*state.done() != HostChanges::default())
        };
        kept().unwrap_or(false)
    }

    /// Runs `work` under the lock on a new thread.
    fn change<T: Send>(
        &self,
        work: impl FnOnce(&Netlink, &mut HostState<'_>) -> Result<T, NetworkFault> + Send,
    ) -> Result<T, NetworkFault> {
        let own = Netns::own().map_err(NetworkFault::Namespace)?;
        let id = own.id().map_err(NetworkFault::Namespace)?;
        let locked = || {
            let lock = ofd_lock::exclusive(&self.lock).map_err(|error| unusable(&self.lock, &error))?;
            let mut state = HostState::load(&lock, id).map_err(|error| unusable(&self.lock, &error))?;
            work(&Netlink::open()?, &mut state)
        };
        own.run(locked).map_err(NetworkFault::Namespace).flatten()
    }
}

fn unusable(lock: &Path, error: &io::Error) -> NetworkFault {
    NetworkFault::Host(format!(
        "{}, which says what Husk did to this machine's network, cannot be used: {error}: make its directory writable, or \
         run the VM with --netns",
        lock.display()
    ))
}

/// Name and index of the port, address of the guest, address and network of the gateway.
type GuestPort = ((String, u32), Ipv4Addr, Ipv4Net);

fn plug(
    netlink: &Netlink,
    state: &mut HostState<'_>,
    netns: &Netns,
    vm: &str,
) -> Result<GuestPort, NetworkFault> {
    let bridge = bridge::ensure(netlink, state)?;
    if subnet::guest_addresses(bridge.gateway, vm).next().is_none() {
        return Err(NetworkFault::Host(format!(
            "{}, the network of {}, has no room for a guest: give it a larger one",
            bridge.gateway.trunc(),
            bridge::BRIDGE
        )));
    }
    for address in subnet::guest_addresses(bridge.gateway, vm) {
        let name = bridge::port_name(address);
        let veth = Veth {
            name: &name,
            bridge: bridge.index,
            mtu: bridge.mtu,
            netns,
            peer: PRIMARY_NIC,
            peer_mac: subnet::mac(address),
        };
        if netlink.add_veth(&veth)? {
            bridge::no_ipv6(&name)?;
            let index = netlink.require_link(&name)?.index;
            return Ok(((name, index), address, bridge.gateway));
        }
    }
    Err(NetworkFault::Host(format!(
        "every address of {} is taken: end a VM, or give {} a larger network while none runs",
        bridge.gateway.trunc(),
        bridge::BRIDGE
    )))
}

/// Configures the namespace as a CNI plugin does.
fn configure(address: Ipv4Addr, gateway: Ipv4Net) -> Result<(), NetworkFault> {
    let netlink = Netlink::open()?;
    let loopback = netlink.require_link("lo")?.index;
    netlink.set_up(loopback, "lo", true)?;
    let index = netlink.require_link(PRIMARY_NIC)?.index;
    let net = Ipv4Net::new_assert(address, gateway.prefix_len());
    netlink.add_address(index, PRIMARY_NIC, IpNet::V4(net))?;
    netlink.set_up(index, PRIMARY_NIC, true)?;
    let default = Route {
        destination: IpNet::V4(Ipv4Net::default()),
        gateway: Some(gateway.addr().into()),
        source: None,
        metric: None,
        onlink: false,
        protocol: libc::RTPROT_BOOT,
    };
    netlink.add_route(index, PRIMARY_NIC, &default)
}
