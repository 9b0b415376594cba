//! The host bridge at 00:00.0, which operating systems expect to find. It has only an identity.

use std::sync::{Mutex, MutexGuard};

use super::config::{ConfigSpace, Identity};
use super::device::{Bar, PciDevice};
use crate::component::{Bytes, RestoreError};

/// A host bridge without registers of its own.
#[derive(Debug)]
pub struct HostBridge(Mutex<ConfigSpace>);

impl HostBridge {
    /// The generic PCI Express host bridge of Red Hat's vendor ID, for which no guest has quirks or a driver.
    pub fn new() -> Self {
        Self(Mutex::new(ConfigSpace::new(Identity {
            vendor: 0x1b36,
            device: 0x0008,
            revision: 0,
            class: [0x06, 0x00, 0x00],
            subsystem_vendor: 0x1af4,
            subsystem: 0x1100,
        })))
    }

    /// Configuration space.
    pub fn save(&self) -> Bytes {
        self.space().save()
    }

    /// Restores the result of [`HostBridge::save`].
    ///
    /// # Errors
    /// It is that of another function. Names `field`.
    pub fn restore(&self, saved: &Bytes, field: &'static str) -> Result<(), RestoreError> {
        let mut space = self.space();
        space.check(saved, field)?;
        space.load(saved);
        Ok(())
    }

    fn space(&self) -> MutexGuard<'_, ConfigSpace> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Default for HostBridge {
    fn default() -> Self {
        Self::new()
    }
}

impl PciDevice for HostBridge {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        self.space().read(offset, data);
    }
    fn config_write(&self, offset: u16, data: &[u8]) {
        self.space().write(offset, data);
    }
    fn bars(&self) -> Vec<Bar> {
        Vec::new()
    }
    fn bar_read(&self, _: u8, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }
    fn bar_write(&self, _: u8, _: u64, _: &[u8]) {}
    fn bar_mapped(&self, _: u8, _: Option<u64>) {}
    fn reset(&self) {
        self.space().reset();
    }
}
