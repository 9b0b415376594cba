//! `spec.domain.devices`.

use super::Kind::{Bool, List, Object, Open, Str};
use super::network::INTERFACE;
use super::{EMPTY, Field, I32, Kind, no, noted, yes};

const NO_GRAPHICS: &str = "the VM has no graphics device; its console is the serial port";
const NO_PASSTHROUGH: &str = "device passthrough is not supported";
pub(super) const OWN_ADDRESS: &str = "the VMM places devices on the PCI bus itself";
pub(super) const NO_TAG: &str = "a config drive does not list devices yet";

pub(super) const DEVICES: &[Field] = &[
    noted(
        "useVirtioTransitional",
        Bool,
        "devices are virtio 1; guests older than Linux 4 may not know them",
    ),
    yes("disableHotplug", Bool),
    yes("disks", List(&DISK)),
    no(
        "watchdog",
        Open(&[yes("name", Str).required()]),
        "a watchdog device is not supported yet",
    ),
    yes("interfaces", List(&INTERFACE)),
    noted(
        "inputs",
        List(&Object(&[
            yes("bus", Str),
            yes("type", Str).required(),
            yes("name", Str).required(),
        ])),
        NO_GRAPHICS,
    ),
    yes("autoattachPodInterface", Bool),
    noted("autoattachGraphicsDevice", Bool, NO_GRAPHICS),
    yes("autoattachSerialConsole", Bool),
    yes("logSerialConsole", Bool),
    yes("autoattachMemBalloon", Bool),
    noted("autoattachInputDevice", Bool, NO_GRAPHICS),
    no("autoattachVSOCK", Bool, "vsock is not supported yet"),
    yes("rng", EMPTY),
    yes("blockMultiQueue", Bool),
    yes("networkInterfaceMultiqueue", Bool),
    no("gpus", List(&Open(&[])), NO_PASSTHROUGH),
    no("downwardMetrics", Open(&[]), "downward metrics are not supported"),
    yes("panicDevices", List(&Object(&[yes("model", Str)]))),
    no(
        "filesystems",
        List(&Open(&[yes("name", Str).required()])),
        "shared directories (virtiofs) are not supported yet; use a disk",
    ),
    no("hostDevices", List(&Open(&[])), NO_PASSTHROUGH),
    no("clientPassthrough", Open(&[]), "USB redirection is not supported"),
    no(
        "sound",
        Open(&[yes("name", Str).required()]),
        "a sound device is not supported",
    ),
    no("tpm", Open(&[]), "a TPM is not supported"),
    noted("video", Object(&[yes("type", Str)]), NO_GRAPHICS),
];

const DISK: Kind = Object(&[
    yes("name", Str).required(),
    yes(
        "disk",
        Object(&[
            yes("bus", Str),
            yes("readonly", Bool),
            no("pciAddress", Str, OWN_ADDRESS),
        ]),
    ),
    yes(
        "lun",
        Object(&[yes("bus", Str), yes("readonly", Bool), yes("reservation", Bool)]),
    ),
    yes(
        "cdrom",
        Object(&[yes("bus", Str), yes("readonly", Bool), yes("tray", Str)]),
    ),
    yes("bootOrder", I32),
    yes("serial", Str),
    yes("dedicatedIOThread", Bool),
    yes("cache", Str),
    yes("io", Str),
    noted("tag", Str, NO_TAG),
    yes(
        "blockSize",
        Object(&[
            yes(
                "custom",
                Object(&[
                    yes("logical", I32).required(),
                    yes("physical", I32).required(),
                    yes("discardGranularity", I32),
                ]),
            ),
            yes("matchVolume", Object(&[yes("enabled", Bool)])),
        ]),
    ),
    yes("shareable", Bool),
    yes("errorPolicy", Str),
    noted("changedBlockTracking", Bool, "changed blocks are not tracked"),
]);
