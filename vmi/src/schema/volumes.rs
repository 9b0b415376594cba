//! `spec.volumes[]`.

use super::Kind::{Bool, Object, Open, Quantity, Str};
use super::{Field, Kind, no, noted, pod, yes};

const KINDS: &str = "this kind of volume is not supported yet; supported are containerDisk, persistentVolumeClaim, \
                     dataVolume, hostDisk, emptyDisk and cloudInitNoCloud";
const NO_SECRET: &str = "Secrets cannot be read yet; give the data inline";

pub(super) const VOLUME: Kind = Object(&[
    yes("name", Str).required(),
    yes(
        "hostDisk",
        Object(&[
            yes("path", Str).required(),
            yes("type", Str).required(),
            yes("capacity", Quantity),
            noted(
                "shared",
                Bool,
                "is about migration between nodes, which is not supported",
            ),
        ]),
    ),
    yes("persistentVolumeClaim", Object(CLAIM)),
    yes("cloudInitNoCloud", CLOUD_INIT),
    no(
        "cloudInitConfigDrive",
        CLOUD_INIT,
        "config drives are not supported yet; use cloudInitNoCloud",
    ),
    no("sysprep", Open(&[]), KINDS),
    yes(
        "containerDisk",
        Object(&[
            yes("image", Str).required(),
            pod("imagePullSecret", Str),
            yes("path", Str),
            pod("imagePullPolicy", Str),
        ]),
    ),
    no(
        "ephemeral",
        Object(&[yes("persistentVolumeClaim", Object(CLAIM))]),
        KINDS,
    ),
    yes("emptyDisk", Object(&[yes("capacity", Quantity).required()])),
    yes("dataVolume", Object(&[yes("name", Str).required(), HOTPLUGGABLE])),
    no(
        "configMap",
        Object(&[yes("name", Str), yes("optional", Bool), yes("volumeLabel", Str)]),
        KINDS,
    ),
    no(
        "secret",
        Object(&[
            yes("secretName", Str),
            yes("optional", Bool),
            yes("volumeLabel", Str),
        ]),
        KINDS,
    ),
    no("downwardAPI", Open(&[]), KINDS),
    no("serviceAccount", Object(&[yes("serviceAccountName", Str)]), KINDS),
    no("downwardMetrics", Open(&[]), KINDS),
    no("memoryDump", Open(&[]), KINDS),
    no("containerPath", Open(&[]), KINDS),
]);

const HOTPLUGGABLE: Field = noted(
    "hotpluggable",
    Bool,
    "disks cannot be removed from a running VM yet",
);

const CLAIM: &[Field] = &[yes("claimName", Str), yes("readOnly", Bool), HOTPLUGGABLE];

const CLOUD_INIT: Kind = Object(&[
    no("secretRef", Open(&[]), NO_SECRET),
    yes("userDataBase64", Str),
    yes("userData", Str),
    no("networkDataSecretRef", Open(&[]), NO_SECRET),
    yes("networkDataBase64", Str),
    yes("networkData", Str),
]);
