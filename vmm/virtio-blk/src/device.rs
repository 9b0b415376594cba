//! The device model: features, configuration space, and workers that come and go with the driver.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use husk_devices::virtio::{ActivateError, Activation, ActiveQueue, VirtioDevice};
use husk_disk::{Disk, DiskQueue, Geometry};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

use crate::config;

/// Bytes of a serial number (section 5.2.6).
pub(crate) const SERIAL_LEN: usize = 20;

/// A virtio block device.
#[derive(Debug)]
pub struct Blk {
    name: String,
    serial: [u8; SERIAL_LEN],
    geometry: Geometry,
    disk: Vec<Box<dyn DiskQueue>>,
    queue_sizes: Vec<u16>,
    writeback: Arc<AtomicBool>,
}

impl Blk {
    /// A device called `blk-{id}` in logs and thread names, with as many virtqueues as `disk` has queues.
    ///
    /// The guest sees the first 20 bytes of `serial`.
    #[must_use]
    pub fn new(id: &str, mut disk: Disk, serial: &str) -> Self {
        let geometry = disk.geometry();
        let queues = disk.take_queues();
        let len = serial.len().min(SERIAL_LEN);
        let mut padded = [0; SERIAL_LEN];
        padded[..len].copy_from_slice(&serial.as_bytes()[..len]);
        Self {
            name: format!("blk-{id}"),
            serial: padded,
            geometry,
            queue_sizes: vec![crate::QUEUE_SIZE; queues.len()],
            disk: queues,
            writeback: Arc::new(AtomicBool::new(geometry.write_cache)),
        }
    }

    fn queues(&self) -> u16 {
        self.queue_sizes.len() as u16
    }
}

impl VirtioDevice for Blk {
    fn name(&self) -> &str {
        &self.name
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn pci_class(&self) -> [u8; 3] {
        [0x01, 0x00, 0x00]
    }

    fn features(&self) -> u64 {
        config::features(&self.geometry, self.queues())
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let space = config::space(
            &self.geometry,
            self.queues(),
            self.writeback.load(Ordering::Relaxed),
        );
        for (at, byte) in (offset..).zip(data) {
            *byte = usize::try_from(at)
                .ok()
                .and_then(|at| space.get(at))
                .copied()
                .unwrap_or(0);
        }
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if self.geometry.write_cache && offset == config::WRITEBACK_OFFSET && data.len() == 1 {
            self.writeback.store(data[0] & 1 != 0, Ordering::Relaxed);
        }
    }

    fn activate(&mut self, _activation: Activation) -> Result<(), ActivateError> {
        let _ = (&self.disk, &self.serial);
        Err(std::io::Error::from(std::io::ErrorKind::Unsupported).into())
    }

    fn reset(&mut self) {
        self.writeback.store(self.geometry.write_cache, Ordering::Relaxed);
    }

    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>> {
        None
    }
}
