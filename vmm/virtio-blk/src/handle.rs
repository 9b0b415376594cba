//! Host-side control of a device.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use husk_devices::virtio::VirtioInterrupt;
use husk_disk::{Disk, DiskCounters, Geometry};

/// State shared between the device and its handles.
pub(crate) struct Shared {
    pub name: String,
    pub disk: Disk,
    /// Interrupts of the active driver.
    interrupt: Mutex<Option<Arc<dyn VirtioInterrupt>>>,
}

impl Shared {
    pub fn new(name: String, disk: Disk) -> Arc<Self> {
        let interrupt = Mutex::default();
        Arc::new(Self {
            name,
            disk,
            interrupt,
        })
    }

    pub fn set_interrupt(&self, interrupt: Option<Arc<dyn VirtioInterrupt>>) {
        *self.interrupt.lock().unwrap_or_else(PoisonError::into_inner) = interrupt;
    }

    fn interrupt(&self) -> Option<Arc<dyn VirtioInterrupt>> {
        self.interrupt
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("name", &self.name)
            .field("disk", &self.disk)
            .finish_non_exhaustive()
    }
}

/// Host-side control of a [`Blk`](crate::Blk). Usable from any thread and in any device state.
#[derive(Clone, Debug)]
pub struct BlkHandle(pub(crate) Arc<Shared>);

impl BlkHandle {
    /// The `id` of the device.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.0.name
    }

    /// The current geometry of the disk.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.0.disk.geometry()
    }

    /// Counters of the completed requests.
    #[must_use]
    pub fn counters(&self) -> DiskCounters {
        self.0.disk.counters()
    }

    /// Writes what this process holds of the image to its file, as [`Disk::write_back`] does. Blocks.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn write_back(&self) -> io::Result<()> {
        self.0.disk.write_back()
    }

    /// Reads the current size of the image, notifies the guest (also if it is unchanged) and returns the size in
    /// bytes.
    ///
    /// # Errors
    /// As [`Disk::refresh`]. Nothing changes.
    pub fn resize(&self) -> io::Result<u64> {
        let size = self.0.disk.refresh()?.size;
        if let Some(interrupt) = self.0.interrupt() {
            interrupt.signal_config();
        }
        Ok(size)
    }
}
