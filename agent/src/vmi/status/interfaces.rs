//! `status.interfaces`: virt-controller writes what Multus reports, the agent what the VM has.

use husk_proto::shim::v1::Interface;
use serde_json::{Map, Value, json};

/// Source of an entry that the agent writes: the VM's definition.
const DOMAIN: &str = "domain";

/// The entries `present` with the VM's interfaces: the interface of the pod's network first, because tools take the
/// VMI's address from the first entry, then in the order of `spec.networks`, then others.
pub fn merged(present: &Value, spec: &Value, interfaces: &[Interface]) -> Value {
    let mut entries: Vec<Value> = present.as_array().cloned().unwrap_or_default();
    for interface in interfaces {
        let found = entries
            .iter()
            .position(|entry| entry["name"] == interface.name.as_str());
        let index = found.unwrap_or_else(|| {
            entries.push(json!({}));
            entries.len() - 1
        });
        if let Some(entry) = entries[index].as_object_mut() {
            write(entry, interface);
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
    Value::Array(entries)
}

fn write(entry: &mut Map<String, Value>, interface: &Interface) {
    let mut set = |key: &str, value: Value| drop(entry.insert(key.to_owned(), value));
    set("name", json!(interface.name));
    set("mac", json!(interface.mac));
    set("queueCount", json!(interface.queues.max(1)));
    set("linkState", json!(if interface.link_up { "up" } else { "down" }));
    if let Some(first) = interface.addresses.first() {
        set("ipAddress", json!(first));
        set("ipAddresses", json!(interface.addresses));
    }
    let sources = entry
        .get("infoSource")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if !sources.split(", ").any(|source| source == DOMAIN) {
        let all = match sources {
            "" => DOMAIN.to_owned(),
            others => format!("{DOMAIN}, {others}"),
        };
        entry.insert("infoSource".to_owned(), json!(all));
    }
}
