//! `spec.networks`, `spec.domain.devices.interfaces` and `spec.dnsConfig`.

use super::field_type::FieldType::{Any, Bool, List, Object, Open, Str};
use super::field_type::{EMPTY, Field, FieldType, I32, STRS, U32, honoured, noted, refused};
use super::field_type::{NO_TAG, OWN_ADDRESS};

const NO_PASST: &str =
    "passt is not supported; bridge gives the guest the pod's address as well, masquerade one behind it";

pub(super) const INTERFACE: FieldType = Object(&[
    honoured("name", Str).required(),
    honoured("model", Str),
    honoured("bridge", EMPTY),
    honoured("masquerade", EMPTY),
    refused(
        "slirp",
        EMPTY,
        "slirp is not supported; masquerade gives the guest an address of its own behind the pod's as well",
    ),
    refused(
        "sriov",
        EMPTY,
        "SR-IOV devices are not passed through; use bridge, on a network that gives the pod an ordinary device",
    ),
    refused(
        "macvtap",
        EMPTY,
        "macvtap is not supported; use bridge, which puts the guest on the same network",
    ),
    refused("passt", EMPTY, NO_PASST),
    refused("passtBinding", EMPTY, NO_PASST),
    refused(
        "binding",
        Object(&[honoured("name", Str).required()]),
        "binding plugins are not supported, they are a cluster's; use bridge or masquerade",
    ),
    honoured(
        "ports",
        List(&Object(&[
            honoured("name", Str),
            honoured("protocol", Str),
            honoured("port", I32).required(),
        ])),
    ),
    refused(
        "portRanges",
        List(&Object(&[
            honoured("protocol", Str).required(),
            honoured("start", I32).required(),
            honoured("end", I32).required(),
        ])),
        "ranges of ports are not supported; list them in ports, or none to let all in",
    ),
    honoured("macAddress", Str),
    honoured("bootOrder", I32),
    refused("pciAddress", Str, OWN_ADDRESS),
    honoured(
        "dhcpOptions",
        Object(&[
            honoured("bootFileName", Str),
            honoured("tftpServerName", Str),
            honoured("ntpServers", STRS),
            honoured(
                "privateOptions",
                List(&Object(&[
                    honoured("option", I32).required(),
                    honoured("value", Str).required(),
                ])),
            ),
        ]),
    ),
    noted("tag", Str, NO_TAG),
    noted(
        "acpiIndex",
        U32,
        "ACPI does not number the guest's interfaces; it names them by their PCI slots",
    ),
    honoured("state", Str),
    refused(
        "resourceClaim",
        Any,
        "dynamically allocated devices are not supported",
    ),
]);

pub(super) const NETWORK: FieldType = Object(&[
    honoured("name", Str).required(),
    honoured(
        "pod",
        Object(&[honoured("vmNetworkCIDR", Str), honoured("vmIPv6NetworkCIDR", Str)]),
    ),
    honoured(
        "multus",
        Object(&[honoured("networkName", Str).required(), honoured("default", Bool)]),
    ),
    refused(
        "resourceClaim",
        Open(&[]),
        "dynamically allocated devices are not supported",
    ),
]);

pub(super) const DNS: &[Field] = &[
    honoured("nameservers", STRS),
    honoured("searches", STRS),
    honoured(
        "options",
        List(&Object(&[honoured("name", Str), honoured("value", Str)])),
    ),
];
