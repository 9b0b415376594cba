//! Secrets, ConfigMaps, PersistentVolumeClaims and DataVolumes.

use super::field_type::FieldType::{Any, Bool, List, Object, Open, Quantities, Str, Strings};
use super::field_type::{EMPTY, Field, FieldType, STRS, honoured, refused, warned};
use super::spec::METADATA;

const CLUSTER: &str = "is ignored: it only concerns the cluster";
const SPARSE: &str = "is ignored: a volume is a sparse file";
const NO_CHOICE: &str =
    "Husk makes a volume for each claim and cannot choose an existing one; pass its data with --volume";
const SOURCES: &str = "this source is not supported; supported sources: blank, http, registry and pvc";
const NO_STAGES: &str = "imports in stages are not supported";

/// A Secret.
pub(crate) static SECRET: FieldType = Object(&[
    honoured("apiVersion", Str),
    honoured("kind", Str),
    honoured("metadata", METADATA),
    honoured("data", Strings),
    honoured("stringData", Strings),
    honoured("type", Str),
    honoured("immutable", Bool),
]);

/// A ConfigMap.
pub(crate) static CONFIG_MAP: FieldType = Object(&[
    honoured("apiVersion", Str),
    honoured("kind", Str),
    honoured("metadata", METADATA),
    honoured("data", Strings),
    honoured("binaryData", Strings),
    honoured("immutable", Bool),
]);

/// A PersistentVolumeClaim.
pub(crate) static PERSISTENT_VOLUME_CLAIM: FieldType = Object(&[
    honoured("apiVersion", Str),
    honoured("kind", Str),
    honoured("metadata", METADATA),
    honoured("spec", Object(CLAIM)).required(),
    honoured("status", Any),
]);

/// A DataVolume.
pub(crate) static DATA_VOLUME: FieldType = DATA_VOLUME_TEMPLATE;

/// A DataVolume, or an entry of `spec.dataVolumeTemplates` of a VirtualMachine.
pub(super) const DATA_VOLUME_TEMPLATE: FieldType = Object(&[
    honoured("apiVersion", Str),
    honoured("kind", Str),
    honoured("metadata", METADATA),
    honoured("spec", Object(DATA_VOLUME_SPEC)).required(),
    honoured("status", Any),
]);

const CLAIM: &[Field] = &[
    honoured("accessModes", STRS),
    refused("selector", Open(&[]), NO_CHOICE),
    honoured(
        "resources",
        Object(&[
            honoured("requests", Quantities),
            warned("limits", Quantities, CLUSTER),
        ]),
    ),
    refused("volumeName", Str, NO_CHOICE),
    warned("storageClassName", Str, SPARSE),
    honoured("volumeMode", Str),
    honoured("dataSource", Object(DATA_SOURCE)),
    honoured("dataSourceRef", Object(DATA_SOURCE_REF)),
    warned("volumeAttributesClassName", Str, CLUSTER),
];

const DATA_SOURCE: &[Field] = &[
    honoured("apiGroup", Str),
    honoured("kind", Str).required(),
    honoured("name", Str).required(),
];

const DATA_SOURCE_REF: &[Field] = &[
    honoured("apiGroup", Str),
    honoured("kind", Str).required(),
    honoured("name", Str).required(),
    refused(
        "namespace",
        Str,
        "claims of other namespaces cannot be copied this way; use a DataVolume's source.pvc",
    ),
];

const DATA_VOLUME_SPEC: &[Field] = &[
    honoured("source", Object(SOURCE)),
    refused(
        "sourceRef",
        Open(&[]),
        "DataSources are not supported; name the claim or the image in source",
    ),
    honoured("pvc", Object(CLAIM)),
    honoured("storage", Object(CLAIM)),
    warned("priorityClassName", Str, CLUSTER),
    honoured("contentType", Str),
    refused("checkpoints", List(&Open(&[])), NO_STAGES),
    refused("finalCheckpoint", Bool, NO_STAGES),
    warned("preallocation", Bool, SPARSE),
];

const SOURCE: &[Field] = &[
    honoured(
        "http",
        Object(&[
            honoured("url", Str).required(),
            honoured("secretRef", Str),
            honoured("certConfigMap", Str),
            honoured("extraHeaders", STRS),
            honoured("secretExtraHeaders", STRS),
            honoured("checksum", Str),
        ]),
    ),
    refused("s3", Open(&[]), SOURCES),
    refused("gcs", Open(&[]), SOURCES),
    honoured(
        "registry",
        Object(&[
            honoured("url", Str),
            refused("imageStream", Str, "image streams need OpenShift; use url"),
            honoured("pullMethod", Str),
            honoured("secretRef", Str),
            honoured("certConfigMap", Str),
            honoured("platform", Object(&[honoured("architecture", Str)])),
        ]),
    ),
    honoured(
        "pvc",
        Object(&[
            honoured("namespace", Str).required(),
            honoured("name", Str).required(),
        ]),
    ),
    refused("upload", Open(&[]), SOURCES),
    honoured("blank", EMPTY),
    refused("imageio", Open(&[]), SOURCES),
    refused("vddk", Open(&[]), SOURCES),
    refused("snapshot", Open(&[]), SOURCES),
];
