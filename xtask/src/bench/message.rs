//! Messages from the process beside KVM to the process on this machine: one JSON value per line.

use super::record::Measurement;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// One message.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message<T> {
    /// The current step.
    News(String),
    /// A run that failed and is done again.
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

/// Tells what is being done.
pub fn news(text: String) {
    tell::<()>(&Message::News(text));
}

/// Tells of a run that failed and is done again.
pub fn failed(text: String) {
    tell::<()>(&Message::Failed(text));
}

/// Tells a value.
pub fn measured(mut measurement: Measurement) {
    measurement.value = (measurement.value * 1000.0).round() / 1000.0;
    tell::<()>(&Message::Measured(measurement));
}

/// Tells what all values depend on.
pub fn env<const N: usize>(mut facts: BTreeMap<String, Value>, more: [(&str, Value); N]) {
    facts.extend(more.map(|(name, value)| (name.to_owned(), value)));
    tell::<()>(&Message::Env(facts));
}

/// Sends data of this benchmark only.
pub fn more<T: Serialize>(thing: T) {
    tell(&Message::More(thing));
}
