//! Instance types and preferences.
//!
//! Only names and types count here: the support of a field is that of the VMI's field that it is written to.

use super::devices::{BLOCK_SIZE, TPM};
use super::field_type::FieldType::{Bool, Int, List, Object, Open, Quantity, Str, Strings};
use super::field_type::{COUNT, EMPTY, Field, FieldType, U32, honoured, refused};
use super::spec::{CLOCK_TIMERS, CLOCK_UTC, CPU_FEATURES, EFI, FEATURE, HYPERV, IO_THREADS, METADATA};

/// A VirtualMachineInstancetype or VirtualMachineClusterInstancetype.
pub(crate) static INSTANCETYPE: FieldType = Object(&[
    honoured("apiVersion", Str),
    honoured("kind", Str),
    honoured("metadata", METADATA),
    honoured("spec", Object(INSTANCETYPE_SPEC)).required(),
]);

/// A VirtualMachinePreference or VirtualMachineClusterPreference.
pub(crate) static PREFERENCE: FieldType = Object(&[
    honoured("apiVersion", Str),
    honoured("kind", Str),
    honoured("metadata", METADATA),
    honoured("spec", Object(PREFERENCE_SPEC)).required(),
]);

/// `spec.instancetype` and `spec.preference` of a VirtualMachine.
pub(super) const MATCHER: FieldType = Object(&[
    honoured("name", Str),
    honoured("kind", Str),
    refused(
        "revisionName",
        Str,
        "stored revisions need a cluster; remove it, and the object itself is used",
    ),
    honoured("inferFromVolume", Str),
    honoured("inferFromVolumeFailurePolicy", Str),
]);

const INSTANCETYPE_SPEC: &[Field] = &[
    honoured("nodeSelector", Strings),
    honoured("schedulerName", Str),
    honoured(
        "cpu",
        Object(&[
            honoured("guest", U32).required(),
            honoured("model", Str),
            honoured("dedicatedCPUPlacement", Bool),
            honoured("numa", Open(&[])),
            honoured("isolateEmulatorThread", Bool),
            honoured("realtime", Open(&[])),
            honoured("maxSockets", U32),
        ]),
    )
    .required(),
    honoured(
        "memory",
        Object(&[
            honoured("guest", Quantity).required(),
            honoured("hugepages", Object(&[honoured("pageSize", Str)])),
            honoured("overcommitPercent", Int(0, 100)),
            honoured("maxGuest", Quantity),
        ]),
    )
    .required(),
    honoured("gpus", List(&DEVICE)),
    honoured("hostDevices", List(&DEVICE)),
    honoured("ioThreadsPolicy", Str),
    honoured("ioThreads", IO_THREADS),
    honoured("launchSecurity", LAUNCH_SECURITY),
    honoured("annotations", Strings),
];

const DEVICE: FieldType = Object(&[
    honoured("name", Str).required(),
    honoured("deviceName", Str),
    honoured("claimName", Str),
    honoured("requestName", Str),
    honoured("virtualGPUOptions", Open(&[])),
    honoured("tag", Str),
]);

const LAUNCH_SECURITY: FieldType = Object(&[
    honoured("sev", Open(&[])),
    honoured("snp", Open(&[])),
    honoured("tdx", Open(&[])),
]);

const PREFERENCE_SPEC: &[Field] = &[
    honoured(
        "clock",
        Object(&[
            honoured(
                "preferredClockOffset",
                Object(&[honoured("utc", CLOCK_UTC), honoured("timezone", Str)]),
            ),
            honoured("preferredTimer", CLOCK_TIMERS),
        ]),
    ),
    honoured(
        "cpu",
        Object(&[
            honoured("preferredCPUTopology", Str),
            honoured(
                "spreadOptions",
                Object(&[honoured("across", Str), honoured("ratio", U32)]),
            ),
            honoured("preferredCPUFeatures", CPU_FEATURES),
        ]),
    ),
    honoured("devices", Object(DEVICES)),
    honoured(
        "features",
        Object(&[
            honoured("preferredAcpi", FEATURE),
            honoured(
                "preferredApic",
                Object(&[honoured("enabled", Bool), honoured("endOfInterrupt", Bool)]),
            ),
            honoured("preferredHyperv", Object(HYPERV)),
            honoured("preferredKvm", Object(&[honoured("hidden", Bool)])),
            honoured("preferredPvspinlock", FEATURE),
            honoured("preferredSmm", FEATURE),
        ]),
    ),
    honoured(
        "firmware",
        Object(&[
            honoured("preferredUseBios", Bool),
            honoured("preferredUseBiosSerial", Bool),
            honoured("preferredUseEfi", Bool),
            honoured("preferredUseSecureBoot", Bool),
            honoured("preferredEfi", EFI),
        ]),
    ),
    honoured("machine", Object(&[honoured("preferredMachineType", Str)])),
    honoured("volumes", Object(&[honoured("preferredStorageClassName", Str)])),
    honoured("preferredSubdomain", Str),
    honoured("preferredTerminationGracePeriodSeconds", COUNT),
    honoured(
        "requirements",
        Object(&[
            honoured("cpu", Object(&[honoured("guest", U32).required()])),
            honoured("memory", Object(&[honoured("guest", Quantity).required()])),
            honoured("architecture", Str),
        ]),
    ),
    honoured("annotations", Strings),
    honoured("preferSpreadSocketToCoreRatio", U32),
    honoured("preferredArchitecture", Str),
    honoured("preferredLaunchSecurity", LAUNCH_SECURITY),
];

const DEVICES: &[Field] = &[
    honoured("preferredAutoattachGraphicsDevice", Bool),
    honoured("preferredAutoattachMemBalloon", Bool),
    honoured("preferredAutoattachPodInterface", Bool),
    honoured("preferredAutoattachSerialConsole", Bool),
    honoured("preferredAutoattachInputDevice", Bool),
    honoured("preferredDisableHotplug", Bool),
    honoured("preferredVirtualGPUOptions", Open(&[])),
    honoured("preferredSoundModel", Str),
    honoured("preferredUseVirtioTransitional", Bool),
    honoured("preferredInputBus", Str),
    honoured("preferredInputType", Str),
    honoured("preferredDiskBus", Str),
    honoured("preferredLunBus", Str),
    honoured("preferredCdromBus", Str),
    honoured("preferredDiskDedicatedIoThread", Bool),
    honoured("preferredDiskCache", Str),
    honoured("preferredDiskIO", Str),
    honoured("preferredDiskBlockSize", BLOCK_SIZE),
    honoured("preferredInterfaceModel", Str),
    honoured("preferredRng", EMPTY),
    honoured("preferredBlockMultiQueue", Bool),
    honoured("preferredNetworkInterfaceMultiQueue", Bool),
    honoured("preferredTPM", TPM),
    honoured("preferredInterfaceMasquerade", EMPTY),
    honoured("preferredPanicDeviceModel", Str),
    honoured("preferredVideoType", Str),
];
