//! Virtio over PCI (virtio 1.2, section 4.1), modern only: no I/O BAR, no INTx, split queues.
//!
//! The driver's registers and the device are behind one lock, taken by vCPU threads and the control
//! thread. It is held while the device stops its workers; [`VirtioInterrupt`], which workers call, never takes it.
//! The device is active while the driver is ready, lets the function be bus master (which clears before it boots a
//! new kernel, as in kexec) and the machine is not paused.

use std::sync::{Arc, Mutex, MutexGuard};

use super::VirtioDevice;
use crate::GuestMem;
use crate::component::{Component, ComponentState, RestoreError, SaveError};
use crate::ioeventfd::IoEventFds;
use crate::msi::MsiAllocator;
use crate::page_log::PageLog;
use crate::pci::config::ConfigError;
use crate::pci::{Bar, Msix, PciDevice};

mod common;
#[cfg(any(test, feature = "testing"))]
#[allow(missing_docs, missing_debug_implementations)]
pub mod fake;
mod function;
mod interrupt;
mod layout;
mod rings;
mod snapshot;
mod state;
#[cfg(test)]
mod tests;

use common::CommonConfig;
use function::VirtioFunction;
use interrupt::TransportInterrupt;
pub use interrupt::{NO_VECTOR, status};
pub use layout::{BAR_SIZE, MAX_QUEUES};
use layout::{Capabilities, Region};
pub use state::{CommonState, QueueRegisters, RingState, TransportState};

/// Errors of making a device a PCI function.
#[derive(Debug, thiserror::Error)]
pub enum VirtioPciError {
    /// The device has too many queues, or a queue size that is not a power of two from 1 to 32768.
    #[error("virtio device has too many queues, or a queue size that is not a power of two")]
    Queues,
    /// The virtio device ID is above 63, or the configuration is longer than 2048 bytes.
    #[error("virtio device ID is above 63, or its configuration is longer than 2048 bytes")]
    Shape,
    /// The PCI configuration space cannot be built.
    #[error("configuration space: {0}")]
    Config(#[from] ConfigError),
    /// Interrupt vectors ran out.
    #[error("interrupt vectors: {0}")]
    Vectors(#[from] std::io::Error),
}

/// A virtio device as a PCI function.
pub struct VirtioPci {
    interrupt: Arc<TransportInterrupt>,
    capabilities: Capabilities,
    config_size: u16,
    function: Mutex<VirtioFunction>,
}

impl std::fmt::Debug for VirtioPci {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VirtioPci")
            .field("interrupt", &self.interrupt)
            .finish_non_exhaustive()
    }
}

impl VirtioPci {
    /// Makes `device` a PCI function whose BAR starts at `bar_address`, a multiple of [`BAR_SIZE`], until the guest
    /// moves it. It allocates one vector per queue and one for configuration changes.
    ///
    /// # Errors
    /// The device cannot be shown over PCI, or vectors run out.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        mem: GuestMem,
        msi: &dyn MsiAllocator,
        ioeventfds: Arc<dyn IoEventFds>,
        bar_address: u64,
    ) -> Result<Arc<Self>, VirtioPciError> {
        let sizes = device.queue_max_sizes();
        let valid = |size: &u16| size.is_power_of_two();
        if sizes.len() > MAX_QUEUES || !sizes.iter().all(valid) {
            return Err(VirtioPciError::Queues);
        }
        let (device_type, config_size) = (device.device_type(), device.config_size());
        let device_type = u16::try_from(device_type)
            .ok()
            .filter(|id| *id < 64)
            .ok_or(VirtioPciError::Shape)?;
        if u64::from(config_size) > layout::DEVICE_MAX {
            return Err(VirtioPciError::Shape);
        }
        let msix = Msix::new(sizes.len() as u16 + 1, msi)?;
        let class = device.pci_class();
        let (space, capabilities) =
            layout::config_space(device_type, class, config_size, sizes.len(), &msix, bar_address)?;
        let common = CommonConfig::new(device.features(), sizes);
        let interrupt = Arc::new(TransportInterrupt::new(device.name(), msix, sizes.len()));
        let function = VirtioFunction::new(
            interrupt.clone(),
            capabilities,
            space,
            common,
            device,
            mem,
            ioeventfds,
        );
        Ok(Arc::new(Self {
            interrupt,
            capabilities,
            config_size,
            function: Mutex::new(function),
        }))
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        self.interrupt.name()
    }

    /// Number of the `len` bytes at `offset` that lie in device configuration. `None` if the first does not.
    fn inside_config(&self, offset: u64, len: usize) -> Option<usize> {
        let rest = u64::from(self.config_size)
            .checked_sub(offset)
            .filter(|rest| *rest != 0)?;
        Some(len.min(usize::try_from(rest).unwrap_or(len)))
    }

    fn function(&self) -> MutexGuard<'_, VirtioFunction> {
        self.function.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Drop for VirtioPci {
    fn drop(&mut self) {
        self.function().reset_device();
    }
}

impl Component for VirtioPci {
    fn reset(&self) {
        PciDevice::reset(self);
    }

    fn pause(&self) {
        self.function().set_paused(true);
    }

    fn resume(&self) {
        self.function().set_paused(false);
    }

    fn log_pages(&self, log: Option<&Arc<PageLog>>) {
        self.function().log_pages(log);
    }

    fn save(&self) -> Result<ComponentState, SaveError> {
        ComponentState::new(&self.function().save()?)
    }

    /// BARs may have moved: [`crate::pci::PciRoot`] is restored after the function.
    fn restore(&self, state: &ComponentState) -> Result<(), RestoreError> {
        self.function().restore(&state.parse()?)
    }
}

impl PciDevice for VirtioPci {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        let access = {
            let function = self.function();
            self.capabilities.access(&function.space, offset, data.len())
        };
        if let Some((target, width)) = access {
            let mut value = [0; 4];
            self.bar_read(layout::BAR, target, &mut value[..width]);
            self.function()
                .space
                .write(self.capabilities.access_data(), &value[..width]);
        }
        self.function().space.read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) {
        let access = {
            let mut function = self.function();
            function.space.write(offset, data);
            let control = self.capabilities.msix_control(&function.space);
            self.interrupt.msix().set_control(control);
            function.reconcile();
            self.capabilities
                .access(&function.space, offset, data.len())
                .map(|(target, width)| {
                    let mut value = [0; 4];
                    function.space.read(self.capabilities.access_data(), &mut value);
                    (target, width, value)
                })
        };
        if let Some((target, width, value)) = access {
            self.bar_write(layout::BAR, target, &value[..width]);
        }
    }

    fn bars(&self) -> Vec<Bar> {
        self.function().space.decoded()
    }

    fn bar_read(&self, _: u8, offset: u64, data: &mut [u8]) {
        let Some((region, offset)) = layout::region(offset) else {
            return data.fill(0xff);
        };
        data.fill(0);
        match region {
            Region::Common => self.function().common.read(offset, data, &self.interrupt),
            Region::Isr if offset == 0 => {
                if let Some(byte) = data.first_mut() {
                    *byte = self.interrupt.take_isr();
                }
            }
            Region::Device => {
                if let Some(data) = self.inside_config(offset, data.len()).map(|len| &mut data[..len]) {
                    self.function().read_config(offset, data);
                }
            }
            Region::Table => self.interrupt.msix().read_table(offset, data),
            Region::Pending => self.interrupt.msix().read_pending(offset, data),
            Region::Isr | Region::Notify => {}
        }
    }

    fn bar_write(&self, _: u8, offset: u64, data: &[u8]) {
        let Some((region, offset)) = layout::region(offset) else {
            return;
        };
        match region {
            Region::Common => self.function().write_common(offset, data),
            Region::Device => {
                if let Some(data) = self.inside_config(offset, data.len()).map(|len| &data[..len]) {
                    self.function().write_config(offset, data);
                }
            }
            Region::Notify => {
                if let (Some(queue), Some(rings)) = (layout::notified_queue(offset), &self.function().rings) {
                    rings.kick(queue);
                }
            }
            Region::Table => self.interrupt.msix().write_table(offset, data),
            Region::Isr | Region::Pending => {}
        }
    }

    fn bar_mapped(&self, _: u8, address: Option<u64>) {
        let mut function = self.function();
        function.mapped = address;
        function.update_ioeventfds();
    }

    fn reset(&self) {
        let mut function = self.function();
        function.reset_device();
        (function.paused, function.restored) = (false, false);
        function.space.reset();
        self.interrupt.msix().reset();
    }
}
