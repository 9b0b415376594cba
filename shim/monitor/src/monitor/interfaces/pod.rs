//! The namespace that a VM's interfaces are in: entered, prepared, given back. Everything here blocks.

use std::path::{Path, PathBuf};

use husk_network::dhcp::{DhcpServer, Resolver};
use husk_network::{Fault, Host, Interface, Netns, NetworkError, Place, Prepared};
use husk_proto::shim::v1 as shim;
use husk_vmi::{NicBinding, NicNetwork, VmPlan};
use ipnet::Ipv4Net;

use super::OpenNic;
use super::wanted::{Common, Wanted};
use crate::surroundings::PodNetwork;
use crate::vmm_process;

/// Why a VM has no network.
#[derive(Debug, thiserror::Error)]
pub(in crate::monitor) enum PodError {
    /// What is named as its namespace is none.
    #[error("{network}: {cause}{}", network.way_out())]
    Netns {
        network: PodNetwork,
        cause: std::io::Error,
    },
    /// A guest in it would take the machine's own address.
    #[error(
        "{network}: this is the machine's own network, whose address the guest would take over: name another namespace"
    )]
    Own { network: PodNetwork },
    /// Nobody attaches networks but those who make namespaces.
    #[error(
        "interface {0:?}: a Multus network takes a namespace that it is attached to: name that by --netns"
    )]
    Multus(String),
    #[error("{place}{error}{}", way_out(place, error))]
    Network { place: String, error: NetworkError },
    #[error("preparing the network was cut short")]
    Aborted,
}

/// An error that the machine's own network makes.
fn machines(error: NetworkError) -> PodError {
    PodError::Network {
        place: String::new(),
        error,
    }
}

/// Refuses networks behind a pod's address that the pod itself is in.
fn apart(plan: &VmPlan, net: Ipv4Net) -> Result<(), NetworkError> {
    for nic in &plan.nics {
        let NicBinding::Masquerade { cidr: Some(cidr), .. } = &nic.binding else {
            continue;
        };
        if cidr.contains(&net) || net.contains(cidr) {
            return Err(NetworkError {
                interface: nic.name.clone(),
                fault: Fault::Field {
                    field: "vmNetworkCIDR",
                    why: format!(
                        "{cidr} overlaps {}, the network of husk0: choose another one",
                        net.trunc()
                    ),
                },
            });
        }
    }
    Ok(())
}

/// What to do about it.
fn way_out(place: &str, error: &NetworkError) -> &'static str {
    match &error.fault {
        Fault::NoNic(_) if place.is_empty() => {
            ": no plugin adds devices to a namespace that Husk made; run the VM with --netns"
        }
        Fault::NoNic(_) => ": let a network plugin add it first",
        Fault::Foreign { .. } => ": a namespace is one VM's at a time; if no VM has this one, make a new one",
        _ => "",
    }
}

/// An interface that is ready for its guest.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) nic: OpenNic,
    pub(super) server: Option<DhcpServer>,
    pub(super) shown: shim::Interface,
    /// Its place among the VM's.
    pub(super) index: u8,
}

impl Ready {
    fn new(prepared: Prepared, server: Option<DhcpServer>, wanted: &Wanted) -> Ready {
        let mut addresses: Vec<_> = prepared.nic.addresses.iter().map(|net| net.addr()).collect();
        addresses.sort_by_key(|address| address.is_ipv6());
        let shown = shim::Interface {
            name: prepared.name.clone(),
            mac: prepared.mac.to_string(),
            device: prepared.devices.nic,
            binding: wanted.interface.binding.name().to_owned(),
            addresses: addresses.iter().map(ToString::to_string).collect(),
            mtu: prepared.mtu,
            queues: wanted.interface.queues.into(),
            link_up: wanted.link_up,
            vhost: !prepared.vhost.is_empty(),
            plugged: false,
            leased: Vec::new(),
        };
        let nic = OpenNic {
            name: prepared.name,
            mac: prepared.mac.0,
            mtu: prepared.mtu,
            taps: prepared.taps,
            vhost: prepared.vhost,
            link_up: wanted.link_up,
        };
        Ready {
            nic,
            server,
            shown,
            index: wanted.interface.index,
        }
    }
}

/// A namespace that is this VM's while it runs.
#[derive(Debug, Clone)]
pub(super) struct Pod {
    netns: Netns,
    /// How errors begin.
    place: String,
    /// Where records are kept.
    dir: PathBuf,
    pub(super) common: Common,
}

impl Pod {
    /// Enters the namespace for this VM. What is done in it is recorded in `dir`.
    pub(super) fn enter(plan: &VmPlan, network: &PodNetwork, dir: &Path) -> Result<Pod, PodError> {
        let unusable = |cause| PodError::Netns {
            network: network.clone(),
            cause,
        };
        let path = &network.netns;
        let netns = Netns::open(path).map_err(unusable)?;
        let id = netns.id().map_err(unusable)?;
        if Netns::own().and_then(|own| own.id()).map_err(unusable)? == id {
            return Err(PodError::Own {
                network: network.clone(),
            });
        }
        let place = format!("{network}: ");
        let in_place = |error| PodError::Network {
            place: place.clone(),
            error,
        };
        let resolver = match &network.resolv_conf {
            Some(file) => Resolver::of_pod(file),
            None => Resolver::of_host(Some(path)),
        };
        let common = Common::new(plan, vmm_process::owner(), resolver);
        let common = common.map_err(|fault| in_place(fault.into()))?;
        let path = path.to_owned();
        Place::Netns { path, id }.keep(dir).map_err(in_place)?;
        Ok(Pod {
            netns,
            place,
            dir: dir.to_owned(),
            common,
        })
    }

    /// Makes one for this VM on the machine's own network.
    pub(super) fn make(plan: &VmPlan, dir: &Path) -> Result<Pod, PodError> {
        let multus = |network: &NicNetwork| matches!(network, NicNetwork::Multus { .. });
        if let Some(nic) = plan.nics.iter().find(|nic| multus(&nic.network)) {
            return Err(PodError::Multus(nic.name.clone()));
        }
        let common = Common::new(plan, vmm_process::owner(), Resolver::of_host(None));
        let common = common.map_err(|fault| machines(fault.into()))?;
        let host = Host::default();
        let joined = host
            .join(&format!("{}/{}", plan.namespace, plan.name))
            .map_err(machines)?;
        let kept = apart(plan, joined.net).and_then(|()| joined.place.keep(dir));
        if let Err(error) = kept {
            // What stays is found by the next command.
            let _ = host.leave(&joined.place);
            return Err(machines(error));
        }
        Ok(Pod {
            netns: joined.netns,
            place: String::new(),
            dir: dir.to_owned(),
            common,
        })
    }

    /// Prepares interfaces, and starts what tells their guest its addresses. Within a runtime.
    pub(super) fn prepare(&self, wanted: &[Wanted]) -> Result<Vec<Ready>, PodError> {
        let in_place = |error| PodError::Network {
            place: self.place.clone(),
            error,
        };
        let interfaces: Vec<Interface> = wanted.iter().map(|wanted| wanted.interface.clone()).collect();
        let prepared = husk_network::prepare(&self.netns, &self.dir, &interfaces).map_err(in_place)?;
        let serve = |(prepared, wanted): (Prepared, &Wanted)| {
            let options = wanted.options.clone();
            let server = DhcpServer::start(&self.netns, &wanted.interface, &prepared, options)?;
            Ok(Ready::new(prepared, server, wanted))
        };
        let ready = prepared.into_iter().zip(wanted).map(serve);
        ready.collect::<Result<_, _>>().map_err(in_place)
    }

    /// The same for one.
    pub(super) fn prepare_one(&self, wanted: &Wanted) -> Result<Ready, PodError> {
        self.prepare(std::slice::from_ref(wanted))?
            .pop()
            .ok_or(PodError::Aborted)
    }

    /// Gives a device back that one interface was bound to.
    pub(super) fn give_one_back(&self, device: &str) -> Result<(), NetworkError> {
        husk_network::tear_down_interface(&self.netns, &self.dir, device)
    }

    /// Gives the namespace its network back.
    pub(super) fn give_back(self) -> Result<(), NetworkError> {
        husk_network::take_back(&self.dir, Some(&self.netns))
    }
}
