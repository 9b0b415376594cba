//! `spec.networks` and `spec.domain.devices.interfaces`.

use super::Kind::{Any, Bool, List, Object, Open, Str};
use super::devices::{NO_PASSTHROUGH, NO_TAG, OWN_ADDRESS};
use super::{EMPTY, I32, Kind, STRS, U32, no, noted, yes};

const NO_BINDING: &str = "this interface binding is not supported; bridge and masquerade will be";

pub(super) const INTERFACE: Kind = Object(&[
    yes("name", Str).required(),
    yes("model", Str),
    yes("bridge", EMPTY),
    yes("masquerade", EMPTY),
    no("slirp", EMPTY, NO_BINDING),
    no("sriov", EMPTY, NO_PASSTHROUGH),
    no("macvtap", EMPTY, NO_BINDING),
    no("passt", EMPTY, NO_BINDING),
    no("passtBinding", EMPTY, NO_BINDING),
    no("binding", Object(&[yes("name", Str).required()]), NO_BINDING),
    yes(
        "ports",
        List(&Object(&[
            yes("name", Str),
            yes("protocol", Str),
            yes("port", I32).required(),
        ])),
    ),
    yes(
        "portRanges",
        List(&Object(&[
            yes("protocol", Str).required(),
            yes("start", I32).required(),
            yes("end", I32).required(),
        ])),
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
    yes("acpiIndex", U32),
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
