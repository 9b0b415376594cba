//! Rules for interfaces and ports, and interfaces that Husk does not have.

use super::common::{faults, refused, with};
use super::network::network;
use super::{DUPLICATE, INVALID, NIC, REQUIRED, UNSUPPORTED};
use serde_json::{Value, json};

fn nic(more: Value) -> [(&'static str, Value); 2] {
    let mut nic = json!({"name": "default"});
    for (name, value) in more.as_object().unwrap() {
        nic[name] = value.clone();
    }
    network(json!([nic]), json!([{"name": "default", "pod": {}}]))
}

#[test]
fn interfaces() {
    let field = format!("{NIC}.name");
    let networks = json!([{"name": "default", "pod": {}}]);
    let changes = network(json!([{"name": "x", "bridge": {}}]), networks.clone());
    refused(&changes, INVALID, &field, &format!("{field} 'x' not found."));
    let text = "Only one interface can be connected to one specific network";
    let twice = json!([{"name": "default", "bridge": {}}, {"name": "default", "bridge": {}}]);
    refused(
        &network(twice, networks),
        DUPLICATE,
        "spec.domain.devices.interfaces[1].name",
        text,
    );
    let text = "Network interface name can only contain alphabetical characters, numbers, dashes (-) or underscores (_)";
    refused(
        &network(
            json!([{"name": "d.efault"}]),
            json!([{"name": "d.efault", "pod": {}}]),
        ),
        INVALID,
        &field,
        text,
    );
    let text = "more than one interface is connected to a pod network in spec.interfaces";
    let two = json!([{"name": "a", "bridge": {}}, {"name": "b", "bridge": {}}]);
    let pods = json!([{"name": "a", "pod": {}}, {"name": "b", "pod": {}}]);
    refused(&network(two, pods), DUPLICATE, "spec.interfaces", text);
    let multus = json!([{"name": "a", "multus": {"networkName": "x"}}]);
    let text = "Masquerade interface only implemented with pod network";
    refused(
        &network(json!([{"name": "a", "masquerade": {}}]), multus),
        INVALID,
        &field,
        text,
    );
}

#[test]
fn interface_settings() {
    let field = format!("{NIC}.macAddress");
    let text = "The requested MAC address is reserved for the in-pod bridge. Please choose another one.";
    refused(
        &nic(json!({"masquerade": {}, "macAddress": "02:00:00:00:00:00"})),
        INVALID,
        &field,
        text,
    );
    let text = format!("interface {NIC}.name has malformed MAC address (de:ad:be:af).");
    refused(&nic(json!({"macAddress": "de:ad:be:af"})), INVALID, &field, &text);
    let text = format!("interface {NIC}.name has MAC address (de-ad-00-00-be-af-be-af) that is too long.");
    refused(
        &nic(json!({"macAddress": "de-ad-00-00-be-af-be-af"})),
        INVALID,
        &field,
        &text,
    );
    let text = format!("interface {NIC}.name uses model vmxnet3 that is not supported.");
    refused(
        &nic(json!({"model": "vmxnet3"})),
        UNSUPPORTED,
        &format!("{NIC}.model"),
        &text,
    );
    let field = format!("{NIC}.state");
    let text = "logical default interface state value is unsupported: gone";
    refused(&nic(json!({"state": "gone"})), INVALID, &field, text);
    let text = "\"default\" interface's state \"absent\" is supported only for bridge binding";
    refused(
        &nic(json!({"masquerade": {}, "state": "absent"})),
        INVALID,
        &field,
        text,
    );
    let text = "\"default\" interface's state \"absent\" is not supported on default networks";
    refused(
        &nic(json!({"bridge": {}, "state": "absent"})),
        INVALID,
        &field,
        text,
    );
    let default = json!([{"name": "a", "multus": {"networkName": "x", "default": true}}]);
    let absent = json!([{"name": "a", "bridge": {}, "state": "absent"}]);
    let text = "\"a\" interface's state \"absent\" is not supported on default networks";
    refused(&network(absent, default), INVALID, &field, text);
    let options = |options: Value| nic(json!({"dhcpOptions": options}));
    refused(
        &options(json!({"ntpServers": ["127.0.0.1", "::1"]})),
        INVALID,
        &format!("{NIC}.dhcpOptions.ntpServers[1]"),
        "NTP servers must be a list of valid IPv4 addresses.",
    );
    let field = format!("{NIC}.dhcpOptions.privateOptions");
    let text = "provided DHCPPrivateOptions are out of range, must be in range 224 to 254";
    refused(
        &options(json!({"privateOptions": [{"option": 223, "value": "x"}]})),
        INVALID,
        &field,
        text,
    );
    let twice = json!([{"option": 240, "value": "x"}, {"option": 240, "value": "y"}]);
    let text = "Found Duplicates: you have provided duplicate DHCPPrivateOptions";
    refused(&options(json!({"privateOptions": twice})), INVALID, &field, text);
    let mapped = options(json!({"ntpServers": ["::ffff:192.0.2.1"]}));
    assert_eq!(faults(&with(&mapped)), []);
    assert_eq!(
        faults(&with(&nic(
            json!({"bridge": {}, "macAddress": "de-ad-00-00-be-af"})
        ))),
        []
    );
    assert_eq!(
        faults(&with(&nic(json!({"bridge": {}, "macAddress": "dead.0000.beaf"})))),
        []
    );
}

#[test]
fn ports_of_an_interface_off_the_pod_network_are_not_checked() {
    let multus = json!([{"name": "a", "multus": {"networkName": "x"}}]);
    let nic = json!([{"name": "a", "bridge": {}, "ports": [{"port": 0, "protocol": "SCTP"}]}]);
    assert_eq!(faults(&with(&network(nic, multus))), []);
}

#[test]
fn ports() {
    let ports = |ports: Value| nic(json!({"masquerade": {}, "ports": ports}));
    let field = format!("{NIC}.ports[0]");
    refused(
        &ports(json!([{"port": 0}])),
        REQUIRED,
        &field,
        "Port field is mandatory.",
    );
    let text = "Port field must be in range 0 < x < 65536.";
    refused(&ports(json!([{"port": 65536}])), INVALID, &field, text);
    refused(&ports(json!([{"port": -1}])), INVALID, &field, text);
    let text = "Unknown protocol, only TCP or UDP allowed";
    refused(
        &ports(json!([{"port": 1, "protocol": "SCTP"}])),
        INVALID,
        &format!("{field}.protocol"),
        text,
    );
    let twice = json!([{"port": 1, "name": "http"}, {"port": 2, "name": "http"}]);
    let second = format!("{NIC}.ports[1].name");
    refused(
        &ports(twice),
        DUPLICATE,
        &second,
        "Duplicate name of the port: http",
    );
    let text = "Invalid name of the port: Http";
    refused(
        &ports(json!([{"port": 1, "name": "Http"}])),
        INVALID,
        &format!("{field}.name"),
        text,
    );
}

#[test]
fn impossible_interface_settings_are_refused() {
    let text = format!("{NIC} can only have a single binding defined");
    refused(&nic(json!({"bridge": {}, "masquerade": {}})), INVALID, NIC, &text);
    for mac in ["01:00:5e:00:00:01", "00:00:00:00:00:00"] {
        let text = format!("interface {NIC}.name has MAC address ({mac}) that is not a unicast address.");
        refused(
            &nic(json!({"macAddress": mac})),
            INVALID,
            &format!("{NIC}.macAddress"),
            &text,
        );
    }
    let long = "a".repeat(256);
    for (name, options) in [
        ("bootFileName", json!({"bootFileName": long})),
        ("tftpServerName", json!({"tftpServerName": long})),
        ("ntpServers", json!({"ntpServers": vec!["10.0.0.1"; 64]})),
        (
            "privateOptions[0].value",
            json!({"privateOptions": [{"option": 224, "value": long}]}),
        ),
    ] {
        let field = format!("{NIC}.dhcpOptions.{name}");
        let text = format!("{field} exceeds the limit of 255 bytes of a DHCP option");
        refused(&nic(json!({"dhcpOptions": options})), INVALID, &field, &text);
    }
}

#[test]
fn refusals_name_the_alternative() {
    let passt =
        "passt is not supported; use bridge (the guest gets the pod's address) or masquerade (NAT behind it)";
    for (name, value, text) in [
        (
            "sriov",
            json!({}),
            "SR-IOV passthrough is not supported; use bridge on a network that gives the pod an ordinary device",
        ),
        ("slirp", json!({}), "slirp is not supported; use masquerade"),
        ("macvtap", json!({}), "macvtap is not supported; use bridge"),
        ("passt", json!({}), passt),
        ("passtBinding", json!({}), passt),
        (
            "binding",
            json!({"name": "plugin"}),
            "binding plugins are not supported; use bridge or masquerade",
        ),
        (
            "portRanges",
            json!([{"protocol": "TCP", "start": 1, "end": 2}]),
            "port ranges are not supported; list single ports in ports, or omit both to allow all",
        ),
        (
            "pciAddress",
            json!("0000:81:01.0"),
            "PCI addresses cannot be chosen; the VMM assigns them",
        ),
    ] {
        let changes = nic(json!({name: value}));
        refused(&changes, UNSUPPORTED, &format!("{NIC}.{name}"), text);
        assert_eq!(faults(&with(&changes)).len(), 1, "{name}");
    }
}
