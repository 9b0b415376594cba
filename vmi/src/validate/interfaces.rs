//! Rules on interfaces.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr};

use crate::field::FieldError;
use crate::load::Vmi;
use crate::mac;
use crate::types::{Interface, Network};

/// MAC address of the bridge in a pod, reserved.
const BRIDGE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0];
/// Maximum length of a DHCP option in bytes.
const DHCP_OPTION: usize = 255;

pub(super) fn check(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    let list = vmi.at("domain.devices.interfaces");
    let interfaces = &vmi.spec.domain.devices.interfaces;
    let networks: HashMap<&str, &Network> = vmi.spec.networks.iter().map(|n| (n.name.as_str(), n)).collect();
    let mut names = HashSet::new();
    let mut on_pod = 0;
    for (i, interface) in interfaces.iter().enumerate() {
        let path = format!("{list}[{i}]");
        let field = format!("{path}.name");
        let name = interface.name.as_str();
        let network = networks.get(name);
        if network.is_none() {
            errors.push(FieldError::invalid(
                &field,
                format!("{field} '{name}' not found."),
            ));
        }
        on_pod += usize::from(network.is_some_and(|network| network.pod.is_some()));
        if !names.insert(name) {
            errors.push(FieldError::duplicate(
                &field,
                "Only one interface can be connected to one specific network",
            ));
        }
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
        if name.is_empty() || !name.bytes().all(allowed) {
            let text = "Network interface name can only contain alphabetical characters, numbers, dashes (-) or \
                        underscores (_)";
            errors.push(FieldError::invalid(&field, text));
        }
        if interface.masquerade.is_some() && network.is_some_and(|network| network.pod.is_none()) {
            errors.push(FieldError::invalid(
                &field,
                "Masquerade interface only implemented with pod network",
            ));
        }
        if interface.is_absent() && network.is_some_and(|network| network.is_default()) {
            let text =
                format!("\"{name}\" interface's state \"absent\" is not supported on default networks");
            errors.push(FieldError::invalid(format!("{path}.state"), text));
        }
        one(interface, &path, errors);
        if network.is_some_and(|network| network.pod.is_some()) {
            ports(interface, &path, errors);
        }
    }
    if on_pod > 1 {
        // The path that KubeVirt reports.
        let list = vmi.at("interfaces");
        let text = format!("more than one interface is connected to a pod network in {list}");
        errors.push(FieldError::duplicate(list, text));
    }
}

fn one(interface: &Interface, path: &str, errors: &mut Vec<FieldError>) {
    let model = interface.model.as_deref().unwrap_or_default();
    if !matches!(
        model,
        "" | "e1000" | "e1000e" | "igb" | "ne2k_pci" | "pcnet" | "rtl8139" | "virtio"
    ) {
        let text = format!("interface {path}.name uses model {model} that is not supported.");
        errors.push(FieldError::unsupported(format!("{path}.model"), text));
    }
    if interface.bridge.is_some() && interface.masquerade.is_some() {
        errors.push(FieldError::invalid(
            path,
            format!("{path} can only have a single binding defined"),
        ));
    }
    mac_address(interface, path, errors);
    let state = interface.state.as_deref().unwrap_or_default();
    let name = &interface.name;
    if !matches!(state, "" | "absent" | "up" | "down") {
        let text = format!("logical {name} interface state value is unsupported: {state}");
        errors.push(FieldError::invalid(format!("{path}.state"), text));
    } else if state == "absent" && interface.bridge.is_none() {
        let text = format!("\"{name}\" interface's state \"absent\" is supported only for bridge binding");
        errors.push(FieldError::invalid(format!("{path}.state"), text));
    }
    dhcp(interface, path, errors);
}

fn mac_address(interface: &Interface, path: &str, errors: &mut Vec<FieldError>) {
    let Some(text) = interface.mac_address.as_deref().filter(|text| !text.is_empty()) else {
        return;
    };
    let field = format!("{path}.macAddress");
    let fault = match mac::parse_hardware_address(text) {
        None => format!("interface {path}.name has malformed MAC address ({text})."),
        Some(mac) if mac.len() > 6 => {
            format!("interface {path}.name has MAC address ({text}) that is too long.")
        }
        Some(mac) if mac[0] & 1 == 1 || mac == [0; 6] => {
            format!("interface {path}.name has MAC address ({text}) that is not a unicast address.")
        }
        Some(mac) if interface.masquerade.is_some() && mac == BRIDGE_MAC => {
            "The requested MAC address is reserved for the in-pod bridge. Please choose another one."
                .to_owned()
        }
        Some(_) => return,
    };
    errors.push(FieldError::invalid(field, fault));
}

/// An IPv4 address, which may be written as an IPv6 address (`::ffff:192.0.2.1`), as KubeVirt reads it.
pub(crate) fn ipv4(text: &str) -> Option<Ipv4Addr> {
    match text.parse::<IpAddr>().ok()?.to_canonical() {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    }
}

fn dhcp(interface: &Interface, path: &str, errors: &mut Vec<FieldError>) {
    let Some(options) = &interface.dhcp_options else {
        return;
    };
    for (k, server) in options.ntp_servers.iter().enumerate() {
        if ipv4(server).is_none() {
            let field = format!("{path}.dhcpOptions.ntpServers[{k}]");
            errors.push(FieldError::invalid(
                field,
                "NTP servers must be a list of valid IPv4 addresses.",
            ));
        }
    }
    let text = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let lengths = [
        ("bootFileName".to_owned(), text(&options.boot_file_name)),
        ("tftpServerName".to_owned(), text(&options.tftp_server_name)),
        ("ntpServers".to_owned(), options.ntp_servers.len() * 4),
    ];
    let private = options.private_options.iter().enumerate();
    let private = private.map(|(k, option)| (format!("privateOptions[{k}].value"), option.value.len()));
    for (name, _) in lengths
        .into_iter()
        .chain(private)
        .filter(|(_, bytes)| *bytes > DHCP_OPTION)
    {
        let field = format!("{path}.dhcpOptions.{name}");
        let text = format!("{field} exceeds the limit of {DHCP_OPTION} bytes of a DHCP option");
        errors.push(FieldError::invalid(field, text));
    }
    let field = format!("{path}.dhcpOptions.privateOptions");
    let private = &options.private_options;
    if private.iter().any(|option| !(224..=254).contains(&option.option)) {
        let text = "provided DHCPPrivateOptions are out of range, must be in range 224 to 254";
        errors.push(FieldError::invalid(&field, text));
    }
    let mut seen = HashSet::new();
    if !private.iter().all(|option| seen.insert(option.option)) {
        let text = "Found Duplicates: you have provided duplicate DHCPPrivateOptions";
        errors.push(FieldError::invalid(&field, text));
    }
}

fn ports(interface: &Interface, path: &str, errors: &mut Vec<FieldError>) {
    let mut names = HashSet::new();
    for (k, port) in interface.ports.iter().enumerate() {
        let path = format!("{path}.ports[{k}]");
        if port.port == 0 {
            errors.push(FieldError::required(&path, "Port field is mandatory."));
        } else if !(1..=65535).contains(&port.port) {
            errors.push(FieldError::invalid(
                &path,
                "Port field must be in range 0 < x < 65536.",
            ));
        }
        let protocol = port.protocol.as_deref().unwrap_or_default();
        if !matches!(protocol, "" | "TCP" | "UDP") {
            let text = "Unknown protocol, only TCP or UDP allowed";
            errors.push(FieldError::invalid(format!("{path}.protocol"), text));
        }
        let Some(name) = port.name.as_deref().filter(|name| !name.is_empty()) else {
            continue;
        };
        let field = format!("{path}.name");
        if !names.insert(name) {
            errors.push(FieldError::duplicate(
                &field,
                format!("Duplicate name of the port: {name}"),
            ));
        }
        if !is_service_name(name) {
            errors.push(FieldError::invalid(
                &field,
                format!("Invalid name of the port: {name}"),
            ));
        }
    }
}

/// True for a service name of RFC 6335: at most 15 of `a-z0-9-`, at least one letter, hyphens only single and inside.
fn is_service_name(name: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    name.len() <= 15
        && name.bytes().all(inner)
        && name.bytes().any(|b| b.is_ascii_lowercase())
        && !name.contains("--")
        && !name.starts_with('-')
        && !name.ends_with('-')
}
