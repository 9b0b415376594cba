//! `spec.networks`, `spec.domain.devices.interfaces` and `spec.dnsConfig`.

use super::field_type::FieldType::{Any, Bool, List, Object, Open, Str};
use super::field_type::{EMPTY, Field, FieldType, I32, STRS, U32, honoured, refused, warned};
use super::field_type::{NO_TAG, OWN_ADDRESS};

const NO_PASST: &str =
    "passt is not supported; use bridge (the guest gets the pod's address) or masquerade (NAT behind it)";

pub(super) const INTERFACE: FieldType = Object(&[
    honoured("name", Str).required(),
    honoured("model", Str),
    honoured("bridge", EMPTY),
    honoured("masquerade", EMPTY),
    refused("slirp", EMPTY, "slirp is not supported; use masquerade"),
    refused(
        "sriov",
        EMPTY,
        "SR-IOV passthrough is not supported; use bridge on a network that gives the pod an ordinary device",
    ),
    refused("macvtap", EMPTY, "macvtap is not supported; use bridge"),
    refused("passt", EMPTY, NO_PASST),
    refused("passtBinding", EMPTY, NO_PASST),
    refused(
        "binding",
        Object(&[honoured("name", Str).required()]),
        "binding plugins are not supported; use bridge or masquerade",
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
        "port ranges are not supported; list single ports in ports, or omit both to allow all",
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
    warned("tag", Str, NO_TAG),
    warned(
        "acpiIndex",
        U32,
        "is ignored: the guest names its interfaces by PCI slot, since there are no ACPI indexes",
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
