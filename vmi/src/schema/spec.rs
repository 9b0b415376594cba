//! `spec` of a VirtualMachineInstance and of a VirtualMachine, without devices and volumes.

use super::field_type::FieldType::{Any, Bool, List, Object, Open, Quantities, Quantity, Str, Strings};
use super::field_type::{
    COUNT, EMPTY, Field, FieldType, I32, I64, STRS, U32, honoured, pod, refused, warned,
};
use super::instancetype::MATCHER;
use super::objects::DATA_VOLUME_TEMPLATE;
use super::{
    credentials::ACCESS_CREDENTIAL, devices::DEVICES, network::DNS, network::NETWORK, volumes::VOLUME,
};

const CLUSTER: &str = "is ignored: it only concerns the cluster";
const PROBE_WARNING: &str = "is ignored: only the node agent of a cluster runs probes";
const POD_DNS: &str = "is ignored: it only concerns the pod, and the guest gets the name servers of its pod";
const NO_PINNING: &str = "dedicated CPUs are not supported yet; vCPUs are scheduled by the host kernel";

/// `spec` of a VirtualMachineInstance.
pub(crate) static VMI_SPEC: FieldType = Object(&[
    pod("priorityClassName", Str),
    pod("serviceAccountName", Str),
    honoured("domain", Object(DOMAIN)).required(),
    pod("nodeSelector", Strings),
    pod("affinity", Open(&[])),
    pod("schedulerName", Str),
    pod("tolerations", List(&Open(&[]))),
    pod("topologySpreadConstraints", List(&Open(&[]))),
    warned("evictionStrategy", Str, CLUSTER),
    honoured("startStrategy", Str),
    honoured("terminationGracePeriodSeconds", COUNT),
    honoured("volumes", List(&VOLUME)),
    warned("livenessProbe", PROBE, PROBE_WARNING),
    warned("readinessProbe", PROBE, PROBE_WARNING),
    honoured("hostname", Str),
    honoured("subdomain", Str),
    honoured("networks", List(&NETWORK)),
    warned("dnsPolicy", Str, POD_DNS),
    warned("dnsConfig", Object(DNS), POD_DNS),
    honoured("accessCredentials", List(&ACCESS_CREDENTIAL)),
    honoured("architecture", Str),
    refused(
        "resourceClaims",
        List(&Open(&[])),
        "dynamically allocated devices are not supported",
    ),
    refused(
        "utilityVolumes",
        List(&Open(&[])),
        "utility volumes are not supported; use volumes",
    ),
]);

/// `spec` of a VirtualMachine that runs by itself; its `template.spec` is checked separately.
pub(crate) static VM_SPEC: FieldType = Object(&[
    RUNNING,
    RUN_STRATEGY,
    TEMPLATE,
    refused(
        "instancetype",
        Open(&[]),
        "instance types are not read here: use `husk apply`, or expand the VM in a cluster (virtctl expand)",
    ),
    refused(
        "preference",
        Open(&[]),
        "preferences are not read here: use `husk apply`, or expand the VM in a cluster (virtctl expand)",
    ),
    warned(
        "dataVolumeTemplates",
        List(&Open(&[])),
        "is ignored: no DataVolumes are filled here; use `husk apply`, or pass the data with --volume NAME=PATH",
    ),
    LIVE_UPDATE_FEATURES,
    UPDATE_VOLUMES_STRATEGY,
]);

/// `spec` of a VirtualMachine among the objects that it needs; its `template.spec` is checked separately.
pub(crate) static WHOLE_VM_SPEC: FieldType = Object(&[
    RUNNING,
    RUN_STRATEGY,
    TEMPLATE,
    honoured("instancetype", MATCHER),
    honoured("preference", MATCHER),
    honoured("dataVolumeTemplates", List(&DATA_VOLUME_TEMPLATE)),
    LIVE_UPDATE_FEATURES,
    UPDATE_VOLUMES_STRATEGY,
]);

const RUNNING: Field = honoured("running", Bool);
const RUN_STRATEGY: Field = honoured("runStrategy", Str);
const TEMPLATE: Field = honoured(
    "template",
    Object(&[honoured("metadata", METADATA), honoured("spec", Any)]),
)
.required();
const LIVE_UPDATE_FEATURES: Field = warned("liveUpdateFeatures", Open(&[]), CLUSTER);
const UPDATE_VOLUMES_STRATEGY: Field = warned("updateVolumesStrategy", Str, CLUSTER);

/// The object around a spec. Of `status` only the claims and the CID are read.
pub(crate) static OBJECT: FieldType = Object(&[
    honoured("apiVersion", Str),
    honoured("kind", Str),
    honoured("metadata", METADATA),
    honoured("spec", Any),
    honoured("status", Any),
]);

/// `metadata` of an object; the fields that Husk does not use are not checked.
pub(super) const METADATA: FieldType = Open(&[
    honoured("name", Str),
    honoured("generateName", Str),
    honoured("namespace", Str),
    honoured("labels", Strings),
    honoured("annotations", Strings),
]);

const DOMAIN: &[Field] = &[
    honoured("resources", Object(RESOURCES)),
    honoured("cpu", Object(CPU)),
    honoured("memory", Object(MEMORY)),
    honoured("machine", Object(&[honoured("type", Str)])),
    honoured("firmware", Object(FIRMWARE)),
    honoured("clock", Object(CLOCK)),
    honoured("features", Object(FEATURES)),
    honoured("devices", Object(DEVICES)).required(),
    warned(
        "ioThreadsPolicy",
        Str,
        "is ignored: every virtio-blk disk has its own worker thread",
    ),
    warned(
        "ioThreads",
        IO_THREADS,
        "is ignored: every virtio-blk disk has its own worker thread",
    ),
    warned(
        "chassis",
        Object(CHASSIS),
        "is ignored: the SMBIOS chassis information is fixed",
    ),
    refused(
        "launchSecurity",
        Open(&[]),
        "encrypted guest memory (SEV, SNP, TDX) is not supported",
    ),
    honoured("rebootPolicy", Str),
];

pub(super) const IO_THREADS: FieldType = Open(&[]);

const RESOURCES: &[Field] = &[
    honoured("requests", Quantities),
    honoured("limits", Quantities),
    pod("overcommitGuestOverhead", Bool),
    refused(
        "claims",
        List(&Open(&[])),
        "dynamically allocated devices are not supported",
    ),
];

const CPU: &[Field] = &[
    honoured("cores", U32),
    honoured("sockets", U32),
    warned("maxSockets", U32, "is ignored: CPU hotplug is not supported yet"),
    honoured("threads", U32),
    honoured("model", Str),
    refused(
        "features",
        CPU_FEATURES,
        "single CPU features cannot be selected yet; the guest gets the features of the host CPU",
    ),
    refused("dedicatedCpuPlacement", Bool, NO_PINNING),
    refused(
        "numa",
        Open(&[]),
        "guest NUMA is not supported yet; the guest has one node",
    ),
    refused("isolateEmulatorThread", Bool, NO_PINNING),
    refused("realtime", Open(&[]), "realtime vCPUs are not supported yet"),
];

pub(super) const CPU_FEATURES: FieldType = List(&Object(&[
    honoured("name", Str).required(),
    honoured("policy", Str),
]));

const MEMORY: &[Field] = &[
    honoured("hugepages", Object(&[honoured("pageSize", Str)])),
    honoured("guest", Quantity),
    warned(
        "maxGuest",
        Quantity,
        "is ignored: memory hotplug is not supported yet",
    ),
    pod("reservedOverhead", Open(&[])),
];

const FIRMWARE: &[Field] = &[
    honoured("uuid", Str),
    honoured(
        "bootloader",
        Object(&[
            warned(
                "bios",
                Object(&[honoured("useSerial", Bool)]),
                "is ignored: Husk runs no BIOS and boots the kernel in the disk image directly",
            ),
            honoured("efi", EFI),
        ]),
    ),
    honoured("serial", Str),
    honoured(
        "kernelBoot",
        Object(&[
            honoured("kernelArgs", Str),
            honoured(
                "container",
                Object(&[
                    honoured("image", Str),
                    honoured("imagePullSecret", Str),
                    honoured("imagePullPolicy", Str),
                    honoured("kernelPath", Str),
                    honoured("initrdPath", Str),
                ]),
            ),
        ]),
    ),
    refused(
        "acpi",
        Open(&[]),
        "custom ACPI tables (SLIC, MSDM) are not supported",
    ),
];

pub(super) const EFI: FieldType = Object(&[
    honoured("secureBoot", Bool),
    refused(
        "persistent",
        Bool,
        "persistent EFI variables are not supported: Husk runs no UEFI firmware",
    ),
]);

const TIMER_WARNING: &str =
    "is ignored: the guest has kvmclock, the TSC and an RTC without periodic interrupts";

const CLOCK: &[Field] = &[
    honoured("utc", CLOCK_UTC),
    honoured("timezone", Str),
    honoured("timer", CLOCK_TIMERS),
];

pub(super) const CLOCK_UTC: FieldType = Object(&[honoured("offsetSeconds", I64)]);

pub(super) const CLOCK_TIMERS: FieldType = Object(&[
    warned("hpet", TIMER, TIMER_WARNING),
    warned("pit", TIMER, TIMER_WARNING),
    warned("rtc", TIMER, TIMER_WARNING),
    warned("hyperv", TIMER, TIMER_WARNING),
    warned("kvm", TIMER, "is ignored: kvmclock is always on"),
]);

const TIMER: FieldType = Object(&[
    honoured("present", Bool),
    honoured("tickPolicy", Str),
    honoured("track", Str),
]);

pub(super) const FEATURE: FieldType = Object(&[honoured("enabled", Bool)]);
const HYPERV_WARNING: &str = "is ignored: there are no Hyper-V enlightenments, and Linux does not use them";

const FEATURES: &[Field] = &[
    honoured("acpi", FEATURE),
    honoured(
        "apic",
        Object(&[
            honoured("enabled", Bool),
            warned(
                "endOfInterrupt",
                Bool,
                "is ignored: the guest gets the feature if KVM supports it on this host",
            ),
        ]),
    ),
    warned("hyperv", Object(HYPERV), HYPERV_WARNING),
    warned("hypervPassthrough", FEATURE, HYPERV_WARNING),
    honoured("smm", FEATURE),
    honoured(
        "kvm",
        Object(&[refused("hidden", Bool, "KVM cannot be hidden from the guest")]),
    ),
    warned(
        "pvspinlock",
        FEATURE,
        "is ignored: the guest gets the feature if KVM supports it on this host",
    ),
];

pub(super) const HYPERV: &[Field] = &[
    honoured("relaxed", FEATURE),
    honoured("vapic", FEATURE),
    honoured(
        "spinlocks",
        Object(&[honoured("enabled", Bool), honoured("spinlocks", U32)]),
    ),
    honoured("vpindex", FEATURE),
    honoured("runtime", FEATURE),
    honoured("synic", FEATURE),
    honoured(
        "synictimer",
        Object(&[honoured("enabled", Bool), honoured("direct", FEATURE)]),
    ),
    honoured("reset", FEATURE),
    honoured(
        "vendorid",
        Object(&[honoured("enabled", Bool), honoured("vendorid", Str)]),
    ),
    honoured("frequencies", FEATURE),
    honoured("reenlightenment", FEATURE),
    honoured(
        "tlbflush",
        Object(&[
            honoured("enabled", Bool),
            honoured("direct", FEATURE),
            honoured("extended", FEATURE),
        ]),
    ),
    honoured("ipi", FEATURE),
    honoured("evmcs", FEATURE),
];

const CHASSIS: &[Field] = &[
    honoured("manufacturer", Str),
    honoured("version", Str),
    honoured("serial", Str),
    honoured("asset", Str),
    honoured("sku", Str),
];

const PROBE: FieldType = Object(&[
    honoured("guestAgentPing", EMPTY),
    honoured("exec", Object(&[honoured("command", STRS)])),
    honoured(
        "httpGet",
        Object(&[
            honoured("path", Str),
            honoured("port", Any).required(),
            honoured("host", Str),
            honoured("scheme", Str),
            honoured(
                "httpHeaders",
                List(&Object(&[
                    honoured("name", Str).required(),
                    honoured("value", Str).required(),
                ])),
            ),
        ]),
    ),
    honoured(
        "tcpSocket",
        Object(&[honoured("port", Any).required(), honoured("host", Str)]),
    ),
    honoured("initialDelaySeconds", I32),
    honoured("timeoutSeconds", I32),
    honoured("periodSeconds", I32),
    honoured("successThreshold", I32),
    honoured("failureThreshold", I32),
]);
