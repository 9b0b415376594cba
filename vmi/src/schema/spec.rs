//! `spec` of a VirtualMachineInstance and of a VirtualMachine, without devices and volumes.

use super::field_type::FieldType::{Any, Bool, List, Object, Open, Quantities, Quantity, Str, Strings};
use super::field_type::{COUNT, EMPTY, Field, FieldType, I32, I64, STRS, U32, honoured, noted, pod, refused};
use super::{devices::DEVICES, network::DNS, network::NETWORK, volumes::VOLUME};

const CLUSTER: &str = "is the cluster's concern; it changes nothing in the VM";
const PROBE_NOTE: &str = "probes are run by a cluster's node agent; nothing probes a VM outside one";
const POD_DNS: &str =
    "is for the pod that a cluster runs the VM in; the guest is told of the name servers that its pod has";
const NO_PINNING: &str = "vCPUs cannot be pinned to dedicated CPUs yet; the host's scheduler places them";

/// `spec` of a VirtualMachineInstance.
pub(crate) static VMI_SPEC: FieldType = Object(&[
    pod("priorityClassName", Str),
    honoured("domain", Object(DOMAIN)).required(),
    pod("nodeSelector", Strings),
    pod("affinity", Open(&[])),
    pod("schedulerName", Str),
    pod("tolerations", List(&Open(&[]))),
    pod("topologySpreadConstraints", List(&Open(&[]))),
    noted("evictionStrategy", Str, CLUSTER),
    honoured("startStrategy", Str),
    honoured("terminationGracePeriodSeconds", COUNT),
    honoured("volumes", List(&VOLUME)),
    noted("livenessProbe", PROBE, PROBE_NOTE),
    noted("readinessProbe", PROBE, PROBE_NOTE),
    honoured("hostname", Str),
    honoured("subdomain", Str),
    honoured("networks", List(&NETWORK)),
    noted("dnsPolicy", Str, POD_DNS),
    noted("dnsConfig", Object(DNS), POD_DNS),
    refused(
        "accessCredentials",
        List(&Open(&[])),
        "Secrets cannot be read yet; give keys and passwords in cloudInitNoCloud.userData",
    ),
    honoured("architecture", Str),
    refused(
        "resourceClaims",
        List(&Open(&[])),
        "dynamically allocated devices are not supported",
    ),
    refused(
        "utilityVolumes",
        List(&Open(&[])),
        "utility volumes are not supported; supported volumes go to volumes",
    ),
]);

/// `spec` of a VirtualMachine, whose `template.spec` is checked apart.
pub(crate) static VM_SPEC: FieldType = Object(&[
    honoured("running", Bool),
    honoured("runStrategy", Str),
    honoured(
        "template",
        Object(&[honoured("metadata", METADATA), honoured("spec", Any)]),
    )
    .required(),
    refused(
        "instancetype",
        Open(&[]),
        "instance types live in a cluster; expand the VM there first (virtctl expand)",
    ),
    refused(
        "preference",
        Open(&[]),
        "preferences live in a cluster; expand the VM there first (virtctl expand)",
    ),
    noted(
        "dataVolumeTemplates",
        List(&Open(&[])),
        "DataVolumes are filled by a cluster; name the data with --volume NAME=PATH",
    ),
    noted("liveUpdateFeatures", Open(&[]), CLUSTER),
    noted("updateVolumesStrategy", Str, CLUSTER),
]);

/// What stands around a spec. What a cluster wrote into `status` means nothing here.
pub(crate) static OBJECT: FieldType = Object(&[
    honoured("apiVersion", Str),
    honoured("kind", Str),
    honoured("metadata", METADATA),
    honoured("spec", Any),
    honoured("status", Any),
]);

/// `metadata` of an object: the API server's business, but for what is used here.
const METADATA: FieldType = Open(&[
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
    noted(
        "ioThreadsPolicy",
        Str,
        "every disk has a worker of its own; nothing is shared",
    ),
    noted(
        "ioThreads",
        Open(&[]),
        "every disk has a worker of its own; nothing is shared",
    ),
    noted(
        "chassis",
        Object(CHASSIS),
        "the guest is shown a chassis without names",
    ),
    refused(
        "launchSecurity",
        Open(&[]),
        "encrypted guest memory (SEV, SNP, TDX) is not supported",
    ),
    honoured("rebootPolicy", Str),
];

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
    noted("maxSockets", U32, "vCPUs cannot be added to a running VM yet"),
    honoured("threads", U32),
    honoured("model", Str),
    refused(
        "features",
        List(&Object(&[
            honoured("name", Str).required(),
            honoured("policy", Str),
        ])),
        "the guest sees the host's CPU; single features cannot be chosen yet",
    ),
    refused("dedicatedCpuPlacement", Bool, NO_PINNING),
    refused(
        "numa",
        Open(&[]),
        "the guest's memory is one node; a NUMA mapping is not supported yet",
    ),
    refused("isolateEmulatorThread", Bool, NO_PINNING),
    refused("realtime", Open(&[]), "realtime vCPUs are not supported yet"),
];

const MEMORY: &[Field] = &[
    honoured("hugepages", Object(&[honoured("pageSize", Str)])),
    honoured("guest", Quantity),
    noted("maxGuest", Quantity, "memory cannot be added to a running VM yet"),
    pod("reservedOverhead", Open(&[])),
];

const FIRMWARE: &[Field] = &[
    honoured("uuid", Str),
    honoured(
        "bootloader",
        Object(&[
            noted(
                "bios",
                Object(&[honoured("useSerial", Bool)]),
                "no BIOS runs: the kernel in the disk image is started directly",
            ),
            honoured(
                "efi",
                Object(&[
                    honoured("secureBoot", Bool),
                    refused(
                        "persistent",
                        Bool,
                        "no UEFI firmware runs, so it has no variables to keep",
                    ),
                ]),
            ),
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
                    pod("imagePullSecret", Str),
                    pod("imagePullPolicy", Str),
                    honoured("kernelPath", Str),
                    honoured("initrdPath", Str),
                ]),
            ),
        ]),
    ),
    refused(
        "acpi",
        Open(&[]),
        "ACPI tables of one's own (SLIC, MSDM) are not supported",
    ),
];

const TIMER_NOTE: &str = "the guest has kvmclock, the TSC and an RTC without periodic interrupts; other timers and tick policies do not exist";

const CLOCK: &[Field] = &[
    honoured("utc", Object(&[honoured("offsetSeconds", I64)])),
    honoured("timezone", Str),
    honoured(
        "timer",
        Object(&[
            noted("hpet", TIMER, TIMER_NOTE),
            noted("pit", TIMER, TIMER_NOTE),
            noted("rtc", TIMER, TIMER_NOTE),
            noted("hyperv", TIMER, TIMER_NOTE),
            noted("kvm", TIMER, "kvmclock is always offered to the guest"),
        ]),
    ),
];

const TIMER: FieldType = Object(&[
    honoured("present", Bool),
    honoured("tickPolicy", Str),
    honoured("track", Str),
]);

const FEATURE: FieldType = Object(&[honoured("enabled", Bool)]);
const HYPERV_NOTE: &str = "Hyper-V enlightenments are not offered to the guest; Linux does not use them";

const FEATURES: &[Field] = &[
    honoured("acpi", FEATURE),
    honoured(
        "apic",
        Object(&[
            honoured("enabled", Bool),
            noted(
                "endOfInterrupt",
                Bool,
                "the guest is told what KVM offers on this host",
            ),
        ]),
    ),
    noted("hyperv", Object(HYPERV), HYPERV_NOTE),
    noted("hypervPassthrough", FEATURE, HYPERV_NOTE),
    honoured("smm", FEATURE),
    refused(
        "kvm",
        Object(&[honoured("hidden", Bool)]),
        "KVM cannot be hidden from the guest",
    ),
    noted(
        "pvspinlock",
        FEATURE,
        "the guest is told what KVM offers on this host",
    ),
];

const HYPERV: &[Field] = &[
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
