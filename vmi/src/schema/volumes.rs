//! `spec.volumes[]`.

use super::Kind::{Bool, List, Object, Open, Quantity, Str};
use super::{Field, Kind, no, noted, pod, yes};

const KINDS: &str = "this kind of volume is not supported yet; supported are containerDisk, persistentVolumeClaim, \
                     dataVolume, ephemeral, hostDisk, emptyDisk, cloudInitNoCloud, cloudInitConfigDrive, configMap, \
                     secret, downwardAPI and serviceAccount";

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
    yes("cloudInitConfigDrive", CLOUD_INIT),
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
    yes(
        "ephemeral",
        Object(&[yes("persistentVolumeClaim", Object(CLAIM))]),
    ),
    yes("emptyDisk", Object(&[yes("capacity", Quantity).required()])),
    yes("dataVolume", Object(&[yes("name", Str).required(), HOTPLUGGABLE])),
    yes(
        "configMap",
        Object(&[yes("name", Str), yes("optional", Bool), yes("volumeLabel", Str)]),
    ),
    yes(
        "secret",
        Object(&[
            yes("secretName", Str),
            yes("optional", Bool),
            yes("volumeLabel", Str),
        ]),
    ),
    yes(
        "downwardAPI",
        Object(&[yes("fields", List(&Open(&[]))), yes("volumeLabel", Str)]),
    ),
    yes("serviceAccount", Object(&[yes("serviceAccountName", Str)])),
    no("downwardMetrics", Open(&[]), KINDS),
    no("memoryDump", Open(&[]), KINDS),
    no("containerPath", Open(&[]), KINDS),
]);

const HOTPLUGGABLE: Field = noted(
    "hotpluggable",
    Bool,
    "one that is there when the VM starts is a part of it, and stays until it ends",
);

const CLAIM: &[Field] = &[yes("claimName", Str), yes("readOnly", Bool), HOTPLUGGABLE];

const SECRET_REF: Kind = Object(&[yes("name", Str)]);

const CLOUD_INIT: Kind = Object(&[
    yes("secretRef", SECRET_REF),
    yes("userDataBase64", Str),
    yes("userData", Str),
    yes("networkDataSecretRef", SECRET_REF),
    yes("networkDataBase64", Str),
    yes("networkData", Str),
]);
