//! A device that records its calls, ioeventfds with checks, and a driver, for the transport's tests.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use virtio_queue::QueueT;
use vm_memory::{GuestAddress, GuestAddressSpace};
use vmm_sys_util::eventfd::EventFd;

use crate::bus::{Bus, BusDevice};
use crate::component::{Component, ComponentState, RestoreError, SaveError};
use crate::ioeventfd::IoEventFds;
use crate::pci::fake::FakeMsi;
use crate::pci::{PciDevice, PciRoot};
use crate::virtio::transport::{TransportState, VirtioPci, status};
use crate::virtio::{ActivateError, Activation, ActiveQueue, VirtioDevice, VirtioInterrupt};
use crate::{GuestMem, GuestMemMmap};

pub const WINDOW: u64 = 0x80_0000_0000;
pub const SLOT: u8 = 3;
pub const SIZES: [u16; 3] = [16, 256, 8];
pub const FEATURES: u64 = 1 << 29 | 1 << 28 | 1 << 5;
pub const VERSION_1: u64 = 1 << 32;
pub const MEMORY: u64 = 0x10_0000;

pub fn memory() -> GuestMem {
    let ranges = [(GuestAddress(0), MEMORY as usize)];
    GuestMem::new(GuestMemMmap::from_ranges(&ranges).unwrap())
}

/// The operation in which the device fails next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fail {
    Activate,
    PanicInActivate,
    PanicInReset,
    PanicInRead,
    LoseQueues,
}

/// The calls that the device recorded.
#[derive(Default)]
pub struct Journal {
    pub queues: Option<Vec<ActiveQueue>>,
    pub features: u64,
    pub activations: u32,
    pub interrupt: Option<Arc<dyn VirtioInterrupt>>,
    pub config: [u8; 8],
    pub fail: Option<Fail>,
    pub violations: Vec<String>,
}

/// A device that serves nothing, with a configuration of eight bytes.
#[derive(Clone)]
pub struct FakeDevice {
    pub journal: Arc<Mutex<Journal>>,
    pub config_size: u16,
    pub device_type: u32,
    pub sizes: Vec<u16>,
}

impl Default for FakeDevice {
    fn default() -> Self {
        Self {
            journal: Arc::default(),
            config_size: 8,
            device_type: 2,
            sizes: SIZES.to_vec(),
        }
    }
}

impl FakeDevice {
    pub fn journal(&self) -> MutexGuard<'_, Journal> {
        self.journal.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn fails(&self, how: Fail) -> bool {
        self.journal().fail == Some(how)
    }
}

impl VirtioDevice for FakeDevice {
    fn name(&self) -> &str {
        "fake"
    }
    fn device_type(&self) -> u32 {
        self.device_type
    }
    fn pci_class(&self) -> [u8; 3] {
        [0x01, 0x80, 0x00]
    }
    fn features(&self) -> u64 {
        FEATURES
    }
    fn queue_max_sizes(&self) -> &[u16] {
        &self.sizes
    }
    fn config_size(&self) -> u16 {
        self.config_size
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        assert!(!self.fails(Fail::PanicInRead), "told to");
        let config = self.journal().config;
        for (at, byte) in (offset as usize..).zip(data) {
            *byte = config[at];
        }
    }
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        for (at, byte) in (offset as usize..).zip(data) {
            self.journal().config[at] = *byte;
        }
    }
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        assert!(!self.fails(Fail::PanicInActivate), "told to");
        let mut journal = self.journal();
        if journal.queues.is_some() {
            journal.violations.push("activated twice".into());
        }
        for active in &activation.queues {
            if !active.queue.is_valid(&*activation.mem.memory()) {
                journal
                    .violations
                    .push(format!("queue {} is not in memory", active.index));
            }
        }
        journal.activations += 1;
        if journal.fail == Some(Fail::Activate) {
            return Err(ActivateError::MissingQueue(1));
        }
        journal.features = activation.features;
        journal.interrupt = Some(activation.interrupt);
        journal.queues = Some(activation.queues);
        Ok(())
    }
    fn reset(&mut self) {
        self.journal().queues = None;
        assert!(!self.fails(Fail::PanicInReset), "told to");
    }
    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>> {
        let mut journal = self.journal();
        let queues = journal.queues.take();
        queues.filter(|_| journal.fail != Some(Fail::LoseQueues))
    }
    fn save(&mut self) -> Result<ComponentState, SaveError> {
        ComponentState::new(&self.journal().config)
    }
    fn restore(&mut self, state: &ComponentState, _: u64) -> Result<(), RestoreError> {
        let config: [u8; 8] = state.parse()?;
        self.journal().config = config;
        Ok(())
    }
}

/// A machine with one such device.
pub fn machine() -> (Machine, FakeDevice) {
    let device = FakeDevice::default();
    (Machine::new(device.clone()), device)
}

/// ioeventfds as the kernel keeps them, with checks of their use.
#[derive(Default)]
pub struct FakeIoEventFds {
    registered: Mutex<BTreeMap<u64, RawFd>>,
    pub violated: AtomicBool,
    pub refuse: AtomicBool,
}

impl FakeIoEventFds {
    pub fn addresses(&self) -> Vec<u64> {
        self.registered.lock().unwrap().keys().copied().collect()
    }

    /// Signals the ioeventfd as the kernel does for a guest's write. False if the write would exit.
    pub fn ring(&self, address: u64) -> bool {
        let registered = self.registered.lock().unwrap();
        let Some(fd) = registered.get(&address) else {
            return false;
        };
        let one = 1_u64;
        // SAFETY: eight readable bytes; the transport keeps the descriptor open while it is registered.
        unsafe { libc::write(*fd, (&raw const one).cast(), 8) == 8 }
    }
}

impl IoEventFds for FakeIoEventFds {
    fn register(&self, address: u64, event: &EventFd) -> io::Result<()> {
        if self.refuse.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if self
            .registered
            .lock()
            .unwrap()
            .insert(address, event.as_raw_fd())
            .is_some()
        {
            self.violated.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
    fn unregister(&self, address: u64, event: &EventFd) -> io::Result<()> {
        if self.registered.lock().unwrap().remove(&address) != Some(event.as_raw_fd()) {
            self.violated.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// A machine with one virtio function, and its driver.
pub struct Machine {
    pub mmio: Arc<Bus>,
    pub root: Arc<PciRoot>,
    pub ecam: Arc<dyn BusDevice>,
    pub msi: FakeMsi,
    pub ioeventfds: Arc<FakeIoEventFds>,
    pub mem: GuestMem,
    pub pci: Arc<VirtioPci>,
    pub bar: u64,
}

impl Machine {
    pub fn new(device: impl VirtioDevice + 'static) -> Self {
        Self::with_memory(device, memory())
    }

    pub fn with_memory(device: impl VirtioDevice + 'static, mem: GuestMem) -> Self {
        let (msi, ioeventfds) = (FakeMsi::default(), Arc::new(FakeIoEventFds::default()));
        let mmio = Arc::new(Bus::new());
        let root = PciRoot::new(
            mmio.clone(),
            std::iter::once(WINDOW..WINDOW + 0x10_0000).collect(),
        );
        let pci = VirtioPci::new(Box::new(device), mem.clone(), &msi, ioeventfds.clone(), WINDOW).unwrap();
        root.add(SLOT, pci.clone()).unwrap();
        Self {
            ecam: root.ecam(),
            mmio,
            root,
            msi,
            ioeventfds,
            mem,
            pci,
            bar: WINDOW,
        }
    }

    /// Pauses the function and saves it.
    pub fn save(&self) -> TransportState {
        self.pci.pause();
        Component::save(&*self.pci).unwrap().parse().unwrap()
    }

    pub fn restore(&self, state: &TransportState) -> Result<(), RestoreError> {
        Component::restore(&*self.pci, &ComponentState::new(state).unwrap())?;
        self.root.refresh();
        Ok(())
    }

    /// Resets the function and its bus.
    pub fn reboot(&self) {
        PciDevice::reset(&*self.pci);
        Component::reset(&*self.root);
    }

    pub fn config<const N: usize>(&self, register: u64) -> [u8; N] {
        let mut data = [0; N];
        self.ecam.read(u64::from(SLOT) << 15 | register, &mut data);
        data
    }

    pub fn set_config(&self, register: u64, data: &[u8]) {
        self.ecam.write(u64::from(SLOT) << 15 | register, data);
    }

    pub fn read<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        assert!(self.mmio.read(self.bar + offset, &mut data), "the BAR answers");
        data
    }

    pub fn write(&self, offset: u64, data: &[u8]) {
        assert!(self.mmio.write(self.bar + offset, data), "the BAR answers");
    }

    pub fn word(&self, offset: u64) -> u16 {
        u16::from_le_bytes(self.read(offset))
    }

    pub fn dword(&self, offset: u64) -> u32 {
        u32::from_le_bytes(self.read(offset))
    }

    pub fn status(&self) -> u8 {
        self.read::<1>(0x14)[0]
    }

    /// Decoding and bus mastering on.
    pub fn enable(&self) {
        self.set_config(4, &[6, 0]);
    }

    /// MSI-X on, vector `n` sends message `n`.
    pub fn enable_vectors(&self) {
        self.set_config(0x42, &[0, 0x80]);
        for vector in 0..=SIZES.len() as u64 {
            self.write(0x2000 + 16 * vector, &0xfee0_0000_u64.to_le_bytes());
            self.write(0x2008 + 16 * vector, &vector.to_le_bytes());
        }
    }

    pub fn accept(&self, features: u64) {
        for (select, dword) in [(0_u32, features as u32), (1, (features >> 32) as u32)] {
            self.write(0x08, &select.to_le_bytes());
            self.write(0x0c, &dword.to_le_bytes());
        }
    }

    /// Up to FEATURES_OK (virtio 1.2, section 3.1.1), which it returns.
    pub fn negotiate(&self, features: u64) -> bool {
        self.write(0x14, &[status::ACKNOWLEDGE]);
        self.write(0x14, &[status::ACKNOWLEDGE | status::DRIVER]);
        self.accept(features);
        self.write(
            0x14,
            &[status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK],
        );
        self.status() & status::FEATURES_OK != 0
    }

    /// Enables queue `index` with its rings at these addresses, signalling vector `index`.
    pub fn queue(&self, index: u16, size: u16, rings: [u64; 3]) {
        self.write(0x16, &index.to_le_bytes());
        self.write(0x18, &size.to_le_bytes());
        self.write(0x1a, &index.to_le_bytes());
        for (offset, ring) in [0x20, 0x28, 0x30].into_iter().zip(rings) {
            self.write(offset, &(ring as u32).to_le_bytes());
            self.write(offset + 4, &((ring >> 32) as u32).to_le_bytes());
        }
        self.write(0x1c, &1_u16.to_le_bytes());
    }

    pub fn ready(&self) {
        let bits = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK;
        self.write(0x14, &[bits]);
    }

    /// The whole start sequence, with queues 0 and 2, and configuration changes on vector 3.
    pub fn start(&self) {
        self.enable();
        self.enable_vectors();
        self.write(0x10, &3_u16.to_le_bytes());
        assert!(self.negotiate(FEATURES | VERSION_1));
        self.queue(0, 16, [0x1000, 0x2000, 0x3000]);
        self.queue(2, 8, [0x4000, 0x5000, 0x6000]);
        self.ready();
    }

    /// Moves the BAR as a guest that does not disable decoding first.
    pub fn move_bar(&mut self, address: u64) {
        self.set_config(0x10, &address.to_le_bytes());
        self.bar = address;
    }
}
