//! `spec.domain.devices`.

use super::field_type::FieldType::{Bool, List, Object, Open, Str};
use super::field_type::{EMPTY, Field, FieldType, I32, honoured, refused, warned};
use super::field_type::{NO_TAG, OWN_ADDRESS};
use super::network::INTERFACE;

const NO_GRAPHICS: &str = "is ignored: the VM has no graphics device; its console is the serial port";
const NO_PASSTHROUGH: &str = "device passthrough is not supported";

pub(super) const DEVICES: &[Field] = &[
    warned(
        "useVirtioTransitional",
        Bool,
        "is ignored: devices are virtio 1 only, which guests older than Linux 4 may not support",
    ),
    honoured("disableHotplug", Bool),
    honoured("disks", List(&DISK)),
    honoured(
        "watchdog",
        Object(&[
            honoured("name", Str).required(),
            honoured("i6300esb", Object(&[honoured("action", Str)])),
            refused(
                "diag288",
                Object(&[honoured("action", Str)]),
                "is a watchdog of s390x; use i6300esb",
            ),
        ]),
    ),
    honoured("interfaces", List(&INTERFACE)),
    warned(
        "inputs",
        List(&Object(&[
            honoured("bus", Str),
            honoured("type", Str).required(),
            honoured("name", Str).required(),
        ])),
        NO_GRAPHICS,
    ),
    honoured("autoattachPodInterface", Bool),
    warned("autoattachGraphicsDevice", Bool, NO_GRAPHICS),
    honoured("autoattachSerialConsole", Bool),
    honoured("logSerialConsole", Bool),
    honoured("autoattachMemBalloon", Bool),
    warned("autoattachInputDevice", Bool, NO_GRAPHICS),
    honoured("autoattachVSOCK", Bool),
    honoured("rng", EMPTY),
    honoured("blockMultiQueue", Bool),
    honoured("networkInterfaceMultiqueue", Bool),
    refused("gpus", List(&Open(&[])), NO_PASSTHROUGH),
    honoured("downwardMetrics", EMPTY),
    honoured("panicDevices", List(&Object(&[honoured("model", Str)]))),
    refused(
        "filesystems",
        List(&Open(&[honoured("name", Str).required()])),
        "shared directories (virtiofs) are not supported yet; use a disk",
    ),
    refused("hostDevices", List(&Open(&[])), NO_PASSTHROUGH),
    refused("clientPassthrough", Open(&[]), "USB redirection is not supported"),
    refused(
        "sound",
        Open(&[honoured("name", Str).required()]),
        "a sound device is not supported",
    ),
    honoured("tpm", TPM),
    warned("video", Object(&[honoured("type", Str)]), NO_GRAPHICS),
];

pub(super) const TPM: FieldType = Object(&[honoured("enabled", Bool), honoured("persistent", Bool)]);

const DISK: FieldType = Object(&[
    honoured("name", Str).required(),
    honoured(
        "disk",
        Object(&[
            honoured("bus", Str),
            honoured("readonly", Bool),
            refused("pciAddress", Str, OWN_ADDRESS),
        ]),
    ),
    honoured(
        "lun",
        Object(&[
            honoured("bus", Str),
            honoured("readonly", Bool),
            honoured("reservation", Bool),
        ]),
    ),
    honoured(
        "cdrom",
        Object(&[
            honoured("bus", Str),
            honoured("readonly", Bool),
            honoured("tray", Str),
        ]),
    ),
    honoured("bootOrder", I32),
    honoured("serial", Str),
    honoured("dedicatedIOThread", Bool),
    honoured("cache", Str),
    honoured("io", Str),
    warned("tag", Str, NO_TAG),
    honoured("blockSize", BLOCK_SIZE),
    honoured("shareable", Bool),
    honoured("errorPolicy", Str),
    warned(
        "changedBlockTracking",
        Bool,
        "is ignored: changed blocks are not tracked",
    ),
]);

pub(super) const BLOCK_SIZE: FieldType = Object(&[
    honoured(
        "custom",
        Object(&[
            honoured("logical", I32).required(),
            honoured("physical", I32).required(),
            honoured("discardGranularity", I32),
        ]),
    ),
    honoured("matchVolume", Object(&[honoured("enabled", Bool)])),
]);
