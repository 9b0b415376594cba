//! Report of the measured values.

use super::case::Case;
use super::cell::{CELLS, Cell};
use crate::cases::{BenchCase, measured};
use crate::figures::medians;
use crate::record::Record;
use crate::svg::Panel;
use crate::table::join;
use crate::targets::{Target, check, panels};

/// Minimum ratio to QEMU without vhost, for frames that pass through Husk's VMM.
const WITHOUT_VHOST: [(&str, f64); 3] = [("tcp_out", 1.3), ("tcp_in", 2.6), ("tcp_rr", 2.8)];

/// Minimum ratio to the floor, which is enough where QEMU's is missed: 1 ÷ 1.1.
const OF_FLOOR: f64 = 0.91;

/// All targets.
fn targets() -> Vec<Target> {
    let target = |case: Case, cell: &Cell, least, of: Case, bound| Target {
        case: case.name(),
        metric: cell.metric.to_owned(),
        title: cell.title,
        least,
        of: of.name(),
        bound,
    };
    let with = CELLS
        .iter()
        .map(|cell| target(Case::HuskVhost, cell, 0.97, Case::Q35Vhost, Some(0.93)));
    let without = CELLS.iter().flat_map(|cell| {
        let least = WITHOUT_VHOST.iter().filter(|(name, _)| *name == cell.name);
        least.flat_map(|(_, least)| {
            [
                target(Case::Husk, cell, *least, Case::Q35, None),
                target(Case::Husk, cell, OF_FLOOR, Case::Floor, None),
            ]
        })
    });
    without.chain(with).collect()
}

/// Baseline of a case's ratio.
fn base(case: &str) -> Option<&'static str> {
    if case == Case::HuskVhost.name() {
        Some(Case::Q35Vhost.name())
    } else {
        (case != Case::Q35.name()).then_some(Case::Q35.name())
    }
}

/// The tables, and the results of the targets.
pub fn text(record: &Record) -> String {
    let named = |metric: &str| -> Vec<(String, String)> {
        let row = |cell: &Cell| {
            let title = format!("{}, {}", cell.title, cell.piece());
            (format!("{metric}_{}", cell.name), title)
        };
        CELLS.iter().map(row).collect()
    };
    let cases = measured::<Case>(record);
    let head = format!(
        "median (÷ {}; {} ÷ {})",
        Case::Q35.name(),
        Case::HuskVhost.name(),
        Case::Q35Vhost.name()
    );
    let table = |what: &str, rows: Vec<(String, String)>| {
        medians(record, &format!("{what}: {head}"), &cases, base, rows)
    };
    join([
        setting(record),
        table("how much", CELLS.iter().map(rate).collect()),
        table("processor time, guest included, µs", named("cpu_us")),
        table("of it the guest's own, µs", named("cpu_guest_us")),
        table("KVM exits", named("kvm_exits")),
        check(record, &targets()),
    ])
}

/// Metric and title of the rate.
fn rate(cell: &Cell) -> (String, String) {
    (cell.metric.to_owned(), format!("{}, {}", cell.title, cell.unit()))
}

/// Machine and versions of the measurement, in one line.
pub fn setting(record: &Record) -> String {
    let time = record.setting("time_ms");
    format!("{}; {time} ms of each load; {}", record.guest(), record.machine())
}

/// The panels of the plot, one for each rate.
pub fn plot(record: &Record) -> Vec<Panel> {
    panels(
        record,
        &targets(),
        &measured::<Case>(record),
        CELLS.iter().map(rate),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_vhost_one_is_compared_with_the_other() {
        let values = [
            (Case::Husk, 300.0),
            (Case::HuskVhost, 400.0),
            (Case::Q35, 100.0),
            (Case::Q35Vhost, 200.0),
        ];
        let values = values.map(|(case, value)| (case.name(), "round_trips_s", value));
        let record = Record::example(values);
        let text = text(&record);
        let row = text
            .lines()
            .find(|line| line.starts_with("round trips by TCP, 1/s"))
            .expect("a row");
        let words: Vec<&str> = row.split_whitespace().skip(5).collect();
        assert_eq!(
            words,
            ["300", "(3.00)", "400", "(2.00)", "100", "200", "(2.00)"],
            "{text}"
        );
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("ok")).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert_eq!(plot(&record)[0].limit, Some(280.0));
    }

    #[test]
    fn every_load_has_a_bar_with_vhost_and_some_without() {
        assert_eq!(targets().len(), CELLS.len() + 2 * WITHOUT_VHOST.len());
    }
}
