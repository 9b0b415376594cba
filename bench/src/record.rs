//! Measurements and their file.

use super::host;
use super::stats::{Summary, summary};
use super::svg::{self, Better, Panel};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Instant;
use xtask::checkout;

/// One measured value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// The benchmark: `boot`, `disk`, …
    pub bench: String,
    /// The case: `husk`, `qemu-q35`, …
    pub case: String,
    /// The metric: `to_userspace_ms`, …
    pub metric: String,
    /// The unit: `s`, `ms`, `KiB`, `count`, `1/s`, `MiB/s`, `Mbit/s`, `us`, `ratio`.
    pub unit: String,
    /// The value.
    pub value: f64,
    /// The round, from 1; it may have several values of one metric.
    pub run: u32,
}

/// The values of a case in a round, from metric, unit and value of each.
pub fn measurements<M: Into<String>>(
    bench: &str,
    case: &str,
    run: u32,
    values: impl IntoIterator<Item = (M, &'static str, f64)>,
) -> impl Iterator<Item = Measurement> {
    values.into_iter().map(move |(metric, unit, value)| Measurement {
        bench: bench.to_owned(),
        case: case.to_owned(),
        metric: metric.into(),
        unit: unit.to_owned(),
        value,
        run,
    })
}

/// All values of a benchmark.
#[derive(Debug, Default)]
pub struct Record {
    /// Every value.
    pub measurements: Vec<Measurement>,
    /// Environment of the measurement.
    pub env: BTreeMap<String, Value>,
}

impl Record {
    /// The values of a metric, by round.
    pub fn values(&self, case: &str, metric: &str) -> Vec<f64> {
        self.of(case, metric).map(|m| m.value).collect()
    }

    fn of(&self, case: &str, metric: &str) -> impl Iterator<Item = &Measurement> {
        let all = self.measurements.iter();
        all.filter(move |m| m.case == case && m.metric == metric)
    }

    /// Summary of these values; nothing if there are none.
    pub fn summary(&self, case: &str, metric: &str) -> Option<Summary> {
        summary(&self.values(case, metric))
    }

    /// Their median.
    pub fn median(&self, case: &str, metric: &str) -> Option<f64> {
        Some(self.summary(case, metric)?.median)
    }

    /// Ratio of the median of `case` to that of `other`, in each round that has both.
    pub fn ratios(&self, case: &str, other: &str, metric: &str) -> Vec<f64> {
        let rounds: BTreeSet<u32> = self.of(case, metric).map(|m| m.run).collect();
        let median = |case: &str, round: u32| {
            let values = self.of(case, metric).filter(|m| m.run == round);
            Some(summary(&values.map(|m| m.value).collect::<Vec<_>>())?.median)
        };
        let ratio = |round: u32| Some(median(case, round)? / median(other, round)?);
        rounds.into_iter().filter_map(ratio).collect()
    }

    /// True if `case` has values.
    pub fn has(&self, case: &str) -> bool {
        self.measurements.iter().any(|m| m.case == case)
    }

    /// Summaries of a metric with their cases, without the cases that lack it: the bars of a panel.
    pub fn bars<S: AsRef<str>>(&self, cases: &[S], metric: &str) -> Vec<(String, Summary)> {
        let cases = cases.iter().map(S::as_ref);
        let bar = |case: &str| Some((case.to_owned(), self.summary(case, metric)?));
        cases.filter_map(bar).collect()
    }

    /// Does `work`, which adds values; notes where, for how long and under which load, and whether it was completed.
    pub fn measure(&mut self, place: &str, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let began = Instant::now();
        self.note("where", place);
        self.note("load_before", host::load());
        let measured = work(self);
        self.note("load_after", host::load());
        self.note("took_s", began.elapsed().as_secs());
        self.note("complete", measured.is_ok());
        measured
    }

    /// Sets a value of the environment.
    pub fn note(&mut self, name: &str, value: impl Into<Value>) {
        self.env.insert(name.to_owned(), value.into());
    }

    /// Environment of the measurement, as text.
    pub fn setting(&self, name: &str) -> String {
        match self.env.get(name) {
            Some(Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
            None => "?".to_owned(),
        }
    }

    /// Description of the machine, as text.
    pub fn machine(&self) -> String {
        let of = |name| self.setting(name);
        let machine = format!(
            "{}, {} × {}, load {} to {}",
            of("where"),
            of("host_cpus"),
            of("host_cpu"),
            of("load_before"),
            of("load_after"),
        );
        match self.env.contains_key("qemu") {
            true => format!("{machine}; {}", of("qemu")),
            false => machine,
        }
    }

    /// Description of the guest, as text.
    pub fn guest(&self) -> String {
        let of = |name| self.setting(name);
        format!("{}, {} vCPU, {} MiB", of("guest"), of("vcpus"), of("memory_mib"))
    }

    /// Writes the values and a plot of them to `target/bench/NAME.json` and `.svg`, and prints the paths.
    pub fn publish(&self, name: &str, heading: &str, better: Better, panels: &[Panel]) -> Result<()> {
        let plot = file(name, "svg")?;
        std::fs::write(&plot, svg::draw(heading, better, panels)?).context("cannot write the plot")?;
        println!("\n{}\n{}", self.write(name)?.display(), plot.display());
        Ok(())
    }

    /// Writes `target/bench/NAME.json` and prints its path.
    fn write(&self, name: &str) -> Result<PathBuf> {
        let bench = self.measurements.first().map_or(name, |first| &first.bench);
        let mut list = vec![json!({ "bench": bench, "env": self.env })];
        for measurement in &self.measurements {
            list.push(serde_json::to_value(measurement)?);
        }
        // One line per value: people also read these files.
        let lines: Vec<String> = list.iter().map(Value::to_string).collect();
        let text = format!("[\n{}\n]\n", lines.join(",\n"));
        let path = file(name, "json")?;
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }

    /// A record of a test, from case, metric and value. Another value of a case and metric is one of the next round.
    #[cfg(test)]
    pub fn example<'a>(values: impl IntoIterator<Item = (&'a str, &'a str, f64)>) -> Self {
        let mut record = Self::default();
        for (case, metric, value) in values {
            let round = record.values(case, metric).len() as u32 + 1;
            let values = measurements("any", case, round, [(metric, "any", value)]);
            record.measurements.extend(values);
        }
        record
    }
}

/// Name of a benchmark's record: BENCH, then each of `words` that applies. So a part, or a run with other options, does
/// not replace a measurement.
pub fn name(bench: &str, words: &[(&str, bool)]) -> String {
    let applied = words.iter().filter(|(_, applies)| *applies);
    applied.fold(bench.to_owned(), |name, (word, _)| format!("{name}-{word}"))
}

/// Path of `target/bench/NAME.EXTENSION`.
fn file(name: &str, extension: &str) -> Result<PathBuf> {
    let folder = checkout::folder(checkout::target().join("bench"))?;
    Ok(folder.join(format!("{name}.{extension}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_records_name_tells_of_its_options() {
        let of = |elf, icount, quick| name("boot", &[("elf", elf), ("icount", icount), ("quick", quick)]);
        assert_eq!(of(false, false, false), "boot");
        assert_eq!(of(true, true, false), "boot-elf-icount");
        assert_eq!(of(true, false, true), "boot-elf-quick");
    }
}
