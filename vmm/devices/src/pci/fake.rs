//! Vectors and functions that record their calls, for tests.

use std::io;
use std::sync::{Arc, Mutex, OnceLock};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::config::{BarKind, ConfigSpace, Identity};
use super::device::{Bar, PciDevice};
use crate::msi::{MsiAllocator, MsiMessage, MsiVector};

/// A message no interrupt controller takes.
pub const UNROUTABLE: u64 = 0xbad0_0000;

/// The record of one vector.
pub struct VectorLog {
    pub trigger: EventFd,
    pub routes: Mutex<Vec<Option<MsiMessage>>>,
}

impl VectorLog {
    /// Interrupts since the last call.
    pub fn fired(&self) -> u64 {
        self.trigger.read().unwrap_or(0)
    }

    pub fn routed(&self) -> Option<MsiMessage> {
        self.routes.lock().unwrap().last().copied().flatten()
    }
}

/// Allocates such vectors, as many as asked for.
#[derive(Default)]
pub struct FakeMsi(pub Mutex<Vec<Arc<VectorLog>>>);

impl FakeMsi {
    pub fn line(&self, vector: usize) -> Arc<VectorLog> {
        self.0.lock().unwrap()[vector].clone()
    }
}

impl MsiAllocator for FakeMsi {
    fn allocate(&self) -> io::Result<Box<dyn MsiVector>> {
        let trigger = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let line = Arc::new(VectorLog {
            trigger,
            routes: Mutex::default(),
        });
        self.0.lock().unwrap().push(line.clone());
        Ok(Box::new(FakeVector(line)))
    }
}

struct FakeVector(Arc<VectorLog>);

impl MsiVector for FakeVector {
    fn trigger(&self) -> &EventFd {
        &self.0.trigger
    }

    fn route(&self, message: Option<MsiMessage>) -> io::Result<()> {
        if message.is_some_and(|m| m.address == UNROUTABLE) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        self.0.routes.lock().unwrap().push(message);
        Ok(())
    }
}

/// A function with one BAR of a page, which reads as the function's tag.
pub struct FakeFunction {
    space: Mutex<ConfigSpace>,
    tag: u8,
    pub log: Mutex<Vec<Event>>,
    /// Called when the BAR is unmapped.
    pub on_unmap: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// A call that a function recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Placed(Option<u64>),
    Written(u64),
    Reset,
}

pub const FAKE_BAR: u64 = 0x1000;

impl FakeFunction {
    pub fn new(tag: u8, address: u64) -> Arc<Self> {
        let mut space = ConfigSpace::new(Identity {
            vendor: 0x1af4,
            device: u16::from(tag),
            revision: 0,
            class: [0xff, 0, 0],
            subsystem_vendor: 0,
            subsystem: 0,
        });
        space.add_bar(0, FAKE_BAR, BarKind::Registers, address).unwrap();
        Arc::new(Self {
            space: Mutex::new(space),
            tag,
            log: Mutex::default(),
            on_unmap: OnceLock::new(),
        })
    }

    pub fn log(&self) -> Vec<Event> {
        std::mem::take(&mut *self.log.lock().unwrap())
    }
}

impl PciDevice for FakeFunction {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        self.space.lock().unwrap().read(offset, data);
    }
    fn config_write(&self, offset: u16, data: &[u8]) {
        self.space.lock().unwrap().write(offset, data);
    }
    fn bars(&self) -> Vec<Bar> {
        self.space.lock().unwrap().decoded()
    }
    fn bar_read(&self, _: u8, _: u64, data: &mut [u8]) {
        data.fill(self.tag);
    }
    fn bar_write(&self, _: u8, offset: u64, _: &[u8]) {
        self.log.lock().unwrap().push(Event::Written(offset));
    }
    fn bar_mapped(&self, _: u8, address: Option<u64>) {
        self.log.lock().unwrap().push(Event::Placed(address));
        if let (None, Some(on_unmap)) = (address, self.on_unmap.get()) {
            on_unmap();
        }
    }
    fn reset(&self) {
        self.space.lock().unwrap().reset();
        self.log.lock().unwrap().push(Event::Reset);
    }
}
