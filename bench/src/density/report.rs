//! Report of the measured values.

use crate::cases::BenchCase;
use crate::figures;
use crate::limits::{Limit, held, panels};
use crate::peers::{CLOUD_HYPERVISOR, FIRECRACKER};
use crate::record::Record;
use crate::svg::Panel;
use crate::table::join;
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

/// Metrics and their titles.
const METRICS: [(&str, &str); 9] = [
    (STARTS, "starts a second, to the kernel's first instruction"),
    (START, "  time per start, ms"),
    (TO_USERSPACE, "starts a second, to user space"),
    (FIT, "idle VMs in a GiB"),
    (USED, "memory of the machine for each, KiB"),
    (GUEST, "  of it the guest's"),
    (BESIDE, "  of it processes, beside the guest"),
    (EXITS, "VM exits a second, of each"),
    (CPU, "processor time a second, of each, ms"),
];

const LIMITS: &[Limit] = &[
    Limit::of_husk(START, "time per start", 1.0 / 1.2).times(FIRECRACKER),
    Limit::of_husk(START, "time per start", 1.0 / 1.2).times(CLOUD_HYPERVISOR),
    Limit::of_husk(BESIDE, "memory beside the guest", 1.0).times(FIRECRACKER),
    Limit::of_husk(BESIDE, "memory beside the guest", 1.0).times(CLOUD_HYPERVISOR),
    Limit::of_husk(EXITS, "VM exits of an idle guest", 1.0).times(FIRECRACKER),
    Limit::of_husk(EXITS, "VM exits of an idle guest", 1.0).times(CLOUD_HYPERVISOR),
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
    let base = |case: &str| (case != "husk").then_some("husk");
    join([
        setting(record),
        figures::medians(record, "median (÷ husk)", &names, base, METRICS),
        held(record, LIMITS),
    ])
}

/// The panels of the plot: smaller values are better in each.
pub fn plot(record: &Record, cases: &[Vmm]) -> Vec<Panel> {
    let names: Vec<_> = cases.iter().map(|case| case.name()).collect();
    let drawn = [START, USED, BESIDE, EXITS, CPU];
    let titles = METRICS.map(|(metric, title)| (metric, title.trim()));
    let titles = titles.into_iter().filter(|(metric, _)| drawn.contains(metric));
    panels(record, LIMITS, &names, titles)
}
