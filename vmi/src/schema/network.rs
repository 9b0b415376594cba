//! `spec.networks`, `spec.domain.devices.interfaces` and `spec.dnsConfig`.

use super::Kind::{Any, Bool, List, Object, Open, Str};
use super::devices::{NO_TAG, OWN_ADDRESS};
use super::{EMPTY, Field, I32, Kind, STRS, U32, no, noted, yes};

const NO_PASST: &str =
    "passt is not supported; bridge gives the guest the pod's address as well, masquerade one behind it";

pub(super) const INTERFACE: Kind = Object(&[
    yes("name", Str).required(),
    yes("model", Str),
    yes("bridge", EMPTY),
    yes("masquerade", EMPTY),
    no(
        "slirp",
        EMPTY,
        "slirp is not supported; masquerade gives the guest an address of its own behind the pod's as well",
    ),
    no(
        "sriov",
        EMPTY,
        "SR-IOV devices are not passed through; use bridge, on a network that gives the pod an ordinary device",
    ),
    no(
        "macvtap",
        EMPTY,
        "macvtap is not supported; use bridge, which puts the guest on the same network",
    ),
    no("passt", EMPTY, NO_PASST),
    no("passtBinding", EMPTY, NO_PASST),
    no(
        "binding",
        Object(&[yes("name", Str).required()]),
        "binding plugins are not supported, they are a cluster's; use bridge or masquerade",
    ),
    yes(
        "ports",
        List(&Object(&[
            yes("name", Str),
            yes("protocol", Str),
            yes("port", I32).required(),
        ])),
    ),
    no(
        "portRanges",
        List(&Object(&[
            yes("protocol", Str).required(),
            yes("start", I32).required(),
            yes("end", I32).required(),
        ])),
        "ranges of ports are not supported; list them in ports, or none to let all in",
    ),
    yes("macAddress", Str),
    yes("bootOrder", I32),
    no("pciAddress", Str, OWN_ADDRESS),
    yes(
        "dhcpOptions",
        Object(&[
            yes("bootFileName", Str),
            yes("tftpServerName", Str),
            yes("ntpServers", STRS),
            yes(
                "privateOptions",
                List(&Object(&[
                    yes("option", I32).required(),
                    yes("value", Str).required(),
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
    yes("state", Str),
    no(
        "resourceClaim",
        Any,
        "dynamically allocated devices are not supported",
    ),
]);

pub(super) const NETWORK: Kind = Object(&[
    yes("name", Str).required(),
    yes(
        "pod",
        Object(&[yes("vmNetworkCIDR", Str), yes("vmIPv6NetworkCIDR", Str)]),
    ),
    yes(
        "multus",
        Object(&[yes("networkName", Str).required(), yes("default", Bool)]),
    ),
    no(
        "resourceClaim",
        Open(&[]),
        "dynamically allocated devices are not supported",
    ),
]);

pub(super) const DNS: &[Field] = &[
    yes("nameservers", STRS),
    yes("searches", STRS),
    yes("options", List(&Object(&[yes("name", Str), yes("value", Str)]))),
];
