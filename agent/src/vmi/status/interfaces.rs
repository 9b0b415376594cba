//! `status.interfaces`: virt-controller writes what Multus reports, the agent what the VM has and what its guest tells.

use std::net::IpAddr;

use husk_proto::shim::v1::{GuestInterface, Interface};
use serde_json::{Map, Value, json};

/// Sources of an entry: the VM's definition, the guest's agent, and virt-controller, which sees the pod's networks.
const DOMAIN: &str = "domain";
const GUEST_AGENT: &str = "guest-agent";
const MULTUS_STATUS: &str = "multus-status";
/// Fields that only an interface of the VM has.
const OF_VM: &[&str] = &[
    "mac",
    "queueCount",
    "linkState",
    "ipAddress",
    "ipAddresses",
    "interfaceName",
];
/// Most entries of interfaces that only the guest has.
const GUEST_ONLY: usize = 10;
const LOOPBACK: &str = "lo";

/// The entries of `present` that last, with the VM's interfaces and those that the guest has: the interface of the
/// pod's network first, because tools take the VMI's address from the first entry, then in the order of
/// `spec.networks`, then others.
pub fn merged<'a>(
    present: &Value,
    spec: &Value,
    interfaces: &[Interface],
    guest: impl Iterator<Item = &'a GuestInterface>,
) -> Vec<Value> {
    let guest: Vec<_> = guest.filter(|interface| interface.name != LOOPBACK).collect();
    let mut entries: Vec<Value> = present.as_array().cloned().unwrap_or_default();
    entries.retain_mut(|entry| {
        entry
            .as_object_mut()
            .is_some_and(|entry| lasts(entry, spec, interfaces))
    });
    for interface in interfaces {
        let found = entries
            .iter()
            .position(|entry| entry["name"] == interface.name.as_str());
        let index = found.unwrap_or_else(|| {
            entries.push(json!({}));
            entries.len() - 1
        });
        let has_its_mac = |reported: &&&GuestInterface| reported.mac.eq_ignore_ascii_case(&interface.mac);
        let reported: Vec<_> = guest.iter().filter(has_its_mac).copied().collect();
        if let Some(entry) = entries[index].as_object_mut() {
            write(entry, interface, &reported, is_masquerade(spec, &interface.name));
        }
    }
    let networks: Vec<_> = spec["networks"].as_array().into_iter().flatten().collect();
    let rank = |entry: &Value| {
        let network = networks
            .iter()
            .position(|network| network["name"] == entry["name"]);
        match network {
            Some(index) if networks[index]["pod"].is_object() => 0,
            Some(index) => index + 1,
            None => networks.len() + 1,
        }
    };
    entries.sort_by_key(rank);
    let is_known = |reported: &GuestInterface| {
        let mut known = interfaces.iter();
        known.any(|interface| interface.mac.eq_ignore_ascii_case(&reported.mac))
    };
    let others = guest.into_iter().filter(|reported| !is_known(reported));
    entries.extend(others.take(GUEST_ONLY).map(guest_only));
    entries
}

/// True if an entry of the status stays: its interface is in the VM, is the pod network's, or is still to be plugged,
/// and then loses the fields of an earlier device. Others are removed: virt-controller keeps an absent interface in the
/// specs until then.
fn lasts(entry: &mut Map<String, Value>, spec: &Value, interfaces: &[Interface]) -> bool {
    let Some(name) = entry.get("name").and_then(Value::as_str) else {
        return false;
    };
    let mut networks = spec["networks"].as_array().into_iter().flatten();
    if interfaces.iter().any(|interface| interface.name == name)
        || networks.any(|network| network["name"] == name && network["pod"].is_object())
    {
        return true;
    }
    let wanted = interface_of(spec, name).is_some_and(|interface| interface["state"] != "absent");
    let sources = foreign_sources(entry);
    if !wanted || !sources.iter().any(|source| source == MULTUS_STATUS) {
        return false;
    }
    entry.retain(|field, _| !OF_VM.contains(&field.as_str()));
    entry.insert("infoSource".to_owned(), json!(sources.join(", ")));
    true
}

fn interface_of<'a>(spec: &'a Value, name: &str) -> Option<&'a Value> {
    let interfaces = spec["domain"]["devices"]["interfaces"].as_array();
    interfaces?.iter().find(|interface| interface["name"] == name)
}

fn is_masquerade(spec: &Value, name: &str) -> bool {
    interface_of(spec, name).is_some_and(|interface| interface["masquerade"].is_object())
}

/// Sources of an entry that are not the agent's.
fn foreign_sources(entry: &Map<String, Value>) -> Vec<String> {
    let sources = entry.get("infoSource").and_then(Value::as_str);
    let sources = sources.unwrap_or_default().split(", ");
    let foreign = sources.filter(|source| !["", DOMAIN, GUEST_AGENT].contains(source));
    foreign.map(str::to_owned).collect()
}

/// Writes the entry of an interface of the VM. `reported` are the guest's interfaces with its MAC address: a bridge or
/// bond has that of its first port, and the addresses. KubeVirt takes the name of the last one.
fn write(
    entry: &mut Map<String, Value>,
    interface: &Interface,
    reported: &[&GuestInterface],
    masquerade: bool,
) {
    let mut set = |key: &str, value: Value| drop(entry.insert(key.to_owned(), value));
    set("name", json!(interface.name));
    set("mac", json!(interface.mac));
    set("queueCount", json!(interface.queues.max(1)));
    set("linkState", json!(if interface.link_up { "up" } else { "down" }));
    let of_guest = reported.iter().map(|reported| addresses(reported, masquerade));
    let of_guest: Vec<_> = of_guest.collect();
    let addresses = match of_guest.is_empty() {
        true => interface.addresses.clone(),
        false => merged_addresses(&interface.addresses, &of_guest),
    };
    if let Some(first) = addresses.first() {
        set("ipAddress", json!(first));
        set("ipAddresses", json!(addresses));
    } else if !reported.is_empty() {
        entry.remove("ipAddress");
        entry.remove("ipAddresses");
    }
    match reported.last().filter(|reported| !reported.name.is_empty()) {
        Some(reported) => _ = entry.insert("interfaceName".to_owned(), json!(reported.name)),
        None => _ = entry.remove("interfaceName"),
    }
    let mut sources = vec![DOMAIN.to_owned()];
    sources.extend(reported.first().map(|_| GUEST_AGENT.to_owned()));
    sources.extend(foreign_sources(entry));
    let sources = sources.join(", ");
    entry.insert("infoSource".to_owned(), json!(sources));
}

/// An interface of the guest's own, such as a bridge. virt-controller's patch tests the entries as its Go types write
/// them: without empty fields.
fn guest_only(reported: &GuestInterface) -> Value {
    let mut entry = json!({"infoSource": GUEST_AGENT});
    for (field, text) in [("mac", &reported.mac), ("interfaceName", &reported.name)] {
        if !text.is_empty() {
            entry[field] = json!(text);
        }
    }
    let addresses = addresses(reported, false);
    let is_v4 = |address: &&IpAddr| address.is_ipv4();
    if let Some(first) = addresses.iter().find(is_v4).or(addresses.first()) {
        entry["ipAddress"] = json!(first);
        entry["ipAddresses"] = json!(addresses);
    }
    entry
}

/// The addresses that the guest tells, without prefix lengths. With masquerade, no link-local ones: they mean nothing
/// outside of the guest.
fn addresses(reported: &GuestInterface, masquerade: bool) -> Vec<IpAddr> {
    let parse = |text: &String| text.split('/').next()?.parse().ok();
    let outside = |address: &IpAddr| match address {
        IpAddr::V4(address) => !address.is_link_local(),
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    };
    let reported = reported.addresses.iter().filter_map(parse);
    reported
        .filter(|address| !masquerade || outside(address))
        .collect()
}

/// The pod's addresses, as long as an interface of the guest has one of the same family; else those of the first that
/// has one. IPv4 comes first.
fn merged_addresses(pod: &[String], guest: &[Vec<IpAddr>]) -> Vec<String> {
    let mut merged = Vec::new();
    for is_v4 in [true, false] {
        let of_family = |address: &IpAddr| address.is_ipv4() == is_v4;
        let mut reported = guest.iter().map(|addresses| {
            let reported = addresses.iter().copied().filter(of_family);
            reported.map(|address| address.to_string()).collect::<Vec<_>>()
        });
        let reported = reported.find(|reported| !reported.is_empty());
        let reported = reported.unwrap_or_default();
        let known = pod
            .iter()
            .filter(|address| address.parse().is_ok_and(|address| of_family(&address)));
        let known: Vec<String> = known.cloned().collect();
        merged.extend(match known.is_empty() || reported.is_empty() {
            true => reported,
            false => known,
        });
    }
    merged
}
