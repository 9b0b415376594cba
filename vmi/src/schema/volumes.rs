//! `spec.volumes[]`.

use super::field_type::FieldType::{Bool, List, Object, Open, Quantity, Str};
use super::field_type::{EMPTY, Field, FieldType, honoured, refused, warned};

const KINDS: &str = "this volume type is not supported yet; supported types: containerDisk, persistentVolumeClaim, \
                     dataVolume, ephemeral, hostDisk, emptyDisk, cloudInitNoCloud, cloudInitConfigDrive, configMap, \
                     secret, downwardAPI, downwardMetrics and serviceAccount";

pub(super) const VOLUME: FieldType = Object(&[
    honoured("name", Str).required(),
    honoured(
        "hostDisk",
        Object(&[
            honoured("path", Str).required(),
            honoured("type", Str).required(),
            honoured("capacity", Quantity),
            warned(
                "shared",
                Bool,
                "is ignored: it only matters for live migration, which is not supported",
            ),
        ]),
    ),
    honoured("persistentVolumeClaim", Object(CLAIM)),
    honoured("cloudInitNoCloud", CLOUD_INIT),
    honoured("cloudInitConfigDrive", CLOUD_INIT),
    refused("sysprep", Open(&[]), KINDS),
    honoured(
        "containerDisk",
        Object(&[
            honoured("image", Str).required(),
            honoured("imagePullSecret", Str),
            honoured("path", Str),
            honoured("imagePullPolicy", Str),
        ]),
    ),
    honoured(
        "ephemeral",
        Object(&[honoured("persistentVolumeClaim", Object(CLAIM))]),
    ),
    honoured("emptyDisk", Object(&[honoured("capacity", Quantity).required()])),
    honoured(
        "dataVolume",
        Object(&[honoured("name", Str).required(), HOTPLUGGABLE]),
    ),
    honoured(
        "configMap",
        Object(&[
            honoured("name", Str),
            honoured("optional", Bool),
            honoured("volumeLabel", Str),
        ]),
    ),
    honoured(
        "secret",
        Object(&[
            honoured("secretName", Str),
            honoured("optional", Bool),
            honoured("volumeLabel", Str),
        ]),
    ),
    honoured(
        "downwardAPI",
        Object(&[honoured("fields", List(&Open(&[]))), honoured("volumeLabel", Str)]),
    ),
    honoured("serviceAccount", Object(&[honoured("serviceAccountName", Str)])),
    honoured("downwardMetrics", EMPTY),
    refused("memoryDump", Open(&[]), KINDS),
    refused("containerPath", Open(&[]), KINDS),
]);

const HOTPLUGGABLE: Field = warned(
    "hotpluggable",
    Bool,
    "the VM can only unplug a volume that it did not start with",
);

const CLAIM: &[Field] = &[
    honoured("claimName", Str),
    honoured("readOnly", Bool),
    HOTPLUGGABLE,
];

const SECRET_REF: FieldType = Object(&[honoured("name", Str)]);

const CLOUD_INIT: FieldType = Object(&[
    honoured("secretRef", SECRET_REF),
    honoured("userDataBase64", Str),
    honoured("userData", Str),
    honoured("networkDataSecretRef", SECRET_REF),
    honoured("networkDataBase64", Str),
    honoured("networkData", Str),
]);
