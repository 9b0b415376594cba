//! Synchronisation of a VMI's interfaces.

use std::collections::{BTreeMap, HashSet};

use futures_util::future::join_all;
use husk_network::MacAddr;
use husk_proto::shim::v1::change::Kind;
use husk_proto::shim::v1::{AddInterfaceRequest, Interface, InterfaceStatus};
use husk_vmi::{InterfaceUpdate, NicNetwork, NicPlan};

use super::{SyncProgress, VmiSync};
use crate::monitor::vm_error::VmError;

impl VmiSync {
    /// Unplugs and plugs interfaces and sets their links. Returns the state of each.
    pub(super) async fn interfaces(
        &self,
        wanted: Vec<InterfaceUpdate>,
        done: &mut SyncProgress,
    ) -> Result<Vec<InterfaceStatus>, VmError> {
        let stay = wanted.iter().filter_map(|wanted| match wanted {
            InterfaceUpdate::Planned { name, .. } => Some(name.as_str()),
            InterfaceUpdate::Added(nic) => Some(nic.name.as_str()),
            InterfaceUpdate::Absent { .. } => None,
        });
        let mut statuses: BTreeMap<String, InterfaceStatus> = BTreeMap::new();
        for status in self.unplug_interfaces(&stay.collect(), done).await {
            statuses.insert(status.name.clone(), status);
        }
        for wanted in wanted {
            let status = match wanted {
                InterfaceUpdate::Planned { name, link_up } => self.planned(&name, link_up, done).await?,
                InterfaceUpdate::Added(nic) => self.added(*nic, done).await?,
                InterfaceUpdate::Absent { name, planned } => {
                    if statuses.contains_key(&name) {
                        continue;
                    }
                    let (phase, message) = match planned {
                        true => (
                            "RestartRequired",
                            "it was present at boot and stays until the VM ends",
                        ),
                        false => ("Absent", ""),
                    };
                    let interface = self.interface(&name);
                    status(name, interface, phase, message.to_owned())
                }
            };
            done.waits |= matches!(status.phase.as_str(), "Pending" | "Failed");
            statuses.insert(status.name.clone(), status);
        }
        Ok(statuses.into_values().collect())
    }

    /// Unplugs hotplugged interfaces that are not in `stay`, in parallel. Returns those that the guest has not
    /// released.
    async fn unplug_interfaces(&self, stay: &HashSet<&str>, done: &mut SyncProgress) -> Vec<InterfaceStatus> {
        let limit = self.release_timeout();
        let superfluous = self.interfaces.list().into_iter();
        let superfluous = superfluous.filter(|shown| shown.plugged && !stay.contains(shown.name.as_str()));
        let removals = superfluous.map(async |shown| {
            let removed = self.interfaces.remove_within(limit, shown.name.clone()).await;
            (shown, removed)
        });
        let mut left = Vec::new();
        for (shown, removed) in join_all(removals).await {
            let message = match removed {
                Some(Ok(())) => {
                    done.note(Kind::InterfaceRemoved, &shown.name);
                    continue;
                }
                Some(Err(VmError::NotFound(_))) => continue,
                Some(Err(refused)) => refused.to_string(),
                None => "the guest has not released it".to_owned(),
            };
            done.waits = true;
            let interface = self.interface(&shown.name);
            left.push(status(shown.name, interface, "Detaching", message));
        }
        left
    }

    /// Sets the link of an interface that was present at the start. Nothing else of it can change.
    async fn planned(
        &self,
        name: &str,
        link_up: bool,
        done: &mut SyncProgress,
    ) -> Result<InterfaceStatus, VmError> {
        self.link(name, link_up, done).await?;
        Ok(status(
            name.to_owned(),
            self.interface(name),
            "Ready",
            String::new(),
        ))
    }

    async fn added(&self, nic: NicPlan, done: &mut SyncProgress) -> Result<InterfaceStatus, VmError> {
        let name = nic.name.as_str();
        let is_there = self.interface(name).is_some();
        if !is_there && self.plan.nics.is_empty() && self.environment.network.is_none() {
            let text = "the VM was started without a network";
            return Ok(status(name.to_owned(), None, "NoNetwork", text.to_owned()));
        }
        if !is_there && nic.network == NicNetwork::Pod {
            let text = "an interface on the pod network cannot be added while the VM runs";
            return Ok(status(name.to_owned(), None, "RestartRequired", text.to_owned()));
        }
        let request = AddInterfaceRequest {
            name: name.to_owned(),
            device: String::new(),
            mac: nic.mac.map(|mac| MacAddr(mac).to_string()).unwrap_or_default(),
        };
        // If the interface is present, this checks that it is the same one.
        match self.interfaces.add(request, nic.dhcp, nic.link_up).await {
            Ok(()) if !is_there => done.note(Kind::InterfaceAdded, name),
            Ok(()) => {}
            Err(refused) => {
                let waits = matches!(refused, VmError::NotFound(_))
                    || [VmError::being_saved(), VmError::interface_leaves(name)].contains(&refused);
                let phase = if waits { "Pending" } else { "Failed" };
                let interface = self.interface(name);
                return Ok(status(name.to_owned(), interface, phase, refused.to_string()));
            }
        }
        self.link(name, nic.link_up, done).await?;
        Ok(status(
            name.to_owned(),
            self.interface(name),
            "Ready",
            String::new(),
        ))
    }

    async fn link(&self, name: &str, up: bool, done: &mut SyncProgress) -> Result<(), VmError> {
        if self.interface(name).is_some_and(|shown| shown.link_up != up) {
            self.interfaces.set_link(name.to_owned(), up).await?;
            done.note(if up { Kind::LinkUp } else { Kind::LinkDown }, name);
        }
        Ok(())
    }

    fn interface(&self, name: &str) -> Option<Interface> {
        let mut shown = self.interfaces.list().into_iter();
        shown.find(|shown| shown.name == name)
    }
}

fn status(name: String, interface: Option<Interface>, phase: &str, message: String) -> InterfaceStatus {
    InterfaceStatus {
        name,
        interface,
        phase: phase.to_owned(),
        message,
    }
}
