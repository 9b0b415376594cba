//! Interfaces and networks that are met differently.

use crate::field::Note;
use crate::load::Vmi;
use crate::schema::Findings;

pub(super) fn support(vmi: &Vmi, found: &mut Findings) {
    let mut note = |field: String, text: String| found.notes.push(Note::new(vmi.at(&field), text));
    for (i, interface) in vmi.spec.domain.devices.interfaces.iter().enumerate() {
        let path = format!("domain.devices.interfaces[{i}]");
        if let Some(model) = interface.emulated_model() {
            let text = format!("{model} is served as virtio: the guest needs the driver virtio_net");
            note(format!("{path}.model"), text);
        }
        if interface.masquerade.is_some() {
            continue;
        }
        if !interface.ports.is_empty() {
            let text = "the guest is on the network itself: with bridge, every port reaches it";
            note(format!("{path}.ports"), text.to_owned());
        }
        let networks = vmi.spec.networks.iter().enumerate();
        for (j, network) in networks.filter(|(_, network)| network.name == interface.name) {
            let Some(pod) = &network.pod else { continue };
            for (name, given) in [("vmNetworkCIDR", pod.cidr()), ("vmIPv6NetworkCIDR", pod.cidr6())] {
                if given.is_some() {
                    let text = "only masquerade has a network behind the pod; with bridge the guest has the pod's address";
                    note(format!("networks[{j}].pod.{name}"), text.to_owned());
                }
            }
        }
    }
}
