//! The network namespace of a VM: entered, prepared and restored. All functions block.

use std::path::{Path, PathBuf};

use husk_network::dhcp::{DhcpServer, DnsConfig};
use husk_network::{Interface, Netns, NetworkError, NetworkFault, NetworkLocation, StandaloneNetwork};
use husk_proto::shim::v1 as shim;
use husk_vmi::{NicBinding, NicNetwork, VmPlan};
use ipnet::Ipv4Net;

use super::interface_spec::{InterfaceDefaults, InterfaceSpec};
use crate::monitor::vm_config::OpenNic;
use crate::vm_environment::PodNetwork;
use crate::vmm_process;

/// An error that leaves a VM without its network.
#[derive(Debug, thiserror::Error)]
pub(in crate::monitor) enum VmNetworkError {
    /// The path does not name a network namespace.
    #[error("{network}: {cause}{}", network.hint())]
    Netns {
        network: PodNetwork,
        cause: std::io::Error,
    },
    /// It is the host's own namespace. The guest would take over the host's address.
    #[error(
        "{network}: this is the machine's own network, whose address the guest would take over: name another namespace"
    )]
    Own { network: PodNetwork },
    /// A Multus network is attached by a CNI plugin, which needs a namespace made beforehand.
    #[error("interface {0:?}: a Multus network needs its network namespace: use --netns PATH")]
    Multus(String),
    #[error("{place}{error}{}", hint(place, error))]
    Network { place: String, error: NetworkError },
    #[error("preparing the network was interrupted")]
    Aborted,
}

impl VmNetworkError {
    /// True if the namespace has no device for the interface yet.
    pub(super) fn is_missing(&self) -> bool {
        match self {
            VmNetworkError::Network { error, .. } => matches!(error.fault, NetworkFault::NicNotFound(_)),
            _ => false,
        }
    }
}

/// An error in the host's own network.
fn host_network_error(error: NetworkError) -> VmNetworkError {
    VmNetworkError::Network {
        place: String::new(),
        error,
    }
}

/// Refuses a masquerade network that overlaps the network of the pod.
fn check_overlap(plan: &VmPlan, net: Ipv4Net) -> Result<(), NetworkError> {
    for nic in &plan.nics {
        let NicBinding::Masquerade { cidr: Some(cidr), .. } = &nic.binding else {
            continue;
        };
        if cidr.contains(&net) || net.contains(cidr) {
            return Err(NetworkError {
                interface: nic.name.clone(),
                fault: NetworkFault::InvalidField {
                    field: "vmNetworkCIDR",
                    reason: format!(
                        "{cidr} overlaps {}, the network of husk0: choose another one",
                        net.trunc()
                    ),
                },
            });
        }
    }
    Ok(())
}

/// The end of an error text, which tells the user how to mend the error. Empty if Husk knows no remedy.
fn hint(place: &str, error: &NetworkError) -> &'static str {
    match &error.fault {
        NetworkFault::NicNotFound(_) if place.is_empty() => {
            ": no plugin adds devices to a namespace that Husk made; run the VM with --netns"
        }
        NetworkFault::NicNotFound(_) => ": let a network plugin add it first",
        NetworkFault::UnexpectedDevice { .. } => {
            ": a namespace is one VM's at a time; if no VM has this one, make a new one"
        }
        _ => "",
    }
}

/// An interface that is ready for its guest.
#[derive(Debug)]
pub(super) struct PreparedInterface {
    pub(super) nic: OpenNic,
    pub(super) server: Option<DhcpServer>,
    pub(super) shown: shim::Interface,
    /// Its index among the VM's interfaces.
    pub(super) index: u8,
}

impl PreparedInterface {
    fn new(
        prepared: husk_network::PreparedNic,
        server: Option<DhcpServer>,
        spec: &InterfaceSpec,
    ) -> PreparedInterface {
        let mut addresses: Vec<_> = prepared.nic.addresses.iter().map(|net| net.addr()).collect();
        addresses.sort_by_key(|address| address.is_ipv6());
        let shown = shim::Interface {
            name: prepared.name.clone(),
            mac: prepared.mac.to_string(),
            device: prepared.devices.nic,
            binding: spec.interface.binding.name().to_owned(),
            addresses: addresses.iter().map(ToString::to_string).collect(),
            mtu: prepared.mtu,
            queues: spec.interface.queues.into(),
            link_up: spec.link_up,
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
            link_up: spec.link_up,
            pci_slot: None,
        };
        PreparedInterface {
            nic,
            server,
            shown,
            index: spec.interface.index,
        }
    }
}

/// The network namespace of a running VM.
#[derive(Debug, Clone)]
pub(super) struct VmNetwork {
    netns: Netns,
    /// The beginning of error texts.
    place: String,
    /// Directory of the saved state.
    dir: PathBuf,
    pub(super) defaults: InterfaceDefaults,
}

impl VmNetwork {
    /// Enters a namespace for this VM. Changes in it are recorded in `dir`.
    pub(super) fn enter(
        plan: &VmPlan,
        network: &PodNetwork,
        dir: &Path,
    ) -> Result<VmNetwork, VmNetworkError> {
        let unusable = |cause| VmNetworkError::Netns {
            network: network.clone(),
            cause,
        };
        let path = &network.netns;
        let netns = Netns::open(path).map_err(unusable)?;
        let id = netns.id().map_err(unusable)?;
        if Netns::own().and_then(|own| own.id()).map_err(unusable)? == id {
            return Err(VmNetworkError::Own {
                network: network.clone(),
            });
        }
        let place = format!("{network}: ");
        let in_place = |error| VmNetworkError::Network {
            place: place.clone(),
            error,
        };
        let resolver = match &network.resolv_conf {
            Some(file) => DnsConfig::from_resolv_conf(file),
            None => DnsConfig::for_host(Some(path)),
        };
        let defaults = InterfaceDefaults::new(plan, vmm_process::owner(), resolver);
        let defaults = defaults.map_err(|fault| in_place(fault.into()))?;
        let path = path.to_owned();
        NetworkLocation::Netns { path, id }.save(dir).map_err(in_place)?;
        Ok(VmNetwork {
            netns,
            place,
            dir: dir.to_owned(),
            defaults,
        })
    }

    /// Creates a namespace for this VM, joined to the host's network.
    pub(super) fn make(plan: &VmPlan, dir: &Path) -> Result<VmNetwork, VmNetworkError> {
        let multus = |network: &NicNetwork| matches!(network, NicNetwork::Multus { .. });
        if let Some(nic) = plan.nics.iter().find(|nic| multus(&nic.network)) {
            return Err(VmNetworkError::Multus(nic.name.clone()));
        }
        let defaults = InterfaceDefaults::new(plan, vmm_process::owner(), DnsConfig::for_host(None));
        let defaults = defaults.map_err(|fault| host_network_error(fault.into()))?;
        let host = StandaloneNetwork::default();
        let joined = host
            .attach(&format!("{}/{}", plan.namespace, plan.name))
            .map_err(host_network_error)?;
        let kept = check_overlap(plan, joined.net).and_then(|()| joined.location.save(dir));
        if let Err(error) = kept {
            // The next command cleans up what remains.
            let _ = host.detach(&joined.location);
            return Err(host_network_error(error));
        }
        Ok(VmNetwork {
            netns: joined.netns,
            place: String::new(),
            dir: dir.to_owned(),
            defaults,
        })
    }

    /// The namespace.
    pub(super) fn netns(&self) -> Netns {
        self.netns.clone()
    }

    /// Prepares interfaces and starts their DHCP servers. Must be called within a tokio runtime.
    pub(super) fn prepare(&self, spec: &[InterfaceSpec]) -> Result<Vec<PreparedInterface>, VmNetworkError> {
        let in_place = |error| VmNetworkError::Network {
            place: self.place.clone(),
            error,
        };
        let interfaces: Vec<Interface> = spec.iter().map(|spec| spec.interface.clone()).collect();
        let prepared = husk_network::prepare(&self.netns, &self.dir, &interfaces).map_err(in_place)?;
        let serve = |(prepared, spec): (husk_network::PreparedNic, &InterfaceSpec)| {
            let options = spec.options.clone();
            let server = DhcpServer::start(&self.netns, &spec.interface, &prepared, options)?;
            Ok(PreparedInterface::new(prepared, server, spec))
        };
        let ready = prepared.into_iter().zip(spec).map(serve);
        ready.collect::<Result<_, _>>().map_err(in_place)
    }

    /// The same for one interface.
    pub(super) fn prepare_one(&self, spec: &InterfaceSpec) -> Result<PreparedInterface, VmNetworkError> {
        self.prepare(std::slice::from_ref(spec))?
            .pop()
            .ok_or(VmNetworkError::Aborted)
    }

    /// Restores the device of one interface.
    pub(super) fn release_interface(&self, device: &str) -> Result<(), NetworkError> {
        husk_network::tear_down_interface(&self.netns, &self.dir, device)
    }

    /// Restores the network of the namespace.
    pub(super) fn release(self) -> Result<(), NetworkError> {
        husk_network::tear_down_saved(&self.dir, Some(&self.netns))
    }
}
