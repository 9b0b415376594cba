//! A virtio-net device with the legacy interface by PCI (virtio 1.2, section 4.1.4.8): its registers are I/O ports, so
//! that no access has to be decoded.
//!
//! The vCPU's own thread sends a frame before the guest runs again. Another thread waits for frames from the tap. No
//! other program takes part, and no other thread has to wake up.

use crate::pci::{self, Bus, VECTORS};
use crate::ring::{Ring, SIZE};
use crate::tap::Tap;
use crate::transfer::{Interrupt, Receiver, Sender};
use anyhow::{Context, Result, ensure};
use kvm_bindings::kvm_msi;
use kvm_ioctls::VmFd;
use std::sync::Arc;
use std::thread;
use virtio_bindings::virtio_config::VIRTIO_F_ANY_LAYOUT;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

/// Registers of the legacy interface, with MSI-X.
const HOST_FEATURES: u16 = 0;
const GUEST_FEATURES: u16 = 4;
const QUEUE_PAGE: u16 = 8;
const QUEUE_SIZE: u16 = 12;
const QUEUE_SELECT: u16 = 14;
const QUEUE_NOTIFY: u16 = 16;
const DEVICE_STATUS: u16 = 18;
const CONFIG_VECTOR: u16 = 20;
const QUEUE_VECTOR: u16 = 22;
const MAC_ADDRESS: u16 = 24;

const DRIVER_OK: u32 = 4;
const RECEIVE: u32 = 0;
const TRANSMIT: u32 = 1;
const MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x03];

const FEATURES: u32 = 1 << VIRTIO_NET_F_CSUM
    | 1 << VIRTIO_NET_F_GUEST_CSUM
    | 1 << VIRTIO_NET_F_MAC
    | 1 << VIRTIO_NET_F_GUEST_TSO4
    | 1 << VIRTIO_NET_F_HOST_TSO4
    | 1 << VIRTIO_NET_F_MRG_RXBUF
    | 1 << VIRTIO_F_ANY_LAYOUT
    | 1 << VIRTIO_RING_F_INDIRECT_DESC
    | 1 << VIRTIO_RING_F_EVENT_IDX;

/// Selected by the driver for each queue.
#[derive(Debug, Default, Clone, Copy)]
struct QueueRegisters {
    page: u32,
    vector: u32,
}

/// The device, with the bus it is on.
pub struct Nic {
    bus: Bus,
    vm: Arc<VmFd>,
    memory: GuestMemoryMmap,
    tap: Arc<Tap>,
    features: u32,
    status: u32,
    selected: u32,
    queues: [QueueRegisters; 2],
    config_vector: u32,
    table: [u32; VECTORS * 4],
    transmit: Option<Sender>,
    /// Wakes the receiving thread when it lacks buffers.
    refilled: EventFd,
}

impl Nic {
    /// The NIC of the tap `name`.
    pub fn new(name: &str, vm: Arc<VmFd>, memory: GuestMemoryMmap) -> Result<Self> {
        Ok(Self {
            bus: Bus::new(),
            vm,
            memory,
            tap: Arc::new(Tap::open(name)?),
            features: 0,
            status: 0,
            selected: 0,
            queues: [QueueRegisters::default(); 2],
            config_vector: 0,
            table: [0; VECTORS * 4],
            transmit: None,
            refilled: EventFd::new(0)?,
        })
    }

    /// Reads an I/O port, if it is one of the bus.
    pub fn read(&self, port: u16, data: &mut [u8]) {
        if pci::PORTS.contains(&port) {
            self.bus.read(port, data);
        } else if let Some(register) = self.register(port) {
            let value = match register {
                HOST_FEATURES => FEATURES,
                GUEST_FEATURES => self.features,
                QUEUE_PAGE => self.queue().map_or(0, |queue| queue.page),
                QUEUE_SIZE => self.queue().map_or(0, |_| SIZE.into()),
                QUEUE_SELECT => self.selected,
                DEVICE_STATUS => self.status,
                CONFIG_VECTOR => self.config_vector,
                QUEUE_VECTOR => self.queue().map_or(0xffff, |queue| queue.vector),
                _ => MAC
                    .get(usize::from(register.wrapping_sub(MAC_ADDRESS)))
                    .map_or(0, |byte| u32::from(*byte)),
            };
            for (place, byte) in data.iter_mut().zip(value.to_le_bytes()) {
                *place = byte;
            }
        }
    }

    /// Writes an I/O port, if it is one of the bus.
    pub fn write(&mut self, port: u16, data: &[u8]) -> Result<()> {
        if pci::PORTS.contains(&port) {
            self.bus.write(port, data);
            return Ok(());
        }
        let Some(register) = self.register(port) else {
            return Ok(());
        };
        let mut value = [0; 4];
        for (place, byte) in value.iter_mut().zip(data) {
            *place = *byte;
        }
        let value = u32::from_le_bytes(value);
        match (register, self.queues.get_mut(self.selected as usize)) {
            (QUEUE_NOTIFY, _) => return self.notified(value),
            (DEVICE_STATUS, _) => {
                let starts = value & !self.status & DRIVER_OK != 0;
                self.status = value;
                if starts {
                    self.start()?;
                }
            }
            (GUEST_FEATURES, _) => self.features = value,
            (QUEUE_SELECT, _) => self.selected = value,
            (CONFIG_VECTOR, _) => self.config_vector = value,
            (QUEUE_PAGE, Some(queue)) => queue.page = value,
            (QUEUE_VECTOR, Some(queue)) => queue.vector = value,
            _ => {}
        }
        Ok(())
    }

    /// Writes memory outside RAM: the MSI-X table.
    pub fn write_memory(&mut self, address: u64, data: &[u8]) {
        let place = address
            .checked_sub(self.bus.table())
            .map(|offset| offset as usize / 4);
        let entry = place.and_then(|place| self.table.get_mut(place));
        if let (Some(entry), Ok(value)) = (entry, data.try_into()) {
            *entry = u32::from_le_bytes(value);
        }
    }

    /// Reads memory outside RAM.
    pub fn read_memory(&self, address: u64, data: &mut [u8]) {
        let place = address
            .checked_sub(self.bus.table())
            .map(|offset| offset as usize / 4);
        match place.and_then(|place| self.table.get(place)) {
            Some(entry) if data.len() == 4 => data.copy_from_slice(&entry.to_le_bytes()),
            _ => data.fill(0),
        }
    }

    fn register(&self, port: u16) -> Option<u16> {
        port.checked_sub(self.bus.registers())
            .filter(|register| *register < pci::REGISTERS)
    }

    fn queue(&self) -> Option<&QueueRegisters> {
        self.queues.get(self.selected as usize)
    }

    fn notified(&mut self, queue: u32) -> Result<()> {
        match (queue, &mut self.transmit) {
            (TRANSMIT, Some(sender)) => sender.send(),
            (RECEIVE, _) => Ok(self.refilled.write(1)?),
            _ => Ok(()),
        }
    }

    /// The driver is ready, and does not change queues and vectors any more.
    fn start(&mut self) -> Result<()> {
        ensure!(
            self.features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0,
            "the driver does not merge buffers"
        );
        let ring = |queue: u32| -> Result<(Ring, Interrupt)> {
            let registers = self.queues[queue as usize];
            let event_idx = self.features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
            let entry = self
                .table
                .chunks_exact(4)
                .nth(registers.vector as usize)
                .filter(|_| self.bus.msix());
            let entry = entry.context("the driver uses no MSI-X")?;
            let interrupt = Interrupt {
                vm: Arc::clone(&self.vm),
                message: kvm_msi {
                    address_lo: entry[0],
                    address_hi: entry[1],
                    data: entry[2],
                    ..Default::default()
                },
            };
            Ok((
                Ring::new(self.memory.clone(), registers.page, event_idx)?,
                interrupt,
            ))
        };
        let (receive, received) = ring(RECEIVE)?;
        let (transmit, sent) = ring(TRANSMIT)?;
        self.transmit = Some(Sender::new(transmit, sent, Arc::clone(&self.tap)));
        let receiver = Receiver {
            ring: receive,
            interrupt: received,
            tap: Arc::clone(&self.tap),
            refilled: self.refilled.try_clone()?,
            memory: self.memory.clone(),
        };
        thread::Builder::new()
            .name("receiver".into())
            .spawn(move || receiver.run())?;
        Ok(())
    }
}
