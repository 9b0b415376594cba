//! The present interfaces of a VM.

use std::collections::HashSet;
use std::future::poll_fn;
use std::net::Ipv4Addr;
use std::pin::pin;
use std::task::Poll;

use husk_proto::shim::v1::Interface;
use husk_vmi::NicDhcp;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{StreamExt, StreamMap};

use crate::monitor::vm_error::VmError;
use crate::snapshot::PluggedInterface;
use husk_network::dhcp::DhcpServer;
use husk_network::{DeviceNames, MacAddr};

/// When an interface came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Origin {
    /// With the VM.
    Start,
    /// While the VM ran, or the VM that was saved: into this PCI slot, with these options. None if the VMM has not told
    /// the slot.
    Plugged(Option<u8>, NicDhcp),
}

/// A present interface.
#[derive(Debug)]
pub(super) struct InterfaceEntry {
    pub(super) shown: Interface,
    pub(super) server: Option<DhcpServer>,
    index: u8,
    origin: Origin,
}

/// All interfaces. Watchers see each change.
#[derive(Debug)]
pub(super) struct InterfaceTable {
    entries: Vec<InterfaceEntry>,
    shown: watch::Sender<Vec<Interface>>,
    leases: StreamMap<String, WatchStream<Option<Ipv4Addr>>>,
}

impl InterfaceEntry {
    /// Describes an interface that was hotplugged.
    fn saved(&self) -> Result<PluggedInterface, VmError> {
        let Interface {
            name,
            device,
            mac,
            queues,
            link_up,
            ..
        } = &self.shown;
        let known = || {
            let Origin::Plugged(Some(pci_slot), dhcp) = &self.origin else {
                return None;
            };
            Some(PluggedInterface {
                name: name.clone(),
                device: device.clone(),
                mac: mac.parse().ok()?,
                queues: u16::try_from(*queues).ok()?,
                link_up: *link_up,
                pci_slot: *pci_slot,
                dhcp: dhcp.clone(),
            })
        };
        known().ok_or_else(|| VmError::internal(format!("interface {name:?}: its PCI slot is not known")))
    }
}

impl InterfaceTable {
    pub(super) fn new() -> InterfaceTable {
        InterfaceTable {
            entries: Vec::new(),
            shown: watch::Sender::new(Vec::new()),
            leases: StreamMap::new(),
        }
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Vec<Interface>> {
        self.shown.subscribe()
    }

    /// Adds an interface.
    pub(super) fn add(&mut self, shown: Interface, server: Option<DhcpServer>, index: u8, origin: Origin) {
        let shown = Interface {
            plugged: origin != Origin::Start,
            ..shown
        };
        if let Some(server) = &server {
            self.leases
                .insert(shown.name.clone(), WatchStream::new(server.leased()));
        }
        self.entries.push(InterfaceEntry {
            shown,
            server,
            index,
            origin,
        });
        self.show();
    }

    /// Removes an interface.
    pub(super) fn remove(&mut self, name: &str) -> Option<InterfaceEntry> {
        let place = self.entries.iter().position(|entry| entry.shown.name == name)?;
        let entry = self.entries.remove(place);
        self.leases.remove(name);
        self.show();
        Some(entry)
    }

    /// Removes all interfaces.
    pub(super) fn clear(&mut self) -> Vec<InterfaceEntry> {
        let entries = std::mem::take(&mut self.entries);
        self.leases.clear();
        self.show();
        entries
    }

    pub(super) fn set_link(&mut self, name: &str, up: bool) {
        for entry in self.entries.iter_mut().filter(|entry| entry.shown.name == name) {
            entry.shown.link_up = up;
        }
        self.show();
    }

    /// True if this very interface is present. An error if another one has its name or device.
    pub(super) fn is_present(&self, name: &str, device: &str, mac: Option<MacAddr>) -> Result<bool, VmError> {
        for InterfaceEntry { shown, .. } in &self.entries {
            let same_mac = mac.is_none_or(|mac| mac.to_string() == shown.mac);
            if shown.name == name && shown.device == device && same_mac {
                return Ok(true);
            }
            if shown.name == name {
                let text = format!(
                    "Unable to add interface [{name}] because interface with that name already exists"
                );
                return Err(VmError::already_exists(text));
            }
            if DeviceNames::for_nic(&shown.device).is_ok_and(|devices| devices.contains(device)) {
                let other = &shown.name;
                let text = format!(
                    "Unable to add interface [{name}] because its device {device} is that of interface [{other}]"
                );
                return Err(VmError::already_exists(text));
            }
        }
        Ok(false)
    }

    /// Checks that an interface was hotplugged.
    pub(super) fn is_added(&self, name: &str) -> Result<(), VmError> {
        let why = |why| format!("Unable to remove interface [{name}] because it {why}");
        match self.entries.iter().find(|entry| entry.shown.name == name) {
            Some(entry) if entry.origin != Origin::Start => Ok(()),
            Some(_) => Err(VmError::wrong_state(why("was present at start"))),
            None => Err(VmError::not_found(why("does not exist"))),
        }
    }

    /// The interfaces that were hotplugged, for a snapshot.
    pub(super) fn plugged(&self) -> Result<Vec<PluggedInterface>, VmError> {
        let plugged = self.entries.iter().filter(|entry| entry.origin != Origin::Start);
        plugged.map(InterfaceEntry::saved).collect()
    }

    /// Checks that an interface is present.
    pub(super) fn has(&self, name: &str) -> Result<(), VmError> {
        match self.entries.iter().any(|entry| entry.shown.name == name) {
            true => Ok(()),
            false => Err(VmError::not_found(format!("the VM has no interface [{name}]"))),
        }
    }

    /// The lowest free index.
    pub(super) fn free_index(&self) -> u8 {
        let taken: HashSet<u8> = self.entries.iter().map(|entry| entry.index).collect();
        (0..u8::MAX)
            .find(|index| !taken.contains(index))
            .unwrap_or(u8::MAX)
    }

    /// The number of queue pairs of the other interfaces.
    pub(super) fn queues(&self) -> u16 {
        let most = self.entries.iter().map(|entry| entry.shown.queues).max();
        most.and_then(|most| u16::try_from(most).ok()).unwrap_or(1)
    }

    /// Records the guests' leases until a DHCP server fails. Returns the name of its interface.
    pub(super) async fn failed(&mut self) -> String {
        loop {
            let entries = &mut self.entries;
            let failed = poll_fn(|context| {
                for entry in &mut *entries {
                    if let Some(server) = &mut entry.server
                        && pin!(server.failed()).poll(context).is_ready()
                    {
                        entry.server = None;
                        return Poll::Ready(entry.shown.name.clone());
                    }
                }
                Poll::Pending
            });
            tokio::select! {
                name = failed => return name,
                Some((name, leased)) = self.leases.next() => self.leased(&name, leased),
            }
        }
    }

    fn leased(&mut self, name: &str, leased: Option<Ipv4Addr>) {
        let Some(entry) = self.entries.iter_mut().find(|entry| entry.shown.name == name) else {
            return;
        };
        let leased: Vec<String> = leased.iter().map(ToString::to_string).collect();
        if entry.shown.leased != leased {
            entry.shown.leased = leased;
            self.show();
        }
    }

    fn show(&self) {
        let all = self.entries.iter().map(|entry| entry.shown.clone());
        self.shown.send_replace(all.collect());
    }
}
