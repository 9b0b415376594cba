//! The parts of a machine that its state relies on.

use std::collections::BTreeMap;
use std::fmt::Debug;

use serde::{Deserialize, Serialize};

use crate::cpuid::Topology;

/// Version of the machine: its address map, ACPI tables, and order of devices. A change of these that a guest sees gets
/// the next number.
pub const MACHINE_VERSION: u32 = 1;

/// Describes a machine. A state is only restored into a machine of the same description.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineDescription {
    /// [`MACHINE_VERSION`].
    pub machine_version: u32,
    /// Width of the guest's physical addresses in bits, on which the address map depends.
    pub physical_address_bits: u8,
    /// Guest memory in bytes.
    pub memory_bytes: u64,
    /// Sockets.
    pub sockets: u32,
    /// Cores in each socket.
    pub cores: u32,
    /// Threads in each core.
    pub threads: u32,
    /// PCI functions by slot.
    pub functions: BTreeMap<u8, String>,
    /// Slots that the ACPI tables describe as hot-pluggable, highest first.
    pub hotplug_slots: Vec<u8>,
    /// Slots of the NICs that the machine started with, if the ACPI tables have them. They do not in a guest that was
    /// saved before husk-vmm put them there, until it boots again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nic_slots: Vec<u8>,
}

/// The saved machine is another than the one that is to continue.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("field {field:?} of the machine is {saved}, but this machine has {own}")]
pub struct MachineMismatch {
    /// Name of the field.
    field: &'static str,
    saved: String,
    own: String,
}

fn same<T: PartialEq + Debug>(field: &'static str, saved: &T, own: &T) -> Result<(), MachineMismatch> {
    if saved == own {
        return Ok(());
    }
    Err(MachineMismatch {
        field,
        saved: format!("{saved:?}"),
        own: format!("{own:?}"),
    })
}

impl MachineDescription {
    /// The CPU topology.
    pub fn topology(&self) -> Topology {
        Topology {
            sockets: self.sockets,
            cores: self.cores,
            threads: self.threads,
        }
    }

    /// Checks what a machine is built from: version, topology and memory.
    ///
    /// # Errors
    /// Names the first field that differs.
    pub fn check_config(&self, topology: Topology, memory_bytes: u64) -> Result<(), MachineMismatch> {
        let Topology {
            sockets,
            cores,
            threads,
        } = topology;
        same("machine_version", &self.machine_version, &MACHINE_VERSION)?;
        same("memory_bytes", &self.memory_bytes, &memory_bytes)?;
        same("sockets", &self.sockets, &sockets)?;
        same("cores", &self.cores, &cores)?;
        same("threads", &self.threads, &threads)
    }

    /// Checks that `own`, the description of a machine that was built, is this one.
    ///
    /// # Errors
    /// Names the first field that differs.
    pub fn check(&self, own: &Self) -> Result<(), MachineMismatch> {
        self.check_config(own.topology(), own.memory_bytes)?;
        let bits = (&self.physical_address_bits, &own.physical_address_bits);
        same("physical_address_bits", bits.0, bits.1)?;
        same("functions", &self.functions, &own.functions)?;
        same("hotplug_slots", &self.hotplug_slots, &own.hotplug_slots)?;
        match self.nic_slots.is_empty() {
            true => Ok(()),
            false => same("nic_slots", &self.nic_slots, &own.nic_slots),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn description() -> MachineDescription {
        MachineDescription {
            machine_version: MACHINE_VERSION,
            physical_address_bits: 40,
            memory_bytes: 64 << 20,
            sockets: 1,
            cores: 2,
            threads: 1,
            functions: BTreeMap::from([(1, "virtio-net-red".to_owned())]),
            hotplug_slots: vec![4, 3],
            nic_slots: vec![1],
        }
    }

    #[test]
    fn the_field_that_differs_is_named() {
        let own = description();
        own.check(&own).unwrap();
        type Change = fn(&mut MachineDescription);
        let changes: [(&str, Change); 9] = [
            ("machine_version", |d| d.machine_version = 2),
            ("physical_address_bits", |d| d.physical_address_bits = 39),
            ("memory_bytes", |d| d.memory_bytes = 1),
            ("sockets", |d| d.sockets = 2),
            ("cores", |d| d.cores = 1),
            ("threads", |d| d.threads = 2),
            ("functions", |d| drop(d.functions.insert(2, "virtio-rng".into()))),
            ("hotplug_slots", |d| d.hotplug_slots.clear()),
            ("nic_slots", |d| d.nic_slots.push(2)),
        ];
        for (field, change) in changes {
            let mut saved = description();
            change(&mut saved);
            assert_eq!(saved.check(&own).unwrap_err().field, field);
        }
        let mut saved = description();
        saved.functions.insert(2, "virtio-rng".into());
        assert_eq!(
            saved.check(&own).unwrap_err().to_string(),
            r#"field "functions" of the machine is {1: "virtio-net-red", 2: "virtio-rng"}, but this machine has {1: "virtio-net-red"}"#
        );
    }

    #[test]
    fn guests_of_a_version_that_did_not_describe_nics_go_on() {
        let own = description();
        let mut saved = description();
        saved.nic_slots.clear();
        saved.check(&own).unwrap();
        let document = serde_json::to_value(&saved).unwrap();
        assert!(document.get("nic_slots").is_none());
        assert_eq!(
            serde_json::from_value::<MachineDescription>(document).unwrap(),
            saved
        );
    }
}
