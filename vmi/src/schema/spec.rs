//! `spec` of a VirtualMachineInstance and of a VirtualMachine, without devices and volumes.

use super::Kind::{Any, Bool, List, Object, Open, Quantities, Quantity, Str, Strings};
use super::{COUNT, EMPTY, Field, I32, I64, Kind, STRS, U32, no, noted, pod, yes};
use super::{devices::DEVICES, network::DNS, network::NETWORK, volumes::VOLUME};

const CLUSTER: &str = "is the cluster's concern; it changes nothing in the VM";
const PROBE_NOTE: &str = "probes are run by a cluster's node agent; nothing probes a VM outside one";
const POD_DNS: &str =
    "is for the pod that a cluster runs the VM in; the guest is told of the name servers that its pod has";
const NO_PINNING: &str = "vCPUs cannot be pinned to dedicated CPUs yet; the host's scheduler places them";

/// `spec` of a VirtualMachineInstance.
pub(crate) static VMI_SPEC: Kind = Object(&[
    pod("priorityClassName", Str),
    yes("domain", Object(DOMAIN)).required(),
    pod("nodeSelector", Strings),
    pod("affinity", Open(&[])),
    pod("schedulerName", Str),
    pod("tolerations", List(&Open(&[]))),
    pod("topologySpreadConstraints", List(&Open(&[]))),
    noted("evictionStrategy", Str, CLUSTER),
    yes("startStrategy", Str),
    yes("terminationGracePeriodSeconds", COUNT),
    yes("volumes", List(&VOLUME)),
    noted("livenessProbe", PROBE, PROBE_NOTE),
    noted("readinessProbe", PROBE, PROBE_NOTE),
    yes("hostname", Str),
    yes("subdomain", Str),
    yes("networks", List(&NETWORK)),
    noted("dnsPolicy", Str, POD_DNS),
    noted("dnsConfig", Object(DNS), POD_DNS),
    no(
        "accessCredentials",
        List(&Open(&[])),
        "Secrets cannot be read yet; give keys and passwords in cloudInitNoCloud.userData",
    ),
    yes("architecture", Str),
    no(
        "resourceClaims",
        List(&Open(&[])),
        "dynamically allocated devices are not supported",
    ),
    no(
        "utilityVolumes",
        List(&Open(&[])),
        "utility volumes are not supported; supported volumes go to volumes",
    ),
]);

/// `spec` of a VirtualMachine, whose `template.spec` is checked apart.
pub(crate) static VM_SPEC: Kind = Object(&[
    yes("running", Bool),
    yes("runStrategy", Str),
    yes("template", Object(&[yes("metadata", METADATA), yes("spec", Any)])).required(),
    no(
        "instancetype",
        Open(&[]),
        "instance types live in a cluster; expand the VM there first (virtctl expand)",
    ),
    no(
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
pub(crate) static OBJECT: Kind = Object(&[
    yes("apiVersion", Str),
    yes("kind", Str),
    yes("metadata", METADATA),
    yes("spec", Any),
    yes("status", Any),
]);

/// `metadata` of an object: the API server's business, but for what is used here.
const METADATA: Kind = Open(&[
    yes("name", Str),
    yes("generateName", Str),
    yes("namespace", Str),
    yes("labels", Strings),
    yes("annotations", Strings),
]);

const DOMAIN: &[Field] = &[
    yes("resources", Object(RESOURCES)),
    yes("cpu", Object(CPU)),
    yes("memory", Object(MEMORY)),
    yes("machine", Object(&[yes("type", Str)])),
    yes("firmware", Object(FIRMWARE)),
    yes("clock", Object(CLOCK)),
    yes("features", Object(FEATURES)),
    yes("devices", Object(DEVICES)).required(),
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
    no(
        "launchSecurity",
        Open(&[]),
        "encrypted guest memory (SEV, SNP, TDX) is not supported",
    ),
    yes("rebootPolicy", Str),
];

const RESOURCES: &[Field] = &[
    yes("requests", Quantities),
    yes("limits", Quantities),
    pod("overcommitGuestOverhead", Bool),
    no(
        "claims",
        List(&Open(&[])),
        "dynamically allocated devices are not supported",
    ),
];

const CPU: &[Field] = &[
    yes("cores", U32),
    yes("sockets", U32),
    noted("maxSockets", U32, "vCPUs cannot be added to a running VM yet"),
    yes("threads", U32),
    yes("model", Str),
    no(
        "features",
        List(&Object(&[yes("name", Str).required(), yes("policy", Str)])),
        "the guest sees the host's CPU; single features cannot be chosen yet",
    ),
    no("dedicatedCpuPlacement", Bool, NO_PINNING),
    no(
        "numa",
        Open(&[]),
        "the guest's memory is one node; a NUMA mapping is not supported yet",
    ),
    no("isolateEmulatorThread", Bool, NO_PINNING),
    no("realtime", Open(&[]), "realtime vCPUs are not supported yet"),
];

const MEMORY: &[Field] = &[
    yes("hugepages", Object(&[yes("pageSize", Str)])),
    yes("guest", Quantity),
    noted("maxGuest", Quantity, "memory cannot be added to a running VM yet"),
    pod("reservedOverhead", Open(&[])),
];

const FIRMWARE: &[Field] = &[
    yes("uuid", Str),
    yes(
        "bootloader",
        Object(&[
            noted(
                "bios",
                Object(&[yes("useSerial", Bool)]),
                "no BIOS runs: the kernel in the disk image is started directly",
            ),
            yes(
                "efi",
                Object(&[
                    yes("secureBoot", Bool),
                    no(
                        "persistent",
                        Bool,
                        "no UEFI firmware runs, so it has no variables to keep",
                    ),
                ]),
            ),
        ]),
    ),
    yes("serial", Str),
    yes(
        "kernelBoot",
        Object(&[
            yes("kernelArgs", Str),
            yes(
                "container",
                Object(&[
                    yes("image", Str),
                    pod("imagePullSecret", Str),
                    pod("imagePullPolicy", Str),
                    yes("kernelPath", Str),
                    yes("initrdPath", Str),
                ]),
            ),
        ]),
    ),
    no(
        "acpi",
        Open(&[]),
        "ACPI tables of one's own (SLIC, MSDM) are not supported",
    ),
];

const TIMER_NOTE: &str = "the guest has kvmclock, the TSC and an RTC without periodic interrupts; other timers and tick policies do not exist";

const CLOCK: &[Field] = &[
    yes("utc", Object(&[yes("offsetSeconds", I64)])),
    yes("timezone", Str),
    yes(
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

const TIMER: Kind = Object(&[yes("present", Bool), yes("tickPolicy", Str), yes("track", Str)]);

const FEATURE: Kind = Object(&[yes("enabled", Bool)]);
const HYPERV_NOTE: &str = "Hyper-V enlightenments are not offered to the guest; Linux does not use them";

const FEATURES: &[Field] = &[
    yes("acpi", FEATURE),
    yes(
        "apic",
        Object(&[
            yes("enabled", Bool),
            noted(
                "endOfInterrupt",
                Bool,
                "the guest is told what KVM offers on this host",
            ),
        ]),
    ),
    noted("hyperv", Object(HYPERV), HYPERV_NOTE),
    noted("hypervPassthrough", FEATURE, HYPERV_NOTE),
    yes("smm", FEATURE),
    no(
        "kvm",
        Object(&[yes("hidden", Bool)]),
        "KVM cannot be hidden from the guest",
    ),
    noted(
        "pvspinlock",
        FEATURE,
        "the guest is told what KVM offers on this host",
    ),
];

const HYPERV: &[Field] = &[
    yes("relaxed", FEATURE),
    yes("vapic", FEATURE),
    yes(
        "spinlocks",
        Object(&[yes("enabled", Bool), yes("spinlocks", U32)]),
    ),
    yes("vpindex", FEATURE),
    yes("runtime", FEATURE),
    yes("synic", FEATURE),
    yes(
        "synictimer",
        Object(&[yes("enabled", Bool), yes("direct", FEATURE)]),
    ),
    yes("reset", FEATURE),
    yes("vendorid", Object(&[yes("enabled", Bool), yes("vendorid", Str)])),
    yes("frequencies", FEATURE),
    yes("reenlightenment", FEATURE),
    yes(
        "tlbflush",
        Object(&[
            yes("enabled", Bool),
            yes("direct", FEATURE),
            yes("extended", FEATURE),
        ]),
    ),
    yes("ipi", FEATURE),
    yes("evmcs", FEATURE),
];

const CHASSIS: &[Field] = &[
    yes("manufacturer", Str),
    yes("version", Str),
    yes("serial", Str),
    yes("asset", Str),
    yes("sku", Str),
];

const PROBE: Kind = Object(&[
    yes("guestAgentPing", EMPTY),
    yes("exec", Object(&[yes("command", STRS)])),
    yes(
        "httpGet",
        Object(&[
            yes("path", Str),
            yes("port", Any).required(),
            yes("host", Str),
            yes("scheme", Str),
            yes(
                "httpHeaders",
                List(&Object(&[
                    yes("name", Str).required(),
                    yes("value", Str).required(),
                ])),
            ),
        ]),
    ),
    yes(
        "tcpSocket",
        Object(&[yes("port", Any).required(), yes("host", Str)]),
    ),
    yes("initialDelaySeconds", I32),
    yes("timeoutSeconds", I32),
    yes("periodSeconds", I32),
    yes("successThreshold", I32),
    yes("failureThreshold", I32),
]);
