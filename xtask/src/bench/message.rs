//! What the part that runs where KVM is tells the part that does not: one JSON value a line.

use super::record::Measurement;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// One thing told.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message<T> {
    /// What is being done.
    News(String),
    /// A run that failed and is done again.
    Failed(String),
    /// A value.
    Measured(Measurement),
    /// What all values depend on.
    Env(BTreeMap<String, Value>),
    /// What only one benchmark tells.
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

/// Tells what only this benchmark tells.
pub fn more<T: Serialize>(thing: T) {
    tell(&Message::More(thing));
}
