//! Plugging interfaces into a VM that runs, and unplugging them.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::time::Duration;

use husk_network::{Binding, Interface, MacAddr, secondary_nic};
use husk_proto::shim::v1::AddInterfaceRequest;
use husk_proto::vmm::v1::{AddNicRequest, RemoveNicRequest, SetLinkRequest};
use husk_vmi::NicDhcp;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::sleep;
use tonic::{Code, Status};
use tracing::{info, warn};

use super::interface_spec::InterfaceSpec;
use super::vm_network::{PreparedInterface, VmNetwork};
use super::{InterfacesActor, OpenNic, Reply};
use crate::monitor::error_chain::error_chain;
use crate::monitor::vm_config;
use crate::monitor::vmm_connection::{VmmConnection, call_within, without_metadata};

/// How long the VMM may take to add a NIC, or to pull its cable.
const AT_ONCE: Duration = Duration::from_secs(30);
/// Pause before a removal that the guest did not answer is asked for again.
const AGAIN: Duration = Duration::from_secs(1);

/// Removals that are under way.
#[derive(Debug, Default)]
pub(super) struct PendingRemovals {
    /// Who waits for what.
    waiters: HashMap<String, Vec<Reply<()>>>,
    tasks: JoinSet<(String, Result<(), Status>)>,
}

impl PendingRemovals {
    /// The next one that ends.
    pub(super) async fn next(&mut self) -> Option<(String, Result<(), Status>)> {
        match self.tasks.join_next().await? {
            Ok(ended) => Some(ended),
            Err(error) => {
                warn!(%error, "unplugging an interface");
                None
            }
        }
    }

    /// Begins a removal, or waits with those for whom it is.
    fn begin(&mut self, connection: VmmConnection, name: String, reply: Option<Reply<()>>) {
        match self.waiters.entry(name) {
            Slot::Occupied(mut others) => {
                // Who asks again and again has given up as often.
                others.get_mut().retain(|reply| !reply.is_closed());
                others.get_mut().extend(reply);
            }
            Slot::Vacant(first) => {
                self.tasks.spawn(unplug(connection, first.key().clone()));
                first.insert(reply.into_iter().collect());
            }
        }
    }
}

impl InterfacesActor {
    pub(super) async fn add(&mut self, request: AddInterfaceRequest) -> Result<(), Status> {
        let AddInterfaceRequest { name, device, mac } = request;
        if !is_label(&name) {
            let text = format!(
                "the interface's name {name:?} must be at most 63 lower-case letters, digits and '-'"
            );
            return Err(Status::invalid_argument(text));
        }
        let mac = match mac.as_str() {
            "" => None,
            text => Some(
                text.parse::<MacAddr>()
                    .map_err(|error| Status::invalid_argument(error.to_string()))?,
            ),
        };
        let device = if device.is_empty() {
            secondary_nic(&name)
        } else {
            device
        };
        let (mut connection, vm_network) = (self.connection()?, self.vm_network()?);
        if self.removals.waiters.contains_key(&name) {
            let text = format!("interface {name:?} is being removed");
            return Err(Status::failed_precondition(text));
        }
        if self.table.is_there(&name, &device, mac)? {
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
            options: vm_network.defaults.options(&NicDhcp::default()),
            link_up: true,
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
                return Err(Status::failed_precondition(error_chain(&error)));
            }
        };
        let told = connection.add_nic(nic).await;
        match &told {
            // It may yet be added; then it goes again.
            Err(status) if status.code() == Code::DeadlineExceeded => {
                self.removals.begin(connection, name.clone(), None);
            }
            Err(_) => {
                if let Some(server) = server {
                    server.stop().await;
                }
                release(&vm_network, device).await;
                return told;
            }
            Ok(()) => info!(interface = name, device, "interface added"),
        }
        self.table.add(shown, server, index, true);
        told
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

    /// A removal has ended, one way or the other.
    pub(super) async fn handle_removal(&mut self, name: &str, removed: Result<(), Status>) {
        let removed = match removed {
            Ok(()) => self.release(name).await,
            refused => refused,
        };
        // Those who no longer wait have been told that it goes on.
        for reply in self.removals.waiters.remove(name).unwrap_or_default() {
            let _ = reply.send(removed.clone());
        }
    }

    /// Makes the device of an interface that the VMM has let go of what it was.
    async fn release(&mut self, name: &str) -> Result<(), Status> {
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
            false => Err(Status::internal(format!(
                "interface {name:?} was removed, but its device is not as it was: `husk logs --monitor` tells why"
            ))),
        }
    }

    pub(super) async fn set_link(&mut self, name: &str, up: bool) -> Result<(), Status> {
        let mut connection = self.connection()?;
        self.vm_network()?;
        self.table.has(name)?;
        let id = name.to_owned();
        call_within(AT_ONCE, connection.client.set_link(SetLinkRequest { id, up })).await?;
        info!(interface = name, up, "link set");
        self.table.set_link(name, up);
        Ok(())
    }

    fn connection(&self) -> Result<VmmConnection, Status> {
        let connection = self.connection.clone();
        connection.ok_or_else(|| Status::failed_precondition("the VM is not running"))
    }

    fn vm_network(&self) -> Result<VmNetwork, Status> {
        self.vm_network.clone().ok_or_else(|| {
            Status::failed_precondition(
                "the VM has no network: its manifest asks for none, or it was not started by root",
            )
        })
    }
}

/// Does something that blocks.
async fn run_blocking<T: Send + 'static>(
    vm_network: &VmNetwork,
    work: impl FnOnce(&VmNetwork) -> T + Send + 'static,
) -> Result<T, Status> {
    let vm_network = vm_network.clone();
    let done = spawn_blocking(move || work(&vm_network)).await;
    done.map_err(|error| Status::internal(error.to_string()))
}

/// Whether the device is what it was.
async fn release(vm_network: &VmNetwork, device: String) -> bool {
    let error = match run_blocking(vm_network, move |vm_network| {
        vm_network.release_interface(&device)
    })
    .await
    {
        Ok(Ok(())) => return true,
        Ok(Err(error)) => error_chain(&error),
        Err(status) => status.message().to_owned(),
    };
    // It is tried again at the VM's end.
    warn!(error, "a device was not given back");
    false
}

/// Asks the guest to let go, until it does.
async fn unplug(mut connection: VmmConnection, name: String) -> (String, Result<(), Status>) {
    loop {
        let request = RemoveNicRequest { id: name.clone() };
        let removed = connection
            .client
            .remove_nic(request)
            .await
            .map_err(without_metadata);
        let removed = match removed {
            Err(status) if status.code() == Code::DeadlineExceeded => {
                sleep(AGAIN).await;
                continue;
            }
            // What the VMM does not have is gone.
            Err(status) if status.code() == Code::NotFound => Ok(()),
            removed => removed.map(drop),
        };
        return (name, removed);
    }
}

impl VmmConnection {
    async fn add_nic(&mut self, open: OpenNic) -> Result<(), Status> {
        let (nic, descriptors) = vm_config::plugged_nic(open);
        let borrowed: Vec<_> = descriptors
            .iter()
            .map(|(token, fd)| (*token, std::os::fd::AsFd::as_fd(fd)))
            .collect();
        for part in borrowed.chunks(husk_proto::fds::MAX_FDS_PER_MESSAGE) {
            let sent = self.fds.send(part).await;
            sent.map_err(|error| Status::unavailable(error.to_string()))?;
        }
        drop(descriptors);
        let request = AddNicRequest { nic: Some(nic) };
        call_within(AT_ONCE, self.client.add_nic(request)).await.map(drop)
    }
}

/// Whether it is a DNS label, as interfaces of manifests are called by.
fn is_label(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&name.len())
        && name.bytes().all(plain)
        && !name.starts_with('-')
        && !name.ends_with('-')
}
