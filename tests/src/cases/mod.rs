//! The cases, by tier.

use crate::harness::Case;

mod apply;
mod apply_examples;
mod apply_user;
mod bad_boot;
mod bad_manifest;
mod balloon;
mod command;
mod console;
mod crash;
mod debian;
mod demo;
mod disks;
mod downward_metrics;
mod fio;
mod flushed;
mod full_disk;
mod guest_agent;
mod host_boot;
mod hotplug;
mod io_error;
mod killed;
mod kubevirt;
mod lun;
mod machine;
mod network;
mod pause;
mod power_cut;
mod power_cut_stores;
mod qcow2;
mod qcow2_refused;
mod reboot;
mod registry;
mod resize;
mod scsi;
mod shim;
mod snapshot;
mod soak;
mod stop;
mod sync;
mod thousand;
mod unprivileged;
mod upgrade;
mod vhost_vsock;
mod volumes;
mod vsock;
mod watchdog;

/// Cases that run each time.
pub const DEFAULT: &[Case] = &[
    command::DOCTOR,
    bad_manifest::CASE,
    bad_boot::GARBAGE_KERNEL,
    bad_boot::TRUNCATED_IMAGE,
    bad_boot::HOSTILE_IMAGES,
    machine::SMALL,
    machine::LARGE,
    command::LIFE,
    console::SESSIONS,
    disks::CASE,
    fio::CASE,
    qcow2_refused::REFUSED,
    qcow2_refused::RAW,
    power_cut::CASE,
    resize::CASE,
    io_error::STOP,
    scsi::SMALL,
    hotplug::ONE,
    reboot::CASE,
    pause::CASE,
    snapshot::PLAIN,
    guest_agent::CASE,
    vsock::CASE,
    stop::BUTTON,
    crash::PANIC,
    crash::TRIPLE_FAULT,
    killed::VMM,
    killed::MONITOR,
    killed::COMMAND,
    network::masquerade::CASE,
    shim::killed::ONE,
    shim::launcher::CASE,
    full_disk::RUNTIME_DIR,
    unprivileged::CASE,
    volumes::CASE,
    apply::LIFE,
    demo::CASE,
];

/// Slow cases of `cargo xtask test --full`, which other cases and unit tests of every run mostly cover:
///
/// | case | covered in every run by |
/// | --- | --- |
/// | `kill-after-flush` | `power-cut`, by the log of all writes |
/// | `io-error-report`, `full-disk-under-emptydisk` | `io-error-stop`; tests of the policies in `husk-disk` and `husk-virtio-blk` |
/// | `lun-reservation` | tests of reservations in `husk-virtio-scsi` |
/// | `sync` | `hotplug`; tests of a changed manifest in `husk-monitor` |
/// | `free-memory` | tests of the balloon in `husk-devices` |
/// | `vhost-vsock` | `vsock`, by the VMM's own device |
/// | `stop-grace` | `stop`; tests of `husk-monitor` with a VMM of its own |
/// | `watchdog` | payload tests of `husk-vmm` with a guest of a few instructions |
/// | `downward-metrics` | tests of the port and the disk in `husk-monitor` |
/// | `net-standalone` | `demo`, with one such VM; `net-masquerade` |
/// | `net-link-local`, `net-hotplug` | `net-masquerade`; tests of `husk-network` and of plugged NICs in `husk-vmm` |
/// | `shim-pod-1.7` | `shim-launcher`, on containerd 2.1; `shim-killed` |
/// | `registry` | `apply`, which pulls from a registry |
/// | `apply-ends`, `apply-user` | `apply`; tests of the stores and units in `husk` |
/// | `truncated-images-full` | `truncated-image`, with Debian 13's image |
/// | `machine-2cpu-512Mi` | `machine-1cpu-128Mi`, `machine-4cpu-5Gi`; unit tests of CPUID in `husk-vmm` |
/// | `debian-13-bls` | unit tests of the boot loader entries in `husk-image`; `demo` boots Debian by its `grub.cfg` |
/// | `debian-13-generic` | `demo`, with the cloud kernel |
/// | `kernel-upgrade` | `demo` (grub.cfg), `stop`, `reboot`; unit tests of MBR disks in `husk-image` |
/// | `shim-ctr-1.7`, `shim-ctr-2.1` | `shim-launcher`, on containerd 2.1 |
/// | `shim-refused` | unit tests of the pod's specification in `husk-containerd-shim` |
/// | `shim-pod-2.1` | `shim-launcher` |
/// | `shim-pod-20` | `shim-launcher`, one pod at a time |
/// | `shim-cycles` | `shim-killed`, which kills each process once in a chosen state |
/// | `shim-debian` | `shim-launcher`, with the small guest; `demo` boots the same image |
/// | `shim-systemd` | `shim-launcher`, without systemd; tests of `husk-cgroup` |
/// | `shim-nfs` | tests of images that root may not open in `husk-volumes` |
/// | `scsi-debian` | `scsi`, with the small guest; `demo` boots Debian from virtio-blk |
/// | `net-bridge` | `net-masquerade`; tests of `husk-network` in namespaces |
/// | `net-debian` | `net-masquerade`, with the small guest; `demo` has Debian's network |
/// | `net-wire-vhost`, `net-wire-vmm` | `net-masquerade`; tests of `husk-virtio-net` with a tap |
/// | `lun` | tests of the passthrough in `husk-virtio-scsi` and `husk-scsi-helper` |
/// | `qcow2-shared`, `qcow2-fio` | `power-cut`, `fio-verify`; property tests of qcow2 in `husk-disk` |
/// | `io-error-policies` | `io-error-stop`, with the default policy |
/// | `hotplug-unheard` | `hotplug`; tests of removals without a driver in `husk-virtio-scsi` |
/// | `hotplug-many` | `hotplug`, one disk at a time |
/// | `console-stalled-client` | `console`; tests of stalled sessions in `husk-monitor` |
/// | `stop-6.1` | `stop`, with kernel 6.12 |
/// | `vsock-1GiB` | `vsock`, with 32 MiB and fewer connections |
/// | `snapshot-clones` | `snapshot`, without load; property tests of the devices' states |
/// | `snapshot-live` | `snapshot`, of a guest that does little; tests of `husk-monitor` |
/// | `snapshot-once` | `snapshot`; tests of `husk-monitor` with a VMM of its own |
/// | `snapshot-states` | `snapshot`; property tests of the devices' states |
/// | `snapshot-network` | `snapshot`, without a network; property tests of `husk-virtio-net` |
/// | `snapshot-replug` | `snapshot`; tests of `husk-monitor` with a VMM of its own, and of NICs in `husk-vmm` |
pub const FULL: &[Case] = &[
    flushed::CASE,
    io_error::REPORT,
    lun::RESERVED,
    sync::CASE,
    balloon::CASE,
    vhost_vsock::CASE,
    stop::GRACE,
    watchdog::CASE,
    downward_metrics::CASE,
    network::standalone::CASE,
    network::link_local::CASE,
    network::hotplug::CASE,
    shim::pod::ON_1_7,
    full_disk::EMPTY_DISK,
    registry::CASE,
    apply::ENDS,
    apply_user::CASE,
    bad_boot::TRUNCATED_OTHERS,
    machine::MEDIUM,
    debian::BLS,
    debian::GENERIC,
    upgrade::CASE,
    shim::ctr::ON_1_7,
    shim::ctr::ON_2_1,
    shim::refused::CASE,
    shim::pod::ON_2_1,
    shim::pod::TWENTY,
    shim::killed::FEW,
    shim::debian::CASE,
    shim::nfs::CASE,
    scsi::ON_DEBIAN,
    network::bridge::CASE,
    network::debian::CASE,
    network::wire::KERNEL,
    network::wire::PROCESS,
    lun::PASSED_ON,
    qcow2::SHARED,
    qcow2::VERIFY,
    io_error::POLICIES,
    hotplug::UNHEARD,
    hotplug::MANY,
    console::STALLED_CLIENT,
    stop::BUTTON_ON_6_1,
    vsock::LARGE,
    shim::systemd::CASE,
    snapshot::ONCE,
    snapshot::CLONES,
    snapshot::LIVE,
    snapshot::STATES,
    snapshot::NETWORK,
    snapshot::REPLUG,
];

/// Cases that take from minutes to hours each, run by `cargo xtask soak`.
pub const LONG: &[Case] = &[
    soak::RAW,
    soak::BLOCK,
    soak::QCOW2,
    thousand::CASE,
    network::soak::KERNEL,
    network::soak::PROCESS,
    shim::killed::HUNDRED,
    power_cut_stores::CASE,
    snapshot::rounds::ON_5_10,
    snapshot::rounds::ON_6_1,
    snapshot::rounds::ON_6_12,
    snapshot::rounds::ON_TESTING,
    snapshot::KILLS,
];

/// Cases with programs that are built from Go modules.
pub const UPSTREAM: &[Case] = &[
    shim::ctr::ON_NEWEST,
    shim::pod::ON_NEWEST,
    shim::launcher::ON_NEWEST,
    shim::kubelet::CASE,
    shim::agent::CASE,
];

/// Cases under KubeVirt's control plane, in the cluster of `cargo xtask cluster`. They run on this machine.
pub const KUBEVIRT: &[Case] = &[
    kubevirt::life::CASE,
    kubevirt::hotplug::CASE,
    kubevirt::network::CASE,
    kubevirt::sets::CASE,
    kubevirt::end::CASE,
    kubevirt::examples::CASE,
    kubevirt::guest_agent::CASE,
    kubevirt::snapshot::CASE,
    kubevirt::vsock::CASE,
    kubevirt::access::CASE,
    kubevirt::debian::CASE,
    kubevirt::kills::CASE,
    kubevirt::node::CASE,
];

/// Cases with files of KubeVirt, whose folder `HUSK_EXAMPLES` names.
pub const EXAMPLES: &[Case] = &[apply_examples::CASE];

/// Phases between which `cargo xtask reboot` boots the machine again.
pub const HOST: &[Case] = &[
    host_boot::SETUP,
    host_boot::REBOOTED,
    host_boot::CHANGES,
    host_boot::POWER_CUT,
    host_boot::REMOVAL,
];
