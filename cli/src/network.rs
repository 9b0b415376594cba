//! Checks which networks of a VM this user can set up on this host.

use std::net::Ipv4Addr;
use std::path::Path;

use husk_monitor::snapshot::Snapshot;
use husk_network::dhcp::DnsConfig;
use husk_network::{Masquerade, PrivilegeError, check_privileges};
use husk_vmi::{CauseReason, FieldError, NicBinding, NicNetwork, VmPlan, Vmi};

use crate::failure::{Failure, chain};

/// Rejects Multus networks, which only exist in a network namespace given by --netns.
pub(crate) fn reject_multus(vmi: &Vmi, plan: &VmPlan) -> Vec<FieldError> {
    let multus = |network: &NicNetwork| matches!(network, NicNetwork::Multus { .. });
    let nics = plan.nics.iter().filter(|nic| multus(&nic.network));
    nics.map(|nic| FieldError {
        reason: CauseReason::FieldValueNotSupported,
        field: format!("{}.multus", vmi.network_field(&nic.name)),
        message: "Multus networks need --netns: let a CNI plugin attach them to a network namespace and pass its path"
            .into(),
    })
    .collect()
}

/// Removes the interfaces from the plan that this process lacks the privileges for. Returns a warning about it.
pub(crate) fn drop_unavailable(
    vmi: &Vmi,
    plan: &mut VmPlan,
    netns: Option<&Path>,
) -> Result<Option<String>, Failure> {
    match (netns, check_privileges(netns.is_none())) {
        (Some(path), Err(why)) => Err(Failure::Runtime(format!(
            "--netns {}: {}; {}",
            path.display(),
            chain(&why),
            hint(&why)
        ))),
        (None, Err(why)) if !plan.nics.is_empty() => {
            plan.nics.clear();
            Ok(Some(format!(
                "{}: the VM gets no network device: {}; {}",
                vmi.network_field(""),
                chain(&why),
                hint(&why)
            )))
        }
        (_, Err(_)) => Ok(None),
        (netns, Ok(())) => Ok(dns_note(vmi, plan, &DnsConfig::for_host(netns).ipv4)),
    }
}

/// Checks that this process can set up the network of a VM that goes on from a snapshot: its guest has the devices.
pub(crate) fn check_restored(snapshot: &Snapshot, netns: Option<&Path>) -> Result<(), Failure> {
    let Some(name) = snapshot.interface_names().next() else {
        return Ok(());
    };
    check_privileges(netns.is_none()).map_err(|why| {
        let hint = match &why {
            PrivilegeError::Tun(_) => hint(&why),
            _ => "run `husk restore` as root",
        };
        Failure::Runtime(format!(
            "interface {name:?}: the guest has it, but it cannot be set up: {}; {hint}",
            chain(&why)
        ))
    })
}

/// Warning about name servers that the guest cannot reach.
fn dns_note(vmi: &Vmi, plan: &VmPlan, servers: &[Ipv4Addr]) -> Option<String> {
    let first = plan.nics.first()?;
    if servers.is_empty() {
        let field = vmi.network_field(&first.name);
        let text = "the guest gets no name server: /etc/resolv.conf names none that it can reach";
        return Some(format!("{field}: {text}"));
    }
    plan.nics.iter().find_map(|nic| {
        let NicBinding::Masquerade { cidr, .. } = &nic.binding else {
            return None;
        };
        let cidr = cidr.unwrap_or(Masquerade::default().cidr);
        let server = servers.iter().find(|server| cidr.contains(*server))?;
        Some(format!(
            "{}.pod.vmNetworkCIDR: the guest cannot reach the name server {server}, which is in its own network {cidr}; \
             choose another network",
            vmi.network_field(&nic.name)
        ))
    })
}

fn hint(why: &PrivilegeError) -> &'static str {
    match why {
        PrivilegeError::Capability(_) | PrivilegeError::ForeignNetwork => "run `husk run` as root",
        PrivilegeError::Tun(_) => "`husk doctor` shows how to enable it",
    }
}

#[cfg(test)]
mod tests {
    use husk_vmi::{KernelOverride, Loaded, NicDhcp, NicPlan, PodResources};

    use super::*;

    fn planned() -> (Box<Vmi>, VmPlan) {
        let text = "\
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: demo}
spec:
  domain:
    resources: {requests: {memory: 128Mi}}
    devices: {interfaces: [{name: default, masquerade: {}}, {name: red, bridge: {}}]}
  networks: [{name: default, pod: {}}, {name: red, multus: {networkName: red-net}}]
";
        let Some(Loaded::Vmi(vmi)) = husk_vmi::load(text).unwrap().pop() else {
            panic!("no VMI");
        };
        let kernel = KernelOverride {
            kernel: Some("/vmlinuz".into()),
            ..KernelOverride::default()
        };
        let resources = PodResources {
            kernel: Some(kernel),
            ..PodResources::default()
        };
        let mut plan = husk_vmi::plan(&vmi, &resources).unwrap();
        let nic = |name: &str, network| NicPlan {
            name: name.into(),
            network,
            binding: NicBinding::Bridge,
            mac: None,
            queues: 1,
            link_up: true,
            dhcp: NicDhcp::default(),
        };
        let multus = NicNetwork::Multus {
            network_name: "red-net".into(),
            default: false,
        };
        plan.nics = vec![nic("default", NicNetwork::Pod), nic("red", multus)];
        (vmi, plan)
    }

    #[test]
    fn a_multus_network_without_netns_is_rejected() {
        let (vmi, mut plan) = planned();
        let errors = reject_multus(&vmi, &plan);
        let text: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(
            text,
            [
                "spec.networks[1].multus: Unsupported value: Multus networks need --netns: let a CNI plugin attach them \
                 to a network namespace and pass its path"
            ]
        );
        plan.nics.pop();
        assert!(reject_multus(&vmi, &plan).is_empty());
    }

    #[test]
    fn unreachable_name_servers_cause_a_warning() {
        let (vmi, mut plan) = planned();
        let server = |last| Ipv4Addr::new(10, 0, 2, last);
        let text = |plan: &VmPlan, servers: &[Ipv4Addr]| dns_note(&vmi, plan, servers);
        plan.nics[0].binding = NicBinding::Bridge;
        assert_eq!(text(&plan, &[server(3)]), None);
        let none = text(&plan, &[]).unwrap();
        assert!(
            none.starts_with("spec.networks[0]: the guest gets no name server"),
            "{none}"
        );
        plan.nics[0].binding = NicBinding::Masquerade {
            cidr: None,
            cidr6: None,
            ports: Vec::new(),
        };
        assert_eq!(
            text(&plan, &[Ipv4Addr::new(192, 0, 2, 1), server(3)]).unwrap(),
            "spec.networks[0].pod.vmNetworkCIDR: the guest cannot reach the name server 10.0.2.3, which is in its own \
             network 10.0.2.0/24; choose another network"
        );
        plan.nics.clear();
        assert_eq!(text(&plan, &[]), None);
    }

    #[test]
    fn without_privileges_the_vm_has_no_network() {
        let (vmi, mut plan) = planned();
        let before = plan.nics.clone();
        match check_privileges(true) {
            Ok(()) => {
                drop_unavailable(&vmi, &mut plan, None).unwrap();
                assert_eq!(plan.nics, before);
            }
            Err(_) => {
                let warning = drop_unavailable(&vmi, &mut plan, None).unwrap().unwrap();
                assert!(
                    warning.starts_with("spec.networks: the VM gets no network device: "),
                    "{warning}"
                );
                assert_eq!(plan.nics, []);
                assert_eq!(drop_unavailable(&vmi, &mut plan, None).unwrap(), None);
                let error = drop_unavailable(&vmi, &mut plan, Some(Path::new("/run/netns/x"))).unwrap_err();
                assert!(
                    matches!(error, Failure::Runtime(text) if text.starts_with("--netns /run/netns/x: "))
                );
            }
        }
    }
}
