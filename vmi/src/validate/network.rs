//! Rules on networks.

use std::collections::HashSet;
use std::net::Ipv6Addr;

use ipnet::{Ipv4Net, Ipv6Net};

use crate::field::FieldError;
use crate::load::Vmi;
use crate::types::PodNetwork;

pub(super) fn check(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    let list = vmi.at("networks");
    let networks = &vmi.spec.networks;
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
        if let Some(pod) = &network.pod {
            cidrs(pod, &format!("{path}.pod"), errors);
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

/// Checks that masquerade can assign addresses from the networks.
fn cidrs(pod: &PodNetwork, path: &str, errors: &mut Vec<FieldError>) {
    if let Some(text) = pod.cidr() {
        let fault = match text.parse::<Ipv4Net>() {
            Err(_) => Some("is not an IPv4 network, for example 10.0.2.0/24"),
            Ok(net) if net.prefix_len() > 30 => Some("has fewer than 4 addresses; a /30 has 4"),
            Ok(net) => (!has_hosts(net)).then_some("is not a unicast network"),
        };
        refuse(fault, text, format!("{path}.vmNetworkCIDR"), errors);
    }
    if let Some(text) = pod.cidr6() {
        let fault = match text.parse::<Ipv6Net>() {
            Err(_) => Some("is not an IPv6 network, for example fd10:0:2::/120"),
            Ok(net) if net.prefix_len() > 126 => Some("has fewer than 4 addresses; a /126 has 4"),
            Ok(net) if is_link_local(net) => Some("is link-local; choose a network in fd00::/8"),
            Ok(net) => (!has_hosts6(net)).then_some("is not a unicast network"),
        };
        refuse(fault, text, format!("{path}.vmIPv6NetworkCIDR"), errors);
    }
}

fn refuse(fault: Option<&str>, text: &str, field: String, errors: &mut Vec<FieldError>) {
    if let Some(fault) = fault {
        let text = format!("{field} '{text}' {fault}");
        errors.push(FieldError::invalid(field, text));
    }
}

fn has_hosts(net: Ipv4Net) -> bool {
    !matches!(net.network().octets()[0], 0 | 127 | 224..)
}

fn is_link_local(net: Ipv6Net) -> bool {
    let all = Ipv6Net::new_assert(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10);
    all.contains(&net) || net.contains(&all)
}

fn has_hosts6(net: Ipv6Net) -> bool {
    let first = net.network();
    !first.is_unspecified() && !first.is_multicast()
}
