//! Report of the measured values.

use super::audit::AGENT;
use super::start::{CASE, PARTS};
use crate::limits::{Limit, held};
use crate::record::Record;
use crate::svg::Panel;
use crate::table::{align, headed, join, number};

const VERBS: [&str; 8] = [
    "get",
    "list",
    "watch",
    "create",
    "update",
    "patch",
    "delete",
    "deletecollection",
];

const LIMITS: &[Limit] = &[
    Limit::at_most(
        CASE,
        "husk_percent",
        "Husk's part of the time from kubectl apply to user space, %",
        10.0,
    ),
    Limit::at_most(
        "first",
        "rss_kib",
        "agent of the first node, resident, KiB",
        24.0 * 1024.0,
    ),
    Limit::at_most(
        "first",
        "idle_cpu_percent",
        "the same, idle, % of a processor",
        1.0,
    ),
    Limit::at_most(
        "others",
        "idle_cpu_percent",
        "the other agents, idle, % of a processor",
        1.0,
    ),
    Limit::at_most(AGENT, "writes", "an agent's writes in the life of a VMI", 12.0),
];

const START: &str =
    "Husk's part: husk-agent, shim and VMM, and the processor time of the shim from its first byte on.";
const CAPTION: &str = "Requests to the API server from the creation of the first VMI to the end of the last one, divided by the number of VMIs.
Writes of an agent are those of a VMI's status and of events; heartbeats of nodes are not among them.";

/// The tables, and the results of the limits.
pub fn text(record: &Record) -> String {
    let (starts, requests) = (starts(record), requests(record));
    let mut parts = vec![setting(record)];
    if !starts.is_empty() {
        parts.extend([starts, START.to_owned()]);
    }
    parts.push(agents(record));
    if !requests.is_empty() {
        parts.extend([requests, CAPTION.to_owned()]);
    }
    parts.push(held(record, LIMITS));
    join(parts)
}

/// Machine and size of the measurement, in one line.
pub fn setting(record: &Record) -> String {
    match record.env.contains_key("vmis") {
        true => format!(
            "{} VMIs, {} nodes; {}",
            record.setting("vmis"),
            record.setting("nodes"),
            record.machine()
        ),
        false => record.machine(),
    }
}

/// Who takes the time of a start.
fn starts(record: &Record) -> String {
    let Some(all) = record.median(CASE, "to_userspace_ms") else {
        return String::new();
    };
    let head = ["kubectl apply → user space: median", "ms", "%"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let lines = PARTS.iter().map(|(metric, label, _)| (*metric, *label));
    let sums = [
        ("to_userspace_ms", "in all"),
        ("shim_cpu_ms", "processor time of the shim"),
        ("husk_ms", "Husk's part"),
    ];
    for (metric, label) in lines.chain(sums) {
        if let Some(value) = record.median(CASE, metric) {
            rows.push(vec![label.to_owned(), number(value), number(100.0 * value / all)]);
        }
    }
    align(&rows, 1)
}

/// What an agent costs.
fn agents(record: &Record) -> String {
    let head = [
        "agent: median",
        "VMIs",
        "resident, KiB",
        "PSS, KiB",
        "idle, %",
        "CPU until then, ms",
    ];
    let metrics = [
        "vmis",
        "rss_kib",
        "pss_kib",
        "idle_cpu_percent",
        "cpu_before_idle_ms",
    ];
    let row = |(case, label): (&str, &str)| {
        let mut row = vec![label.to_owned()];
        for metric in metrics {
            row.push(number(record.median(case, metric)?));
        }
        Some(row)
    };
    let cases = [("first", "first node"), ("others", "other nodes")];
    headed(head.map(str::to_owned).into(), cases.into_iter().filter_map(row))
}

/// Requests per VMI by program and verb.
fn requests(record: &Record) -> String {
    let mut programs: Vec<&str> = Vec::new();
    for measurement in &record.measurements {
        if measurement.metric.starts_with("requests_") && !programs.contains(&measurement.case.as_str()) {
            programs.push(&measurement.case);
        }
    }
    if programs.is_empty() {
        return String::new();
    }
    let head = std::iter::once("requests per VMI").chain(VERBS);
    let mut rows = vec![head.map(str::to_owned).collect::<Vec<_>>()];
    for program in programs {
        let value = |verb| {
            record
                .median(program, &format!("requests_{verb}"))
                .map_or("–".to_owned(), number)
        };
        rows.push(
            std::iter::once(program.to_owned())
                .chain(VERBS.map(value))
                .collect(),
        );
    }
    align(&rows, 1)
}

/// The panels of the plot.
pub fn plot(record: &Record) -> Vec<Panel> {
    let panel = |title: &str, bars: &[(&str, &str, &str)]| {
        let bar = |(label, case, metric): &(&str, &str, &str)| {
            Some(((*label).to_owned(), record.summary(case, metric)?))
        };
        let held = |limit: &&Limit| {
            bars.first()
                .is_some_and(|bar| (bar.1, bar.2) == (limit.case, limit.metric))
        };
        Panel {
            title: title.to_owned(),
            bars: bars.iter().filter_map(bar).collect(),
            limit: LIMITS.iter().find(held).map(|limit| limit.most),
        }
    };
    let parts = PARTS.map(|(metric, label, _)| (label, CASE, metric));
    let nodes = |metric: &'static str| [("first node", "first", metric), ("other nodes", "others", metric)];
    let mut panels = vec![
        panel("kubectl apply → user space, ms", &parts),
        panel("Husk's part of it, %", &[("husk", CASE, "husk_percent")]),
        panel("agent, resident, KiB", &nodes("rss_kib")),
        panel("agent, idle, % of a processor", &nodes("idle_cpu_percent")),
        panel("agent's writes in the life of a VMI", &[(AGENT, AGENT, "writes")]),
    ];
    panels.retain(|panel| !panel.bars.is_empty());
    panels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_limits_are_shown() {
        let parts = PARTS.map(|(metric, ..)| (CASE, metric, 100.0));
        let others = [
            (CASE, "to_userspace_ms", 900.0),
            (CASE, "husk_ms", 99.0),
            (CASE, "husk_percent", 11.0),
            (AGENT, "writes", 7.0),
            ("virt-api", "requests_get", 0.5),
        ];
        let record = Record::example(parts.into_iter().chain(others));
        let text = text(&record);
        assert!(text.contains("in all"), "{text}");
        assert!(text.contains("MISSED  Husk's part"), "{text}");
        assert!(
            text.lines()
                .any(|line| line.starts_with("ok") && line.ends_with("≤ 12")),
            "{text}"
        );
        assert!(
            text.lines()
                .any(|line| line.starts_with("virt-api") && line.contains("0.50")),
            "{text}"
        );
        let panels = plot(&record);
        assert_eq!(panels.len(), 3);
        assert_eq!((panels[0].bars.len(), panels[0].limit), (PARTS.len(), None));
        assert_eq!(panels[1].limit, Some(10.0));
    }
}
