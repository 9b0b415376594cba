//! Rules for networks and name servers.

use super::common::{faults, refused, with};
use super::{DUPLICATE, INVALID, REQUIRED, UNSUPPORTED};
use serde_json::{Value, json};

pub(super) fn network(interfaces: Value, networks: Value) -> [(&'static str, Value); 2] {
    [("domain/devices/interfaces", interfaces), ("networks", networks)]
}

#[test]
fn networks() {
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

#[test]
fn the_network_behind_the_pod_has_room() {
    let pod = |name: &str, cidr: &str| {
        network(
            json!([{"name": "a", "masquerade": {}}]),
            json!([{"name": "a", "pod": {name: cidr}}]),
        )
    };
    for (name, cidr, fault) in [
        (
            "vmNetworkCIDR",
            "10.0.2.0",
            "is not an IPv4 network, for example 10.0.2.0/24",
        ),
        (
            "vmNetworkCIDR",
            "fd00::/64",
            "is not an IPv4 network, for example 10.0.2.0/24",
        ),
        (
            "vmNetworkCIDR",
            "10.0.2.0/31",
            "has fewer than 4 addresses; a /30 has 4",
        ),
        ("vmNetworkCIDR", "0.0.0.0/0", "is not a unicast network"),
        ("vmNetworkCIDR", "239.1.0.0/16", "is not a unicast network"),
        (
            "vmIPv6NetworkCIDR",
            "10.0.2.0/24",
            "is not an IPv6 network, for example fd10:0:2::/120",
        ),
        (
            "vmIPv6NetworkCIDR",
            "fd00::/127",
            "has fewer than 4 addresses; a /126 has 4",
        ),
        ("vmIPv6NetworkCIDR", "ff02::/64", "is not a unicast network"),
        (
            "vmIPv6NetworkCIDR",
            "fe80::/64",
            "is link-local; choose a network in fd00::/8",
        ),
    ] {
        let field = format!("spec.networks[0].pod.{name}");
        refused(
            &pod(name, cidr),
            INVALID,
            &field,
            &format!("{field} '{cidr}' {fault}"),
        );
    }
    for (name, cidr) in [
        ("vmNetworkCIDR", ""),
        ("vmNetworkCIDR", "192.168.7.4/30"),
        ("vmNetworkCIDR", "10.0.2.9/24"),
        ("vmIPv6NetworkCIDR", "fd00::/126"),
    ] {
        assert_eq!(faults(&with(&pod(name, cidr))), [], "{cidr}");
    }
}

#[test]
fn name_servers() {
    let text = "DNSPolicy: FirstCome is not supported, valid values: [ClusterFirstWithHostNet ClusterFirst Default None ]";
    refused(
        &[("dnsPolicy", json!("FirstCome"))],
        UNSUPPORTED,
        "spec.dnsPolicy",
        text,
    );
    let text = "must provide `dnsConfig` when `dnsPolicy` is None";
    let none = ("dnsPolicy", json!("None"));
    refused(std::slice::from_ref(&none), REQUIRED, "spec.dnsConfig", text);
    let text = "must provide at least one DNS nameserver when `dnsPolicy` is None";
    refused(
        &[none.clone(), ("dnsConfig", json!({}))],
        REQUIRED,
        "nameservers",
        text,
    );
    let config = |config: Value| [("dnsConfig", config)];
    let servers = |list: Value| config(json!({"nameservers": list}));
    let text = "must not have more than 3 nameservers: [1.1.1.1 1.1.1.2 1.1.1.3 ::1]";
    refused(
        &servers(json!(["1.1.1.1", "1.1.1.2", "1.1.1.3", "::1"])),
        INVALID,
        "nameservers",
        text,
    );
    refused(
        &servers(json!(["dns"])),
        INVALID,
        "nameservers",
        "must be valid IP address: dns",
    );
    let searches = |list: Value| config(json!({"searches": list}));
    let text = "must not have more than 6 search paths";
    refused(
        &searches(json!(["a", "b", "c", "d", "e", "f", "g"])),
        INVALID,
        "searchDomains",
        text,
    );
    let text = "must not have more than 256 characters (including spaces) in the search list";
    let long = vec!["a"; 64].join(".");
    refused(
        &searches(json!([long, long, long])),
        INVALID,
        "searchDomains",
        text,
    );
    let found = faults(&with(&searches(json!(["a_b"]))));
    assert_eq!((found.len(), found[0].field.as_str()), (1, "searchDomains"));
    let options = config(json!({"options": [{"value": "1"}]}));
    refused(&options, INVALID, "options", "Option.Name must not be empty");
    let all = json!({"nameservers": ["1.1.1.1"], "searches": ["a.b"], "options": [{"name": "ndots", "value": "1"}]});
    assert_eq!(faults(&with(&[none, ("dnsConfig", all)])), []);
}
