//! virtio-rng: entropy for the guest (virtio 1.2, section 5.4).

use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use super::{ActivateError, Activation, ActiveQueue, VirtioDevice};

/// An entropy device that answers from the host kernel's generator.
#[derive(Debug, Default)]
pub struct Rng {}

impl Rng {
    /// A device with one queue.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

impl VirtioDevice for Rng {
    fn name(&self) -> &str {
        "rng"
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn pci_class(&self) -> [u8; 3] {
        [0x00, 0xff, 0x00]
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &[64]
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn activate(&mut self, _activation: Activation) -> Result<(), ActivateError> {
        Err(std::io::Error::from(std::io::ErrorKind::Unsupported).into())
    }

    fn reset(&mut self) {}

    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>> {
        None
    }
}
