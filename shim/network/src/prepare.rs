//! State machine of a preparation: no record, *started*, *finished*.

use std::path::Path;

use super::device_names::DeviceNames;
use super::error::{NetworkError, NetworkFault};
use super::interface::{Binding, Interface};
use super::lease::{DhcpLease, Dhcpv6Lease};
use super::netlink::Netlink;
use super::netns::Netns;
use super::nic::{PodNic, SavedLink};
use super::prepared::PreparedNic;
use super::record::{InterfaceRecord, Phase};
use super::{bridge, masquerade, nft, preflight, sysctl, tap};

/// Prepares the interfaces of a VM inside its pod's namespace and opens their taps. Saves a record of each interface in
/// `dir`. Blocks.
pub fn prepare(
    netns: &Netns,
    dir: &Path,
    interfaces: &[Interface],
) -> Result<Vec<PreparedNic>, NetworkError> {
    let Some(first) = interfaces.first() else {
        return Ok(Vec::new());
    };
    let id = netns
        .id()
        .map_err(NetworkFault::Namespace)
        .map_err(NetworkFault::for_interface(&first.name))?;
    let work = || -> Result<_, NetworkError> {
        let netlink = Netlink::open().map_err(NetworkFault::for_interface(&first.name))?;
        let one = |interface: &Interface| {
            prepare_one(&netlink, id, dir, interface).map_err(NetworkFault::for_interface(&interface.name))
        };
        interfaces.iter().map(one).collect()
    };
    netns
        .run(work)
        .map_err(NetworkFault::Namespace)
        .map_err(NetworkFault::for_interface(&first.name))?
}

fn prepare_one(
    netlink: &Netlink,
    id: u64,
    dir: &Path,
    interface: &Interface,
) -> Result<PreparedNic, NetworkFault> {
    interface.check()?;
    let devices = DeviceNames::for_nic(&interface.nic)?;
    let path = InterfaceRecord::path(dir, &interface.nic);
    // A record of another namespace belongs to a pod that is gone.
    let record = match InterfaceRecord::load(&path)?.filter(|record| record.netns == id) {
        None => build(netlink, id, &path, interface, &devices)?,
        Some(record) if record.phase == Phase::Finished => {
            check_finished(netlink, &record, interface, &devices)?;
            record
        }
        Some(_) => {
            return Err(NetworkFault::Interrupted {
                nic: interface.nic.clone(),
            });
        }
    };
    open(record, interface, devices)
}

fn build(
    netlink: &Netlink,
    id: u64,
    path: &Path,
    interface: &Interface,
    devices: &DeviceNames,
) -> Result<InterfaceRecord, NetworkFault> {
    for device in [&devices.bridge, &devices.moved_nic, &devices.tap] {
        if netlink.link_by_name(device)?.is_some() {
            return Err(NetworkFault::UnexpectedDevice {
                device: device.clone(),
            });
        }
    }
    let nic = PodNic::discover(netlink, &interface.nic)?;
    preflight::check(netlink, &nic, interface)?;
    let mut record = InterfaceRecord {
        phase: Phase::Started,
        netns: id,
        interface: interface.name.clone(),
        binding: interface.binding.clone(),
        mac: guest_mac(interface, &nic),
        queues: interface.queues,
        saved_link: SavedLink::of(netlink, nic.index)?,
        saved_sysctls: Vec::new(),
        foreign_tables: Vec::new(),
        nic,
    };
    match &interface.binding {
        Binding::Bridge => record.saved_sysctls = bridge::sysctls_to_save(devices)?,
        Binding::Masquerade(network) => {
            record.saved_sysctls = masquerade::sysctls_to_save(&record.nic)?;
            for nat in masquerade::nat_configs(&record.nic, network, devices) {
                if nft::table_exists(&nat)? {
                    record.foreign_tables.push(nat.family().to_owned());
                }
            }
        }
    }
    record.save(path)?;
    match &interface.binding {
        Binding::Bridge => bridge::build(netlink, interface, devices, &record.nic, &record.saved_link)?,
        Binding::Masquerade(network) => masquerade::build(
            netlink,
            interface,
            devices,
            &record.nic,
            network,
            &record.foreign_tables,
        )?,
    }
    record.phase = Phase::Finished;
    record.save(path)?;
    Ok(record)
}

/// A bridged guest takes over the pod's MAC address, a masqueraded guest gets a random one.
fn guest_mac(interface: &Interface, nic: &PodNic) -> super::MacAddr {
    let own = match interface.binding {
        Binding::Bridge => nic.mac,
        Binding::Masquerade(_) => super::MacAddr::random(),
    };
    interface.mac.unwrap_or(own)
}

fn check_finished(
    netlink: &Netlink,
    record: &InterfaceRecord,
    interface: &Interface,
    devices: &DeviceNames,
) -> Result<(), NetworkFault> {
    let changed = |was: String, wanted: String| NetworkFault::SpecChanged {
        nic: interface.nic.clone(),
        was,
        wanted,
    };
    if record.binding != interface.binding {
        let (was, wanted) = (record.binding.name(), interface.binding.name());
        let what = |name: &str| format!("binding {name}");
        return Err(match was == wanted {
            true => changed(what(was), format!("{wanted} with other ports or networks")),
            false => changed(what(was), what(wanted)),
        });
    }
    if record.queues != interface.queues {
        let queues = |count| format!("{count} queues");
        return Err(changed(queues(record.queues), queues(interface.queues)));
    }
    if let Some(mac) = interface.mac.filter(|mac| *mac != record.mac) {
        return Err(changed(format!("address {}", record.mac), mac.to_string()));
    }
    let moved = match record.binding {
        Binding::Bridge => &devices.moved_nic,
        Binding::Masquerade(_) => &devices.nic,
    };
    for device in [moved, &devices.bridge, &devices.tap] {
        netlink.require_link(device)?;
    }
    Ok(())
}

fn open(
    record: InterfaceRecord,
    interface: &Interface,
    devices: DeviceNames,
) -> Result<PreparedNic, NetworkFault> {
    let (lease, lease6) = match &record.binding {
        Binding::Bridge => (
            DhcpLease::for_bridge(&record.nic, record.mac, interface.fake_address()),
            None,
        ),
        Binding::Masquerade(network) => (
            DhcpLease::for_masquerade(network, &record.nic),
            Dhcpv6Lease::for_masquerade(network, &record.nic),
        ),
    };
    Ok(PreparedNic {
        name: interface.name.clone(),
        mac: record.mac,
        mtu: record.nic.mtu,
        taps: tap::open(&devices.tap, record.queues)?,
        vhost: tap::vhost(record.queues)?,
        devices,
        nic: record.nic,
        lease,
        lease6,
    })
}

/// Tears down all preparations that `dir` records for this namespace, finished or not. Missing devices are not an
/// error. Open taps stop working. Blocks.
pub fn tear_down(netns: &Netns, dir: &Path) -> Result<(), NetworkError> {
    let id = netns.id().map_err(NetworkFault::Namespace)?;
    let mut done = Ok(());
    for path in InterfaceRecord::all(dir)? {
        let undone = match InterfaceRecord::load(&path) {
            Ok(Some(record)) => undo(netns, id, &path, &record),
            Ok(None) => Ok(()),
            Err(fault) => Err(fault.into()),
        };
        // Continue with the other interfaces. The record of a failed teardown stays.
        done = done.and(undone);
    }
    done
}

/// Tears down the preparation of one NIC. Sysctls that other interfaces still need stay set, and the last interface
/// restores them.
pub fn tear_down_interface(netns: &Netns, dir: &Path, nic: &str) -> Result<(), NetworkError> {
    let id = netns.id().map_err(NetworkFault::Namespace)?;
    // Checks the name, which becomes part of a path.
    let path = InterfaceRecord::path(dir, &DeviceNames::for_nic(nic)?.nic);
    let Some(mut record) = InterfaceRecord::load(&path)? else {
        return Ok(());
    };
    hand_over_sysctls(&mut record, dir).map_err(NetworkFault::for_interface(&record.interface))?;
    undo(netns, id, &path, &record)
}

/// Moves the saved sysctls to the record of another interface with the same binding.
fn hand_over_sysctls(record: &mut InterfaceRecord, dir: &Path) -> Result<(), NetworkFault> {
    for path in InterfaceRecord::all(dir)? {
        let Some(mut other) = InterfaceRecord::load(&path)? else {
            continue;
        };
        let same_kind = other.binding.name() == record.binding.name() && other.netns == record.netns;
        if other.nic.name == record.nic.name || !same_kind {
            continue;
        }
        let own = format!("/conf/{}/", record.nic.name);
        let is_own = |(name, _): &(String, String)| name.contains(&own);
        let (kept, common) = record.saved_sysctls.drain(..).partition(is_own);
        record.saved_sysctls = kept;
        other.saved_sysctls.extend::<Vec<_>>(common);
        return other.save(&path);
    }
    Ok(())
}

fn undo(netns: &Netns, id: u64, path: &Path, record: &InterfaceRecord) -> Result<(), NetworkError> {
    let work = || {
        if record.netns == id {
            let left = |fault| NetworkFault::NotRestored {
                nic: record.nic.name.clone(),
                fault: Box::new(fault),
            };
            tear_down_one(record).map_err(left)?;
        }
        InterfaceRecord::remove(path)
    };
    netns
        .run(work)
        .map_err(NetworkFault::Namespace)
        .flatten()
        .map_err(NetworkFault::for_interface(&record.interface))
}

fn tear_down_one(record: &InterfaceRecord) -> Result<(), NetworkFault> {
    let netlink = Netlink::open()?;
    let devices = DeviceNames::for_nic(&record.nic.name)?;
    let restore = |(name, value): &(String, String)| sysctl::set(name, value);
    let mut switches = record.saved_sysctls.iter();
    match &record.binding {
        Binding::Bridge => {
            bridge::remove_devices(&netlink, &devices, &record.nic)?;
            // Before IPv6 addresses are added again.
            switches.try_for_each(restore)?;
            bridge::restore_nic(&netlink, &devices, &record.nic, &record.saved_link)
        }
        Binding::Masquerade(network) => {
            masquerade::tear_down(&netlink, &devices, &record.nic, network, &record.foreign_tables)?;
            switches.try_for_each(restore)
        }
    }
}
