//! Report of the measured values.

use crate::figures;
use crate::limits::{Limit, held, panel};
use crate::peers::{CLOUD_HYPERVISOR, FIRECRACKER};
use crate::record::Record;
use crate::svg::Panel;
use crate::vmm::Vmm;

/// Starts in a second, to the kernel's first instruction.
pub const STARTS: &str = "starts_per_s";
/// Milliseconds for each start: the time of all, divided by their number.
pub const START: &str = "start_ms";
/// Starts in a second, to user space.
pub const TO_USERSPACE: &str = "to_userspace_per_s";
/// VM exits of an idle guest in a second.
pub const EXITS: &str = "exits_per_s";
/// Processor time of an idle guest and its VMM.
pub const CPU: &str = "cpu_ms_per_s";
/// Memory of the processes of a VM, without the guest's.
pub const BESIDE: &str = "beside_kib";
/// Resident memory of the guest.
pub const GUEST: &str = "guest_kib";
/// The machine's memory that a VM takes.
pub const USED: &str = "used_kib";
/// VMs in a GiB.
pub const FIT: &str = "vms_per_gib";

/// Metrics, their units and titles.
pub const METRICS: [(&str, &str, &str); 9] = [
    (
        STARTS,
        "1/s",
        "starts a second, to the kernel's first instruction",
    ),
    (START, "ms", "  time per start, ms"),
    (TO_USERSPACE, "1/s", "starts a second, to user space"),
    (FIT, "count", "idle VMs in a GiB"),
    (USED, "KiB", "memory of the machine for each, KiB"),
    (GUEST, "KiB", "  of it the guest's"),
    (BESIDE, "KiB", "  of it processes, beside the guest"),
    (EXITS, "1/s", "VM exits a second, of each"),
    (CPU, "ms", "processor time a second, of each, ms"),
];

/// At most the share `most` of what another VMM takes.
const fn limit(metric: &'static str, what: &'static str, most: f64, of: &'static str) -> Limit {
    Limit {
        case: "husk",
        metric,
        what,
        most,
        of: Some((of, metric)),
    }
}

const LIMITS: &[Limit] = &[
    limit(START, "time per start", 1.0 / 1.2, FIRECRACKER),
    limit(START, "time per start", 1.0 / 1.2, CLOUD_HYPERVISOR),
    limit(BESIDE, "memory beside the guest", 1.0, FIRECRACKER),
    limit(BESIDE, "memory beside the guest", 1.0, CLOUD_HYPERVISOR),
    limit(EXITS, "VM exits of an idle guest", 1.0, FIRECRACKER),
    limit(EXITS, "VM exits of an idle guest", 1.0, CLOUD_HYPERVISOR),
];

/// Number and size of the guests, and the machine.
pub fn setting(record: &Record) -> String {
    let of = |name| record.setting(name);
    format!(
        "{} guests at once, {} MiB each; {}",
        of("vms"),
        of("memory_mib"),
        record.machine()
    )
}

/// The table, and the targets.
pub fn text(record: &Record, cases: &[Vmm]) -> String {
    let names: Vec<_> = cases.iter().map(|case| case.name()).collect();
    let metrics = METRICS.map(|(metric, _, label)| (label.to_owned(), metric.to_owned()));
    let base = |case: &str| (case != "husk").then_some("husk");
    let mut parts = vec![
        setting(record),
        figures::medians(record, "median (÷ husk)", &names, base, metrics),
        held(record, LIMITS),
    ];
    parts.retain(|part| !part.is_empty());
    parts.join("\n\n")
}

/// The panels of the plot: smaller values are better in each.
pub fn plot(record: &Record, cases: &[Vmm]) -> Vec<Panel> {
    let names: Vec<_> = cases.iter().map(|case| case.name()).collect();
    let drawn = [START, USED, BESIDE, EXITS, CPU];
    let titles = METRICS.iter().filter(|(metric, ..)| drawn.contains(metric));
    titles
        .filter_map(|(metric, _, title)| panel(record, LIMITS, &names, metric, title.trim()))
        .collect()
}
