//! Rules on networks.

use std::collections::HashSet;

use super::list_limit;
use crate::field::FieldError;
use crate::load::Vmi;

pub(super) fn check(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    let list = vmi.at("networks");
    let networks = &vmi.spec.networks;
    list_limit(&list, networks.len(), errors);
    let used: HashSet<&str> = vmi
        .spec
        .domain
        .devices
        .interfaces
        .iter()
        .map(|i| i.name.as_str())
        .collect();
    let mut names = HashSet::new();
    for (i, network) in networks.iter().enumerate() {
        let path = format!("{list}[{i}]");
        let field = format!("{path}.name");
        let name = &network.name;
        if !names.insert(name) {
            let text =
                format!("Network with name \"{name}\" already exists, every network must have a unique name");
            errors.push(FieldError::duplicate(&field, text));
        }
        if !used.contains(name.as_str()) {
            errors.push(FieldError::required(
                &field,
                format!("{field} '{name}' not found."),
            ));
        }
        match (&network.pod, &network.multus) {
            (None, None) => errors.push(FieldError::required(&path, "should have a network type")),
            (Some(_), Some(_)) => {
                errors.push(FieldError::required(&path, "should have only one network type"))
            }
            _ => {}
        }
        if network
            .multus
            .as_ref()
            .is_some_and(|multus| multus.network_name.is_empty())
        {
            errors.push(FieldError::required(
                &path,
                "CNI delegating plugin must have a networkName",
            ));
        }
    }
    let defaults = networks
        .iter()
        .filter(|n| n.multus.as_ref().is_some_and(|multus| multus.default))
        .count();
    if defaults > 0 && networks.iter().any(|network| network.pod.is_some()) {
        let text = "Pod network cannot be defined when Multus default network is defined";
        errors.push(FieldError::invalid(&list, text));
    }
    if defaults > 1 {
        errors.push(FieldError::invalid(
            &list,
            "Multus CNI should only have one default network",
        ));
    }
}
