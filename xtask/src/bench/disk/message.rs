//! What the part that runs where KVM is tells the part that does not: one JSON value a line.

use super::case::Case;
use crate::bench::record::Measurement;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One thing told.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// What is being done.
    News(String),
    /// A run that failed and is done again.
    Failed(String),
    /// A case that cannot be measured here, and why.
    Absent(Case, String),
    /// A value.
    Measured(Measurement),
    /// What all values depend on.
    Env(BTreeMap<String, serde_json::Value>),
}

/// Tells `message`.
pub fn tell(message: &Message) {
    // A map with string keys and plain values always serialises.
    if let Ok(line) = serde_json::to_string(message) {
        println!("{line}");
    }
}
