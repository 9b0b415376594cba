//! Detailed profile of a boot.

use super::exits::{Counts, Exits};
use crate::smaps::Resident;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Profile of one boot.
#[derive(Debug, Serialize, Deserialize)]
pub struct Profile {
    /// The case's name.
    pub case: String,
    /// VM exits by hardware exit reason.
    pub reasons: Counts,
    /// VM exits that reach the VMM's process, by KVM exit reason.
    pub to_vmm: Counts,
    /// Accesses to I/O ports.
    pub ports: Counts,
    /// Accesses to memory-mapped registers, by page.
    pub mmio: Counts,
    /// Resident memory without the guest's memory, KiB.
    pub memory: BTreeMap<String, u64>,
    /// Milliseconds from the start until each phase; under trace, so longer than without.
    pub steps: Vec<(String, f64)>,
}

impl Profile {
    /// Creates the profile from the observations of `case`.
    pub fn new(case: &str, exits: Exits, memory: Resident) -> Self {
        let began = exits.execs.first().map_or(0.0, |(_, time)| *time);
        let mut moments: Vec<(String, f64)> = exits
            .execs
            .iter()
            .skip(1)
            .map(|(name, time)| (format!("exec {name}"), *time))
            .collect();
        let marks = [
            ("first exit", exits.first),
            ("first serial byte", exits.first_byte),
            ("user space", exits.marker),
        ];
        moments.extend(
            marks
                .into_iter()
                .filter_map(|(name, time)| Some((name.to_owned(), time?))),
        );
        Self {
            case: case.to_owned(),
            reasons: exits.reasons,
            to_vmm: exits.to_vmm,
            ports: exits.ports,
            mmio: exits.mmio,
            memory: memory.parts,
            steps: moments
                .into_iter()
                .map(|(name, time)| (name, (time - began) * 1e3))
                .collect(),
        }
    }
}
