//! Report of the measured values.

use super::case::Case;
use crate::cases::BenchCase;
use crate::figures::medians;
use crate::limits::{Limit, held, panels};
use crate::record::Record;
use crate::svg::Panel;
use crate::table::join;

/// A metric, its title in a table, and true if it is drawn.
type Line = (&'static str, &'static str, bool);

const ONE: &[Line] = &[
    ("to_userspace_ms", "start → user space, ms", true),
    (
        "containerd_cpu_ms",
        "  processor time of containerd and ctr until then",
        false,
    ),
    ("to_userspace_without_containerd_ms", "  without it", false),
    ("to_shim_ms", "start → shim's process, ms", false),
    ("to_vmm_ms", "start → VMM's process, ms", false),
    ("cpu_ms", "processor time until user space, ms", true),
    ("cpu_with_containerd_ms", "  with containerd and ctr", false),
    ("pod_rss_kib", "resident beside guest memory, KiB", true),
    ("vmm_rss_kib", "  of it the VMM", false),
    ("shim_rss_kib", "  of it the shim", false),
    ("pod_pss_kib", "the same, shared pages divided, KiB", true),
    (
        "pod_cgroup_kib",
        "cgroup's peak beside guest memory and page cache, KiB",
        true,
    ),
    ("vmm_cgroup_kib", "  of it the VMM's", false),
    ("shim_cgroup_kib", "  of it the shim's", false),
];

const MANY: &[Line] = &[
    (
        "starts_s",
        "starts per second, until the last one's user space",
        false,
    ),
    ("many_cpu_ms", "processor time of each until then, ms", false),
    ("many_cpu_with_containerd_ms", "  with containerd and ctr", false),
    (
        "many_pod_rss_kib",
        "resident beside guest memory, each, KiB",
        true,
    ),
    ("many_pod_pss_kib", "the same, shared pages divided, KiB", true),
    (
        "many_pod_cgroup_kib",
        "cgroup's peak beside guest memory and page cache, each, KiB",
        true,
    ),
    (
        "many_stopped",
        "guests that powered off, with nothing left",
        false,
    ),
];

/// Memory limit of a pod in addition to its guest's memory, KiB.
const POD_KIB: f64 = 16.0 * 1024.0;

const LIMITS: &[Limit] = &[
    Limit {
        of: Some(("husk-run", "to_userspace_ms")),
        ..Limit::of_husk(
            "to_userspace_without_containerd_ms",
            "start → user space, without containerd's processor time",
            1.1,
        )
    },
    Limit::of_husk("pod_rss_kib", "pod beside guest memory, KiB", POD_KIB),
    Limit::of_husk(
        "pod_cgroup_kib",
        "pod's cgroups beside guest memory and page cache, KiB",
        POD_KIB,
    ),
    Limit::of_husk(
        "many_pod_rss_kib",
        "each of many pods beside guest memory, KiB",
        POD_KIB,
    ),
    Limit::of_husk("many_pod_cgroup_kib", "each of many pods' cgroups, KiB", POD_KIB),
];

const CAPTION: &str = "husk: ctr run; husk-run: husk run with the same kernel; qemu-q35: QEMU with the kernel and initrd of the same image.
containerd's own time is the processor time that containerd and ctr took from the start of ctr until the guest's user space: on the
lab's one processor they take it from the pod. What they wait for counts as the pod's.
Cgroups are the VM container's and one that the shim is in from its first byte on, each with its own peak.";

/// The tables, and the results of the limits.
pub fn text(record: &Record) -> String {
    let base = |case: &str| (case != Case::Q35.name()).then_some(Case::Q35.name());
    let table = |head: &str, cases: &[&'static str], lines: &[Line]| {
        let lines = lines.iter().map(|(metric, label, _)| (*metric, *label));
        medians(record, &format!("{head} (÷ qemu-q35)"), cases, base, lines)
    };
    let many = format!("{} at once: median", record.setting("many"));
    join([
        setting(record),
        table("one: median", &Case::ALL.map(Case::name), ONE),
        table(&many, &Case::MANY.map(Case::name), MANY),
        CAPTION.to_owned(),
        held(record, LIMITS),
    ])
}

/// Machine and versions of the measurement, in one line.
pub fn setting(record: &Record) -> String {
    let containerd = record.setting("containerd");
    format!("{}; {containerd}; {}", record.guest(), record.machine())
}

/// The panels of the plot.
pub fn plot(record: &Record) -> Vec<Panel> {
    let cases = Case::ALL.map(Case::name);
    let many = format!("{} at once: ", record.setting("many"));
    let of = |lines: &'static [Line], before: &str| {
        let drawn = lines.iter().filter(|(.., drawn)| *drawn);
        let drawn = drawn.map(|(metric, label, _)| (*metric, format!("{before}{label}")));
        panels(record, LIMITS, &cases, drawn)
    };
    let mut all = of(ONE, "");
    all.extend(of(MANY, &many));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_is_compared_without_containerds_time() {
        let record = Record::example([
            ("husk", "to_userspace_ms", 150.0),
            ("husk", "to_userspace_without_containerd_ms", 109.0),
            ("husk", "pod_rss_kib", 16_385.0),
            ("husk-run", "to_userspace_ms", 100.0),
            ("qemu-q35", "to_userspace_ms", 200.0),
        ]);
        let text = text(&record);
        let verdicts: Vec<&str> = text.lines().rev().take(2).collect();
        assert!(
            verdicts[1].starts_with("ok ") && verdicts[1].contains("1.09"),
            "{text}"
        );
        assert!(verdicts[0].starts_with("MISSED"), "{text}");
        assert!(text.contains("150 (0.75)"), "{text}");
        // Values that only the pod has are not drawn.
        assert_eq!(plot(&record).len(), 1);
    }

    #[test]
    fn every_limit_is_in_a_table() {
        for limit in LIMITS {
            let known = ONE.iter().chain(MANY).any(|(metric, ..)| *metric == limit.metric);
            assert!(known, "{}", limit.metric);
        }
    }
}
