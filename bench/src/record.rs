//! Measurements and their file.

use super::svg::{self, Better, Panel};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use xtask::checkout;

/// One measured value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// The benchmark: `boot`, `disk`, `hotplug`, `net`, `pull`.
    pub bench: String,
    /// The case: `husk`, `qemu-q35`, …
    pub case: String,
    /// The metric: `to_userspace_ms`, …
    pub metric: String,
    /// The unit: `s`, `ms`, `KiB`, `count`, `1/s`, `MiB/s`, `Mbit/s`, `us`.
    pub unit: String,
    /// The value.
    pub value: f64,
    /// The round, from 1; it may have several values of one metric.
    pub run: u32,
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
        let of = self
            .measurements
            .iter()
            .filter(|m| m.case == case && m.metric == metric);
        of.map(|m| m.value).collect()
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
}

/// Path of `target/bench/NAME.EXTENSION`.
fn file(name: &str, extension: &str) -> Result<PathBuf> {
    let folder = checkout::folder(checkout::target().join("bench"))?;
    Ok(folder.join(format!("{name}.{extension}")))
}
