//! A machine as it is saved, without its memory.

use husk_devices::component::ComponentStates;
use husk_devices::virtio::transport::TransportState;
use serde::{Deserialize, Serialize};

use super::error::MachineError;
use super::event::Callbacks;
use super::{Machine, MachineConfig, SerialEvents};
use crate::kvm::KvmHost;
use crate::ram::MemoryFile;
use crate::vcpu::SavedVcpu;
use crate::vm_state::{SavedClock, SavedIrqchips};

mod description;

pub use description::{MACHINE_VERSION, MachineDescription, MachineMismatch};

/// The state of a paused machine.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedMachine {
    /// The machine that the rest fits.
    pub description: MachineDescription,
    /// The vCPUs, in the order of their indices.
    pub vcpus: Vec<SavedVcpu>,
    /// TSCs, one for each vCPU, and kvmclock.
    pub clock: SavedClock,
    /// PICs and I/O APIC.
    pub irqchips: SavedIrqchips,
    /// Everything else, by name.
    pub devices: ComponentStates,
}

impl SavedMachine {
    /// The number of queues of a virtio-blk disk; `None` if it has no state that can be read.
    pub fn disk_queues(&self, id: &str) -> Option<u16> {
        let state = self.devices.get(&format!("virtio-blk-{id}"))?;
        let state: TransportState = state.parse().ok()?;
        state.common.queues.len().try_into().ok()
    }

    /// Checks the state against what the machine is to be built from.
    ///
    /// # Errors
    /// Names the field that does not fit.
    pub(super) fn check(&self, config: &MachineConfig) -> Result<(), MachineError> {
        self.description.check_config(config.topology, config.memory)?;
        let (vcpus, tscs) = (self.vcpus.len(), self.clock.tscs.len());
        let expected = config.topology.vcpus() as usize;
        match vcpus == expected && tscs == expected {
            true => Ok(()),
            false => Err(MachineError::SavedVcpus {
                vcpus,
                tscs,
                expected,
            }),
        }
    }
}

/// The error of a state, which names the field of the request that the state came in.
fn of_state(error: MachineError) -> MachineError {
    MachineError::Saved(Box::new(error))
}

impl Machine {
    /// The state of a paused machine, without its memory. The machine does not change.
    ///
    /// # Errors
    /// It runs, or names the part that cannot be saved.
    pub fn save(&mut self) -> Result<SavedMachine, MachineError> {
        let clock = self.stopped_clock.clone().ok_or(MachineError::NotPaused)?;
        let devices = self.save_devices()?;
        let vcpus = self.vcpus.iter().map(|vcpu| vcpu.save().map(|saved| *saved));
        Ok(SavedMachine {
            description: self.description(),
            vcpus: vcpus.collect::<Result<_, _>>()?,
            clock,
            irqchips: SavedIrqchips::capture(&self.vm)?,
            devices,
        })
    }

    /// Builds a machine that was saved, with the memory in `memory`. It is a new generation, and paused:
    /// [`Machine::run`] lets it go on.
    ///
    /// # Errors
    /// As of [`Machine::new`]; names the part of the state that does not fit the machine or this host.
    pub fn restore(
        host: &KvmHost,
        config: MachineConfig,
        (saved, memory): (SavedMachine, MemoryFile),
        callbacks: Callbacks,
        serial_events: SerialEvents,
    ) -> Result<Self, MachineError> {
        saved.check(&config).map_err(of_state)?;
        let from = Some((&saved, memory));
        let mut machine = Self::build(host, config, from, callbacks, serial_events)?;
        machine.load(saved).map_err(of_state)?;
        machine.new_generation()?;
        Ok(machine)
    }

    /// Takes a saved state. The machine is unusable if that fails.
    fn load(&mut self, saved: SavedMachine) -> Result<(), MachineError> {
        let SavedMachine {
            description,
            vcpus,
            clock,
            irqchips,
            devices,
        } = saved;
        description.check(&self.description())?;
        self.devices.set_nics_described(!description.nic_slots.is_empty());
        for (vcpu, saved) in self.vcpus.iter().zip(vcpus) {
            vcpu.restore(Box::new(saved))?;
        }
        irqchips.restore(&self.vm)?;
        self.restore_devices(&devices)?;
        self.stopped_clock = Some(clock);
        Ok(())
    }

    fn description(&self) -> MachineDescription {
        MachineDescription {
            machine_version: MACHINE_VERSION,
            physical_address_bits: self.physical_address_bits,
            memory_bytes: self.ram.bytes(),
            sockets: self.topology.sockets,
            cores: self.topology.cores,
            threads: self.topology.threads,
            functions: self.devices.functions(),
            hotplug_slots: self.devices.hotplug_slots().to_vec(),
            nic_slots: self.devices.nic_slots().to_vec(),
        }
    }
}
