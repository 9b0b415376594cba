//! Gives each NIC of a restored guest another MAC address: the guest releases the NIC that it was saved with, and finds
//! another in its slot.
//!
//! A driver reads the address when it finds a NIC. So the guest goes on with stand-ins: the NICs that it was saved
//! with, but for their taps, which lead nowhere, and their links, which are down. No frame with an old address leaves.

use std::time::Duration;

use futures_util::future::try_join_all;
use husk_network::{NetworkError, unconnected_tap};
use husk_proto::vmm::v1::{InfoRequest, RemoveNicRequest};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tonic::{Code, Status};
use tracing::info;

use super::vm_config::OpenNic;
use super::vmm_connection::VmmConnection;
use crate::snapshot::OpenSnapshot;

/// Maximum time for the guest to release a NIC. The VMM answers before.
const RELEASED_WITHIN: Duration = Duration::from_secs(35);

/// The NICs that the guest gets, which are ready.
#[derive(Debug)]
pub(super) struct Replug(Vec<OpenNic>);

impl Replug {
    /// Keeps the NICs, and returns a stand-in for each.
    pub(super) async fn instead_of(
        nics: Vec<OpenNic>,
        saved: &OpenSnapshot,
    ) -> Result<(Vec<OpenNic>, Replug), NetworkError> {
        let mut stand_ins = Vec::new();
        for nic in &nics {
            let (name, queues) = (nic.name.clone(), nic.taps.len());
            let taps = spawn_blocking(move || unconnected_tap(&name, queues)).await;
            stand_ins.push(OpenNic {
                name: nic.name.clone(),
                mac: saved.mac(&nic.name).unwrap_or(nic.mac),
                mtu: nic.mtu,
                taps: taps.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?,
                vhost: Vec::new(),
                link_up: false,
                pci_slot: nic.pci_slot,
            });
        }
        Ok((stand_ins, Replug(nics)))
    }

    /// Finds the slots of the NICs in the machine that was built.
    ///
    /// # Errors
    /// The guest cannot release one.
    pub(super) async fn find_slots(&mut self, connection: &mut VmmConnection) -> Result<(), Status> {
        let info = connection.client.info(InfoRequest {}).await?.into_inner();
        for nic in &mut self.0 {
            let found = info.nics.iter().find(|found| found.id == nic.name);
            let found = found.ok_or_else(|| Status::internal("the machine lacks an interface"))?;
            if !found.ejectable {
                return Err(Status::failed_precondition(format!(
                    "interface {:?}: the guest was saved by a Husk that did not tell it how to release the NIC: leave \
                     out --replug-nics, or make another snapshot after the guest has booted again",
                    nic.name
                )));
            }
            nic.pci_slot = u8::try_from(found.pci_slot).ok();
        }
        Ok(())
    }

    /// Has the guest, which runs, release each NIC, and plugs the others.
    pub(super) async fn execute(self, mut connection: VmmConnection) -> Result<(), Status> {
        let releases = self.0.iter().map(|nic| release(connection.clone(), &nic.name));
        try_join_all(releases).await?;
        for nic in self.0 {
            let name = nic.name.clone();
            let slot = connection.add_nic(nic).await?;
            info!(interface = name, slot, "the NIC was replaced");
        }
        Ok(())
    }
}

async fn release(mut connection: VmmConnection, name: &str) -> Result<(), Status> {
    let request = RemoveNicRequest { id: name.to_owned() };
    match timeout(RELEASED_WITHIN, connection.client.remove_nic(request)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(status)) if status.code() != Code::DeadlineExceeded => Err(status),
        Ok(Err(_)) | Err(_) => Err(Status::deadline_exceeded(format!(
            "interface {name:?}: the guest has not released its NIC within 30 s, so that it cannot have another \
             address: --replug-nics needs a guest with ACPI PCI hotplug (Linux: CONFIG_HOTPLUG_PCI_ACPI)"
        ))),
    }
}
