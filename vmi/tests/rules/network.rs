//! Networks: N.

use super::common::refused;
use super::{DUPLICATE, INVALID, REQUIRED};
use serde_json::{Value, json};

pub(super) fn network(interfaces: Value, networks: Value) -> [(&'static str, Value); 2] {
    [("domain/devices/interfaces", interfaces), ("networks", networks)]
}

#[test]
fn n2_to_n6_networks() {
    let a = json!([{"name": "a", "bridge": {}}]);
    let text = "Network with name \"a\" already exists, every network must have a unique name";
    let twice = json!([{"name": "a", "pod": {}}, {"name": "a", "pod": {}}]);
    refused(
        &network(a.clone(), twice),
        DUPLICATE,
        "spec.networks[1].name",
        text,
    );
    let unused = json!([{"name": "b", "pod": {}}]);
    let field = "spec.networks[0].name";
    refused(
        &network(a.clone(), unused),
        REQUIRED,
        field,
        "spec.networks[0].name 'b' not found.",
    );
    let field = "spec.networks[0]";
    refused(
        &network(a.clone(), json!([{"name": "a"}])),
        REQUIRED,
        field,
        "should have a network type",
    );
    let both = json!([{"name": "a", "pod": {}, "multus": {"networkName": "x"}}]);
    refused(
        &network(a.clone(), both),
        REQUIRED,
        field,
        "should have only one network type",
    );
    let nameless = json!([{"name": "a", "multus": {"networkName": ""}}]);
    refused(
        &network(a, nameless),
        REQUIRED,
        field,
        "CNI delegating plugin must have a networkName",
    );
    let two = json!([{"name": "a", "bridge": {}}, {"name": "b", "bridge": {}}]);
    let multus = |name: &str| json!({"name": name, "multus": {"networkName": name, "default": true}});
    let text = "Pod network cannot be defined when Multus default network is defined";
    let networks = json!([multus("a"), {"name": "b", "pod": {}}]);
    refused(&network(two.clone(), networks), INVALID, "spec.networks", text);
    let text = "Multus CNI should only have one default network";
    refused(
        &network(two, json!([multus("a"), multus("b")])),
        INVALID,
        "spec.networks",
        text,
    );
}
