//! Messages from the process that runs where KVM is to the process on this machine: one JSON value per line.

use super::record::{Measurement, measurements};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// One message.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message<T> {
    /// The current step.
    News(String),
    /// A run that failed and is repeated.
    Failed(String),
    /// A value.
    Measured(Measurement),
    /// Environment of all values.
    Env(BTreeMap<String, Value>),
    /// Data of one benchmark only.
    More(T),
}

fn tell<T: Serialize>(message: &Message<T>) {
    // A map with string keys and plain values always serialises.
    if let Ok(line) = serde_json::to_string(message) {
        println!("{line}");
    }
}

/// Reports the current step.
pub fn news(text: String) {
    tell::<()>(&Message::News(text));
}

/// Reports a run that failed and is repeated.
pub fn failed(text: String) {
    tell::<()>(&Message::Failed(text));
}

/// Reports values of a case in a round, from metric, unit and value of each.
pub fn values<M: Into<String>>(
    bench: &str,
    case: &str,
    run: u32,
    values: impl IntoIterator<Item = (M, &'static str, f64)>,
) {
    for measurement in measurements(bench, case, run, values) {
        let value = (measurement.value * 1000.0).round() / 1000.0;
        tell::<()>(&Message::Measured(Measurement { value, ..measurement }));
    }
}

/// Reports the environment of all values.
pub fn env<const N: usize>(mut facts: BTreeMap<String, Value>, more: [(&str, Value); N]) {
    facts.extend(more.map(|(name, value)| (name.to_owned(), value)));
    tell::<()>(&Message::Env(facts));
}

/// Sends data that only this benchmark has.
pub fn more<T: Serialize>(thing: T) {
    tell(&Message::More(thing));
}
