//! Hotplug of network interfaces.

use std::time::Duration;

use husk_network::{Binding, Interface, MacAddr, secondary_nic};
use husk_proto::shim::v1::AddInterfaceRequest;
use husk_proto::vmm::v1::{AddNicRequest, SetLinkRequest};
use husk_vmi::NicDhcp;
use tokio::task::spawn_blocking;
use tracing::{info, warn};

use super::InterfacesActor;
use super::handle::Reply;
use super::interface_spec::InterfaceSpec;
use super::table::Origin;
use super::vm_network::{PreparedInterface, VmNetwork};
use crate::monitor::error_chain::error_chain;
use crate::monitor::vm_config::{self, OpenNic};
use crate::monitor::vm_error::VmError;
use crate::monitor::vmm_connection::{VmmConnection, call_within};

/// Limit for an interface's name, in bytes. A manifest has none.
const MAX_NAME: usize = 253;
/// Maximum time for the VMM to add a NIC or to set its link state.
const AT_ONCE: Duration = Duration::from_secs(30);
impl InterfacesActor {
    pub(super) async fn add(
        &mut self,
        request: AddInterfaceRequest,
        dhcp: NicDhcp,
        link_up: bool,
    ) -> Result<(), VmError> {
        let AddInterfaceRequest { name, device, mac } = request;
        if !is_name(&name) {
            let text = format!(
                "the interface's name {name:?} must be at most {MAX_NAME} letters, digits, '-' and '_'"
            );
            return Err(VmError::invalid_argument(text));
        }
        let mac = match mac.as_str() {
            "" => None,
            text => Some(
                text.parse::<MacAddr>()
                    .map_err(|error| VmError::invalid_argument(error.to_string()))?,
            ),
        };
        let device = if device.is_empty() {
            secondary_nic(&name)
        } else {
            device
        };
        let (mut connection, vm_network) = (self.connection()?, self.vm_network()?);
        if self.removals.waiters.contains_key(&name) {
            return Err(VmError::interface_leaves(&name));
        }
        if self.table.is_present(&name, &device, mac)? {
            return Ok(());
        }
        let spec = InterfaceSpec {
            interface: Interface {
                name: name.clone(),
                nic: device.clone(),
                index: self.table.free_index(),
                binding: Binding::Bridge,
                mac,
                queues: self.table.queues(),
                owner: vm_network.defaults.owner,
            },
            options: vm_network.defaults.options(&dhcp),
            link_up,
        };
        let PreparedInterface {
            nic,
            server,
            shown,
            index,
        } = match run_blocking(&vm_network, move |vm_network| vm_network.prepare_one(&spec)).await? {
            Ok(ready) => ready,
            Err(error) => {
                release(&vm_network, device).await;
                let text = error_chain(&error);
                return Err(match error.is_missing() {
                    true => VmError::not_found(text),
                    false => VmError::wrong_state(text),
                });
            }
        };
        let slot = connection.add_nic(nic).await;
        match &slot {
            // The VMM may add it later. Remove it then.
            Err(VmError::TimedOut(_)) => {
                self.removals.begin(connection, name.clone(), None);
            }
            Err(_) => {
                if let Some(server) = server {
                    server.stop().await;
                }
                release(&vm_network, device).await;
                return slot.map(drop);
            }
            Ok(slot) => info!(interface = name, device, slot, "interface added"),
        }
        let plugged = slot.as_ref().ok().and_then(|slot| u8::try_from(*slot).ok());
        self.table
            .add(shown, server, index, Origin::Plugged(plugged, dhcp));
        slot.map(drop)
    }

    pub(super) fn remove(&mut self, name: String, reply: Reply<()>) {
        match self
            .connection()
            .and_then(|connection| self.table.is_added(&name).map(|()| connection))
        {
            Ok(connection) => self.removals.begin(connection, name, Some(reply)),
            Err(status) => drop(reply.send(Err(status))),
        }
    }

    /// Handles the end of a removal.
    pub(super) async fn handle_removal(&mut self, name: &str, removed: Result<(), VmError>) {
        let removed = match removed {
            Ok(()) => self.release(name).await,
            refused => refused,
        };
        // Callers that no longer wait have got a timeout error.
        for reply in self.removals.waiters.remove(name).unwrap_or_default() {
            let _ = reply.send(removed.clone());
        }
    }

    /// Restores the device of an interface that the VMM has removed.
    async fn release(&mut self, name: &str) -> Result<(), VmError> {
        let Some(entry) = self.table.remove(name) else {
            return Ok(());
        };
        if let Some(server) = entry.server {
            server.stop().await;
        }
        let vm_network = self.vm_network()?;
        let device = entry.shown.device;
        info!(interface = name, device, "interface removed");
        match release(&vm_network, device).await {
            true => Ok(()),
            false => Err(VmError::internal(format!(
                "interface {name:?} was removed, but its device was not restored; see `husk logs VM --monitor`"
            ))),
        }
    }

    pub(super) async fn set_link(&mut self, name: &str, up: bool) -> Result<(), VmError> {
        let mut connection = self.connection()?;
        self.vm_network()?;
        self.table.has(name)?;
        let id = name.to_owned();
        call_within(AT_ONCE, connection.client.set_link(SetLinkRequest { id, up })).await?;
        info!(interface = name, up, "link set");
        self.table.set_link(name, up);
        Ok(())
    }

    /// The connection to the VMM, if interfaces may be changed.
    fn connection(&self) -> Result<VmmConnection, VmError> {
        if self.held.strong_count() > 0 {
            return Err(VmError::being_saved());
        }
        let connection = self.connection.clone();
        connection.ok_or_else(VmError::not_running)
    }

    fn vm_network(&self) -> Result<VmNetwork, VmError> {
        self.vm_network.clone().ok_or_else(|| {
            VmError::wrong_state(
                "the VM has no network: its manifest asks for none, or it was not started by root",
            )
        })
    }
}

/// Runs blocking work on the VM's network.
async fn run_blocking<T: Send + 'static>(
    vm_network: &VmNetwork,
    work: impl FnOnce(&VmNetwork) -> T + Send + 'static,
) -> Result<T, VmError> {
    let vm_network = vm_network.clone();
    let done = spawn_blocking(move || work(&vm_network)).await;
    done.map_err(|error| VmError::internal(error.to_string()))
}

/// Restores a device. Returns false on an error, which is logged.
async fn release(vm_network: &VmNetwork, device: String) -> bool {
    let error = match run_blocking(vm_network, move |vm_network| {
        vm_network.release_interface(&device)
    })
    .await
    {
        Ok(Ok(())) => return true,
        Ok(Err(error)) => error_chain(&error),
        Err(status) => status.to_string(),
    };
    // The end of the VM tries it again.
    warn!(error, "a device was not restored");
    false
}

impl VmmConnection {
    /// Plugs a NIC, and returns its PCI slot.
    pub(in crate::monitor) async fn add_nic(&mut self, open: OpenNic) -> Result<u32, VmError> {
        let (nic, descriptors) = vm_config::plugged_nic(open);
        let borrowed: Vec<_> = descriptors
            .iter()
            .map(|(token, fd)| (*token, std::os::fd::AsFd::as_fd(fd)))
            .collect();
        for part in borrowed.chunks(husk_proto::fds::MAX_FDS_PER_MESSAGE) {
            let sent = self.fds.send(part).await;
            sent.map_err(|error| VmError::unavailable(error.to_string()))?;
        }
        drop(descriptors);
        let request = AddNicRequest { nic: Some(nic) };
        let added = call_within(AT_ONCE, self.client.add_nic(request)).await?;
        Ok(added.into_inner().pci_slot)
    }
}

/// True for a name that an interface may have in a manifest.
fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(allowed)
}
