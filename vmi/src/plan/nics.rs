//! The network interfaces of the plan.

use std::collections::HashSet;

use super::nic::{NicBinding, NicDhcp, NicNetwork, NicPlan, NicPort, NicProtocol};
use super::types::Topology;
use crate::load::Vmi;
use crate::mac;
use crate::types::{DhcpOptions, Empty, Interface, Network, PodNetwork, Port};
use crate::validate::ipv4;

/// Maximum number of queue pairs of a NIC in the VMM. A guest with more vCPUs shares them.
const MOST_PAIRS: u32 = 127;
/// KubeVirt's name for the default interface and network.
const DEFAULT: &str = "default";

impl Vmi {
    /// Path of the entry of this name in `networks`, or of the list if there is none.
    #[must_use]
    pub fn network_field(&self, name: &str) -> String {
        match self.spec.networks.iter().position(|network| network.name == name) {
            Some(i) => self.at(&format!("networks[{i}]")),
            None => self.at("networks"),
        }
    }
}

/// All interfaces of a guest with their networks: those listed and not absent. A VMI without networks and interfaces is
/// on the pod network, unless `autoattachPodInterface` is false.
pub(crate) fn effective_interfaces(vmi: &Vmi) -> Vec<(Interface, Network)> {
    let networks = &vmi.spec.networks;
    if networks.is_empty() && vmi.has_pod_network() {
        let interface = Interface {
            name: DEFAULT.to_owned(),
            bridge: Some(Empty {}),
            ..Interface::default()
        };
        let network = Network {
            name: DEFAULT.to_owned(),
            pod: Some(PodNetwork::default()),
            multus: None,
        };
        return vec![(interface, network)];
    }
    let present = vmi
        .spec
        .domain
        .devices
        .interfaces
        .iter()
        .filter(|i| !i.is_absent());
    present
        .filter_map(|interface| {
            let network = networks.iter().find(|network| network.name == interface.name)?;
            Some((interface.clone(), network.clone()))
        })
        .collect()
}

/// Plans every interface of a VMI that validates.
pub(super) fn plan(vmi: &Vmi, topology: Topology) -> Vec<NicPlan> {
    let pairs = match vmi.spec.domain.devices.network_interface_multiqueue {
        true => topology.vcpus().clamp(1, MOST_PAIRS),
        false => 1,
    };
    let all = effective_interfaces(vmi);
    all.into_iter()
        .map(|(interface, network)| one(interface, network, pairs))
        .collect()
}

fn one(interface: Interface, network: Network, pairs: u32) -> NicPlan {
    // Emulated models have one queue pair in KubeVirt.
    let queues = match interface.emulated_model() {
        None => u16::try_from(pairs).unwrap_or(1),
        Some(_) => 1,
    };
    NicPlan {
        binding: binding(&interface, network.pod.as_ref()),
        network: match network.multus {
            Some(multus) => NicNetwork::Multus {
                network_name: multus.network_name,
                default: multus.default,
            },
            None => NicNetwork::Pod,
        },
        mac: interface.mac_address.as_deref().and_then(mac::parse_ethernet),
        queues,
        link_up: interface.state.as_deref() != Some("down"),
        dhcp: interface.dhcp_options.map(dhcp).unwrap_or_default(),
        name: interface.name,
    }
}

/// Binding of an interface; bridge is KubeVirt's default.
fn binding(interface: &Interface, pod: Option<&PodNetwork>) -> NicBinding {
    if interface.masquerade.is_none() {
        return NicBinding::Bridge;
    }
    let mut seen = HashSet::new();
    let ports = interface.ports.iter().filter_map(port);
    NicBinding::Masquerade {
        cidr: pod.and_then(PodNetwork::cidr).and_then(|cidr| cidr.parse().ok()),
        cidr6: pod.and_then(PodNetwork::cidr6).and_then(|cidr| cidr.parse().ok()),
        ports: ports.filter(|port| seen.insert(*port)).collect(),
    }
}

fn port(given: &Port) -> Option<NicPort> {
    let protocol = match given.protocol.as_deref() {
        Some("UDP") => NicProtocol::Udp,
        _ => NicProtocol::Tcp,
    };
    let port = u16::try_from(given.port).ok()?;
    Some(NicPort { protocol, port })
}

fn dhcp(given: DhcpOptions) -> NicDhcp {
    let text = |text: Option<String>| text.filter(|text| !text.is_empty());
    let servers = given.ntp_servers.iter();
    let private = given.private_options.into_iter();
    NicDhcp {
        boot_file_name: text(given.boot_file_name),
        tftp_server_name: text(given.tftp_server_name),
        ntp_servers: servers.filter_map(|server| ipv4(server)).collect(),
        private: private
            .filter_map(|option| Some((u8::try_from(option.option).ok()?, option.value)))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use serde_json::{Value, json};

    use super::*;
    use crate::{Loaded, PodResources, VmPlan, load};

    /// The plan of a VM with four vCPUs, these interfaces and networks.
    fn planned(interfaces: Value, networks: Value, devices: &[(&str, Value)]) -> VmPlan {
        planned_with(4, interfaces, networks, devices)
    }

    fn planned_with(cores: u32, interfaces: Value, networks: Value, devices: &[(&str, Value)]) -> VmPlan {
        let mut manifest = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "a.b"},
            "spec": {
                "domain": {
                    "cpu": {"cores": cores},
                    "resources": {"requests": {"memory": "128Mi"}},
                    "devices": {"interfaces": interfaces},
                },
                "networks": networks,
                "volumes": [{"name": "root", "emptyDisk": {"capacity": "1Gi"}}],
            },
        });
        for (name, value) in devices {
            manifest["spec"]["domain"]["devices"][*name] = value.clone();
        }
        let Loaded::Vmi(vmi) = load(&manifest.to_string()).unwrap().remove(0) else {
            panic!("it is a VMI")
        };
        let plan = crate::plan(&vmi, &PodResources::default()).unwrap();
        let again: VmPlan = serde_json::from_value(serde_json::to_value(&plan).unwrap()).unwrap();
        assert_eq!(again, plan);
        plan
    }

    fn on_pod(more: Value, pod: Value) -> NicPlan {
        let mut interface = json!({"name": "default"});
        for (name, value) in more.as_object().unwrap() {
            interface[name] = value.clone();
        }
        let networks = json!([{"name": "default", "pod": pod}]);
        planned(json!([interface]), networks, &[]).nics.remove(0)
    }

    fn plain(name: &str) -> NicPlan {
        NicPlan {
            name: name.to_owned(),
            network: NicNetwork::Pod,
            binding: NicBinding::Bridge,
            mac: None,
            queues: 1,
            link_up: true,
            dhcp: NicDhcp::default(),
        }
    }

    #[test]
    fn a_vm_without_interfaces_is_bridged_to_the_pods_network() {
        assert_eq!(planned(json!([]), json!([]), &[]).nics, [plain("default")]);
        assert_eq!(on_pod(json!({}), json!({})), plain("default"));
        let off = [("autoattachPodInterface", json!(false))];
        assert_eq!(planned(json!([]), json!([]), &off).nics, []);
        let listed = planned(
            json!([{"name": "a", "bridge": {}}]),
            json!([{"name": "a", "pod": {}}]),
            &off,
        );
        assert_eq!(listed.nics, [plain("a")]);
    }

    #[test]
    fn interfaces_keep_their_order_and_absent_ones_are_left_out() {
        let multus = |name: &str| json!({"name": name, "multus": {"networkName": format!("net/{name}")}});
        let interfaces = json!([
            {"name": "c", "bridge": {}, "state": "down"},
            {"name": "gone", "bridge": {}, "state": "absent"},
            {"name": "a", "masquerade": {}, "state": "up"},
        ]);
        let networks = json!([{"name": "a", "pod": {}}, multus("gone"), multus("c")]);
        let nics = planned(interfaces, networks, &[]).nics;
        let c = NicPlan {
            network: NicNetwork::Multus {
                network_name: "net/c".to_owned(),
                default: false,
            },
            link_up: false,
            ..plain("c")
        };
        let a = NicPlan {
            binding: NicBinding::Masquerade {
                cidr: None,
                cidr6: None,
                ports: Vec::new(),
            },
            ..plain("a")
        };
        assert_eq!(nics, [c, a]);
        let default = json!([{"name": "a", "multus": {"networkName": "n", "default": true}}]);
        let nics = planned(json!([{"name": "a"}]), default, &[]).nics;
        assert!(matches!(
            &nics[0].network,
            NicNetwork::Multus { default: true, .. }
        ));
    }

    #[test]
    fn masquerade_has_a_network_and_ports() {
        let ports = json!([
            {"port": 80}, {"port": 53, "protocol": "UDP"}, {"port": 65535, "protocol": ""}, {"port": 80, "protocol": "TCP"},
        ]);
        let pod = json!({"vmNetworkCIDR": "10.1.2.0/30", "vmIPv6NetworkCIDR": "fd00::/126"});
        let nic = on_pod(json!({"masquerade": {}, "ports": ports}), pod);
        let port = |protocol, port| NicPort { protocol, port };
        let binding = NicBinding::Masquerade {
            cidr: Some("10.1.2.0/30".parse().unwrap()),
            cidr6: Some("fd00::/126".parse().unwrap()),
            ports: vec![
                port(NicProtocol::Tcp, 80),
                port(NicProtocol::Udp, 53),
                port(NicProtocol::Tcp, 65535),
            ],
        };
        assert_eq!(nic.binding, binding, "each port once");
    }

    #[test]
    fn virtio_has_a_pair_of_queues_for_each_vcpu_if_asked_to() {
        let multiqueue = [("networkInterfaceMultiqueue", json!(true))];
        let queues = |model: &str, devices: &[(&str, Value)]| {
            let interfaces = json!([{"name": "a", "model": model}]);
            planned(interfaces, json!([{"name": "a", "pod": {}}]), devices).nics[0].queues
        };
        assert_eq!([queues("", &multiqueue), queues("virtio", &multiqueue)], [4, 4]);
        assert_eq!([queues("e1000", &multiqueue), queues("virtio", &[])], [1, 1]);
    }

    #[test]
    fn there_are_no_more_pairs_than_a_nic_has() {
        let multiqueue = [("networkInterfaceMultiqueue", json!(true))];
        let queues = |cores| planned_with(cores, json!([]), json!([]), &multiqueue).nics[0].queues;
        assert_eq!([127, 128, 254].map(queues), [127; 3]);
    }

    #[test]
    fn the_guests_address_and_dhcp_options_are_the_manifests() {
        let options = json!({
            "bootFileName": "boot", "tftpServerName": "tftp", "ntpServers": ["10.0.0.1"],
            "privateOptions": [{"option": 254, "value": "x"}, {"option": 224, "value": "y"}],
        });
        let nic = on_pod(
            json!({"macAddress": "DE-ad-00-00-be-af", "dhcpOptions": options}),
            json!({}),
        );
        assert_eq!(nic.mac, Some([0xde, 0xad, 0, 0, 0xbe, 0xaf]));
        assert_eq!(serde_json::to_value(&nic).unwrap()["mac"], "de:ad:00:00:be:af");
        let dhcp = NicDhcp {
            boot_file_name: Some("boot".to_owned()),
            tftp_server_name: Some("tftp".to_owned()),
            ntp_servers: vec![Ipv4Addr::new(10, 0, 0, 1)],
            private: vec![(254, "x".to_owned()), (224, "y".to_owned())],
        };
        assert_eq!(nic.dhcp, dhcp);
    }
}
