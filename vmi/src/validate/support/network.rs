//! Warnings about interfaces and networks.

use crate::field::Warning;
use crate::load::Vmi;
use crate::schema::Diagnostics;

pub(super) fn support(vmi: &Vmi, found: &mut Diagnostics) {
    let mut warn = |field: String, text: String| found.warnings.push(Warning::new(vmi.at(&field), text));
    for (i, interface) in vmi.spec.domain.devices.interfaces.iter().enumerate() {
        let path = format!("domain.devices.interfaces[{i}]");
        if let Some(model) = interface.emulated_model() {
            let text = format!("{model} is provided as virtio: the guest needs the driver virtio_net");
            warn(format!("{path}.model"), text);
        }
        if interface.masquerade.is_some() {
            continue;
        }
        if !interface.ports.is_empty() {
            let text = "is ignored: with bridge all ports of the guest are reachable";
            warn(format!("{path}.ports"), text.to_owned());
        }
        let networks = vmi.spec.networks.iter().enumerate();
        for (j, network) in networks.filter(|(_, network)| network.name == interface.name) {
            let Some(pod) = &network.pod else { continue };
            for (name, given) in [("vmNetworkCIDR", pod.cidr()), ("vmIPv6NetworkCIDR", pod.cidr6())] {
                if given.is_some() {
                    let text =
                        "is ignored: only masquerade uses it; with bridge the guest gets the pod's address";
                    warn(format!("networks[{j}].pod.{name}"), text.to_owned());
                }
            }
        }
    }
}
