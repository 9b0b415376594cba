//! Report of the measured values.

use super::audit::AGENT;
use crate::bench::limits::{Limit, held};
use crate::bench::record::Record;
use crate::bench::stats::summary;
use crate::bench::svg::Panel;
use crate::bench::table::{align, number};

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
    at_most(
        "first",
        "rss_kib",
        "agent of the first node, resident, KiB",
        24.0 * 1024.0,
    ),
    at_most(
        "first",
        "idle_cpu_percent",
        "the same, idle, % of a processor",
        1.0,
    ),
    at_most(
        "others",
        "idle_cpu_percent",
        "the other agents, idle, % of a processor",
        1.0,
    ),
    at_most(AGENT, "writes", "an agent's writes in the life of a VMI", 12.0),
];

const fn at_most(case: &'static str, metric: &'static str, what: &'static str, most: f64) -> Limit {
    Limit {
        case,
        metric,
        what,
        most,
        of: None,
    }
}

const CAPTION: &str = "Requests to the API server from the creation of the first VMI to the end of the last one, divided by the number of VMIs.
Writes of an agent are those of a VMI's status and of events; heartbeats of nodes are not among them.";

/// The tables, and the results of the limits.
pub fn text(record: &Record) -> String {
    let parts = [
        setting(record),
        agents(record),
        requests(record),
        CAPTION.to_owned(),
        held(record, LIMITS),
    ];
    parts
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join("\n\n")
}

/// Machine and size of the measurement, in one line.
pub fn setting(record: &Record) -> String {
    format!(
        "{} VMIs, {} nodes; {}",
        record.setting("vmis"),
        record.setting("nodes"),
        record.machine()
    )
}

fn median(record: &Record, case: &str, metric: &str) -> Option<f64> {
    Some(summary(&record.values(case, metric))?.median)
}

/// What an agent costs.
fn agents(record: &Record) -> String {
    let mut rows = vec![
        [
            "agent: median",
            "VMIs",
            "resident, KiB",
            "PSS, KiB",
            "idle, %",
            "CPU until then, ms",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    for (case, label) in [("first", "first node"), ("others", "other nodes")] {
        let metrics = [
            "vmis",
            "rss_kib",
            "pss_kib",
            "idle_cpu_percent",
            "cpu_before_idle_ms",
        ];
        let values = metrics.map(|metric| median(record, case, metric).map(number));
        if values.iter().all(Option::is_some) {
            let values = values.into_iter().flatten();
            rows.push(std::iter::once(label.to_owned()).chain(values).collect());
        }
    }
    if rows.len() == 1 {
        String::new()
    } else {
        align(&rows, 1)
    }
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
        let value =
            |verb| median(record, program, &format!("requests_{verb}")).map_or("–".to_owned(), number);
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
    let panels = [
        ("rss_kib", "agent, resident, KiB"),
        ("idle_cpu_percent", "agent, idle, % of a processor"),
    ];
    let mut drawn: Vec<Panel> = Vec::new();
    for (metric, title) in panels {
        let bars = ["first", "others"]
            .iter()
            .filter_map(|case| Some(((*case).to_owned(), summary(&record.values(case, metric))?)));
        let limit = LIMITS
            .iter()
            .find(|limit| limit.metric == metric)
            .map(|limit| limit.most);
        drawn.push(Panel {
            title: title.to_owned(),
            bars: bars.collect(),
            limit,
        });
    }
    let bars = [("writes", AGENT)]
        .iter()
        .filter_map(|(metric, case)| Some(((*case).to_owned(), summary(&record.values(case, metric))?)));
    drawn.push(Panel {
        title: "an agent's writes in the life of a VMI".to_owned(),
        bars: bars.collect(),
        limit: Some(12.0),
    });
    drawn.retain(|panel| !panel.bars.is_empty());
    drawn
}
