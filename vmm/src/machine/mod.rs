//! The machine: assembles memory, buses, devices and vCPUs, and runs, pauses and resets all of them together.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use husk_devices::GuestMem;
use husk_devices::bus::Bus;
use husk_devices::component::{ComponentError, ComponentStates, Stage};
use husk_devices::legacy::power::PowerEvent;
use husk_devices::legacy::serial::SerialPort;
use husk_devices::pci::{ConfigPorts, PciRoot};
use husk_devices::virtio::balloon::BalloonHandle;
use husk_virtio_blk::BlkHandle;
use husk_virtio_console::PortSetup;
use husk_virtio_net::NetSetup;
use husk_virtio_scsi::{NewUnit, ScsiHandle};
use husk_virtio_vsock::VsockHandle;
use kvm_ioctls::VmFd;
use tokio::sync::oneshot;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmm_sys_util::eventfd::EventFd;

use crate::acpi::{self, PciSlots};
use crate::boot::{self, BootError, LoadedKernel};
use crate::cpuid::{self, Topology};
use crate::interrupts::{Interrupts, KvmInterrupts};
use crate::kvm::KvmHost;
use crate::layout::{self, Layout};
use crate::ram::{DirtyPages, GuestRam, MemoryBacking, MemoryFile};
use crate::smbios;
use crate::vcpu::entry::CpuEntry;
use crate::vcpu::state::tsc::SavedTsc;
use crate::vcpu::{self, CoalescedWrites, Vcpu, VcpuContext, VcpuSink, signal};
use crate::vm_state::{SavedClock, SavedIrqchips};
use event::{EventFn, halt_on_final_event};
use generation::Generation;
use registry::DeviceRegistry;

mod error;
mod event;
mod generation;
mod legacy;
mod nic;
mod registry;
mod saved;
#[cfg(test)]
pub(crate) mod testing;
mod virtio;

pub use error::MachineError;
pub use event::{Callbacks, VmEvent};
pub use legacy::{LegacyDevices, SerialEvents};
pub use nic::{Nic, NicError};
pub use saved::{MachineDescription, MachineMismatch, SavedMachine};
pub use virtio::{BlkDisk, VsockSetup};

/// Configuration of a machine.
#[derive(Debug)]
pub struct MachineConfig {
    /// CPU topology.
    pub topology: Topology,
    /// Guest memory in bytes.
    pub memory: u64,
    /// Backing of guest memory.
    pub backing: MemoryBacking,
    /// SMBIOS identity.
    pub identity: smbios::SystemIdentity,
    /// NICs, in slot order.
    pub nics: Vec<NetSetup>,
    /// NICs that were plugged into a saved machine, with their slots.
    pub plugged_nics: Vec<(u8, NetSetup)>,
    /// virtio-blk disks, in slot order.
    pub disks: Vec<BlkDisk>,
    /// Disks on the SCSI controller, which every machine has.
    pub scsi: Vec<NewUnit>,
    /// True for a virtio-rng device.
    pub rng: bool,
    /// True for a virtio balloon.
    pub balloon: bool,
    /// Ports of the console device, which a machine without ports does not have.
    pub ports: Vec<PortSetup>,
    /// The vsock device, if there is one.
    pub vsock: Option<VsockSetup>,
    /// True for a watchdog.
    pub watchdog: bool,
    /// Offset of the CMOS clock from UTC in seconds.
    pub rtc_offset: i64,
}

/// The machine. Its own thread owns it.
pub struct Machine {
    vm: Arc<VmFd>,
    ram: GuestRam,
    layout: Layout,
    physical_address_bits: u8,
    topology: Topology,
    identity: smbios::SystemIdentity,
    devices: DeviceRegistry,
    legacy: LegacyDevices,
    scsi: ScsiHandle,
    vsock: Option<VsockHandle>,
    vcpus: Vec<Vcpu>,
    irqchips: SavedIrqchips,
    generation: Generation,
    halted: Arc<AtomicBool>,
    /// The guest's clock and TSCs while the machine is paused.
    stopped_clock: Option<SavedClock>,
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machine")
            .field("layout", &self.layout)
            .field("topology", &self.topology)
            .finish_non_exhaustive()
    }
}

impl Machine {
    /// Builds a machine whose vCPUs do not run yet.
    pub fn new(
        host: &KvmHost,
        config: MachineConfig,
        callbacks: Callbacks,
        serial_events: SerialEvents,
    ) -> Result<Self, MachineError> {
        Self::build(host, config, None, callbacks, serial_events)
    }

    /// Builds a machine, with the CPUs, the address map and the memory of a saved one if it is given.
    fn build(
        host: &KvmHost,
        config: MachineConfig,
        saved: Option<(&SavedMachine, MemoryFile)>,
        callbacks: Callbacks,
        serial_events: SerialEvents,
    ) -> Result<Self, MachineError> {
        let topology = config.topology.check()?;
        let (vcpus, limit) = (topology.vcpus(), host.max_vcpus());
        if vcpus > limit {
            return Err(MachineError::Vcpus(vcpus, limit));
        }
        let mut physical_address_bits = cpuid::physical_address_bits(&host.cpuid);
        if let Some((saved, _)) = &saved {
            let saved = saved.description.physical_address_bits;
            if saved > physical_address_bits {
                return Err(MachineError::AddressBits(saved, physical_address_bits));
            }
            physical_address_bits = saved;
        }
        let layout = Layout::new(config.memory, physical_address_bits)?;
        let (mut ram, saved) = match saved {
            Some((saved, memory)) => (GuestRam::restore(&layout, config.backing, memory)?, Some(saved)),
            None => (GuestRam::new(&layout, config.backing)?, None),
        };
        let vm = host.create_vm()?;
        ram.register(&vm)?;
        let interrupts = Interrupts::new(vm.clone())?;

        let (ports, mmio) = (Arc::new(Bus::new()), Arc::new(Bus::new()));
        let halted = Arc::new(AtomicBool::new(false));
        let event = halt_on_final_event(callbacks.event, halted.clone());
        let root = PciRoot::new(mmio.clone(), vec![layout::PCI_MMIO32, layout.pci_mmio64.clone()]);
        mmio.insert(
            layout::ECAM.start,
            layout::ECAM.end - layout::ECAM.start,
            root.ecam(),
        )?;
        ports.insert(0xcf8, 8, Arc::new(ConfigPorts::new(root.clone())))?;
        let ejected = legacy::EjectedSlots::default();
        let legacy = LegacyDevices::new(
            &ports,
            &interrupts,
            (&root, ejected.clone()),
            serial_events,
            config.rtc_offset,
            event.clone(),
            callbacks.alarm,
        )?;

        let reporting = ram.reports_free_pages();
        let plan = virtio::DevicePlan {
            nics: config.nics,
            disks: config.disks,
            rng: config.rng,
            balloon: config.balloon.then_some(reporting),
            scsi: config.scsi,
            ports: config.ports,
            vsock: config.vsock,
            vcpus,
        };
        let built = virtio::build(plan, &event, callbacks.guest_open, callbacks.vsock_request)?;
        let mut devices = DeviceRegistry::new(
            root.clone(),
            (legacy.hotplug.clone(), ejected),
            ram.memory().clone(),
            KvmInterrupts(interrupts),
            layout.pci_mmio64.start,
        );
        devices.components.insert(Stage::Bus, "pci", root)?;
        legacy.add_to(&mut devices.components)?;
        devices.add_boot_devices(built.devices)?;
        if config.watchdog {
            let timer = callbacks.watchdog;
            devices.add_watchdog(Box::new(move |due| timer(due)))?;
        }
        for (slot, nic) in config.plugged_nics {
            devices.add_plugged_nic(slot, nic)?;
        }

        let vcpus = spawn_vcpus(host, &vm, (topology, saved), |coalesced| VcpuContext {
            ports,
            mmio,
            coalesced: Arc::new(coalesced),
            halted: halted.clone(),
            sink: vcpu_sink(event),
        })?;
        let irqchips = SavedIrqchips::capture(&vm)?;
        Ok(Self {
            vm,
            ram,
            layout,
            physical_address_bits,
            topology,
            identity: config.identity,
            devices,
            legacy,
            scsi: built.scsi,
            vsock: built.vsock,
            vcpus,
            irqchips,
            generation: Generation::new()?,
            halted,
            stopped_clock: None,
        })
    }

    /// Writes the ACPI and SMBIOS tables and the generation ID, and returns a loader of the boot payload for use on
    /// another thread.
    pub fn loader(&self) -> Result<Loader, MachineError> {
        let memory = self.ram.memory().memory();
        let slots = PciSlots {
            hotplug: self.devices.hotplug_slots(),
            nics: self.devices.nic_slots(),
        };
        let tables = acpi::tables(&self.layout, self.topology, slots)?;
        memory.write_slice(&tables, GuestAddress(layout::ACPI.start))?;
        let tables = smbios::tables(&self.identity, self.topology, &self.layout)?;
        memory.write_slice(&tables, GuestAddress(layout::SMBIOS.start))?;
        memory.write_slice(&legacy::RESET_STUB, GuestAddress(layout::RESET_VECTOR))?;
        self.generation.write(&memory)?;
        Ok(Loader {
            memory: self.ram.memory().clone(),
            layout: self.layout.clone(),
        })
    }

    /// Prepares the vCPUs to start at `entry`. The machine must be new or just reset ([`Machine::reset`]).
    pub fn arm(&mut self, entry: CpuEntry) -> Result<(), MachineError> {
        entry.prepare_memory(&self.ram.memory().memory())?;
        for (index, vcpu) in self.vcpus.iter().enumerate() {
            vcpu.reset((index == 0).then_some(entry))?;
        }
        self.halted.store(false, Ordering::Release);
        Ok(())
    }

    /// Runs the vCPUs, from where they were paused or from the entry point.
    pub fn run(&mut self) -> Result<(), MachineError> {
        if let Some(clock) = &self.stopped_clock {
            let since = clock.restore(&self.vm)?;
            vcpu::set_tscs(&self.vcpus, &clock.tscs, since)?;
            self.stopped_clock = None;
        }
        self.devices.components.resume();
        for vcpu in &self.vcpus {
            vcpu.run()?;
        }
        Ok(())
    }

    /// Stops every vCPU, before a pause or a reset. Returns their TSCs.
    ///
    /// # Errors
    /// If one vCPU does not answer in time, the machine runs on, unless the guest has asked for a reset.
    pub fn stop_vcpus(&self) -> Result<Vec<SavedTsc>, MachineError> {
        Ok(vcpu::pause_all(&self.vcpus, vcpu::RESPONSE_TIMEOUT)?)
    }

    /// Stops every vCPU and every device worker. [`Machine::run`] resumes them, with the guest's clock as it was.
    ///
    /// # Errors
    /// If one vCPU does not answer in time, the machine runs on.
    pub fn pause(&mut self) -> Result<(), MachineError> {
        if self.stopped_clock.is_some() {
            return Ok(());
        }
        let tscs = self.stop_vcpus()?;
        let clock = SavedClock::capture(&self.vm, tscs).inspect_err(|_| vcpu::resume_all(&self.vcpus))?;
        self.devices.components.pause();
        self.stopped_clock = Some(clock);
        Ok(())
    }

    /// The state of each device of a paused machine, by its name.
    ///
    /// # Errors
    /// The machine runs, or a device cannot be saved.
    pub fn save_devices(&mut self) -> Result<ComponentStates, ComponentError> {
        self.reap_ejected();
        self.devices.components.save()
    }

    /// Restores the state of each device. The machine has not run yet and has the same devices. They stay paused until
    /// [`Machine::run`].
    ///
    /// # Errors
    /// A device is missing, or a state does not fit. The machine is unusable then.
    pub fn restore_devices(&mut self, states: &ComponentStates) -> Result<(), ComponentError> {
        self.devices.components.restore(states)
    }

    /// Stops the machine and resets devices, interrupt controllers and memory to power-on state. [`Machine::arm`]
    /// resets the vCPUs.
    ///
    /// # Errors
    /// The errors of [`Machine::stop_vcpus`]; memory or an interrupt controller cannot be reset.
    pub fn reset(&mut self) -> Result<(), MachineError> {
        self.stop_vcpus()?;
        self.halted.store(true, Ordering::Release);
        self.stopped_clock = None;
        self.devices.components.reset();
        self.devices.components.log_pages(None);
        self.ram.stop_log(&self.vm);
        self.irqchips.restore(&self.vm)?;
        self.reap_ejected();
        // The next boot writes the tables of this version.
        self.devices.set_nics_described(true);
        // SAFETY: vCPUs and devices were stopped above, and a reset comes before the kernel is loaded.
        unsafe { self.ram.clear() }?;
        Ok(())
    }

    /// Stops the vCPUs for good and resets the devices, which passes all pending writes to the host.
    pub fn stop(&mut self) -> Result<(), MachineError> {
        self.halted.store(true, Ordering::Release);
        let stopped = self.stop_vcpus();
        self.devices.components.reset_stage(Stage::Function);
        stopped.map(|_| ())
    }

    /// Presses the ACPI power button.
    pub fn press_power_button(&self) -> io::Result<()> {
        self.legacy.power.notify(PowerEvent::PowerButton)
    }

    /// Raises the interrupt of ACPI events again if the guest has not read them. Returns false if it has.
    pub fn repeat_power_events(&self) -> io::Result<bool> {
        self.legacy.power.repeat()
    }

    /// Gives the machine a new generation ID and notifies the guest, which then knows that it is a copy of another, or
    /// was set back. A paused guest learns it when it runs. For a restored machine, call it once guest memory, devices
    /// and interrupt controllers are restored: each of these would undo a part of it.
    pub fn new_generation(&self) -> Result<(), MachineError> {
        self.generation
            .renew(&self.ram.memory().memory(), &self.legacy.power)
    }

    /// Delivers the RTC's alarm.
    pub fn rtc_alarm(&self) {
        self.legacy.rtc.alarm();
    }

    /// The watchdog's timer has gone off. True if the watchdog bites.
    pub fn watchdog_alarm(&self) -> bool {
        self.devices.watchdog_alarm()
    }

    /// ttyS0.
    pub fn serial(&self) -> &Arc<SerialPort> {
        &self.legacy.serial
    }

    /// Guest memory in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.ram.bytes()
    }

    /// Number of vCPUs.
    pub fn vcpu_count(&self) -> u32 {
        self.topology.vcpus()
    }

    /// The virtio-blk disk of that id.
    pub fn disk(&self, id: &str) -> Option<&BlkHandle> {
        self.disks().find(|disk| disk.id() == id)
    }

    /// The virtio-blk disks, in slot order.
    pub fn disks(&self) -> impl Iterator<Item = &BlkHandle> {
        self.devices.blk_disks()
    }

    /// The SCSI controller.
    pub fn scsi(&self) -> &ScsiHandle {
        &self.scsi
    }

    /// The vsock device whose connections the VMM carries.
    pub fn vsock(&self) -> Option<&VsockHandle> {
        self.vsock.as_ref()
    }

    /// The NICs.
    pub fn nics(&self) -> impl Iterator<Item = &Nic> {
        self.devices.nics()
    }

    /// True if the guest can eject the NIC.
    pub fn is_ejectable(&self, nic: &Nic) -> bool {
        self.devices.is_ejectable(nic.slot)
    }

    /// Plugs a NIC into this PCI slot, or the lowest free one, and notifies the guest. Returns the slot.
    ///
    /// # Errors
    /// No slot is free; or the slot is occupied, or the guest does not expect a NIC there.
    pub fn add_nic(&mut self, setup: NetSetup, slot: Option<u8>) -> Result<u8, NicError> {
        self.reap_ejected();
        self.devices.add_nic(setup, slot, self.stopped_clock.is_some())
    }

    /// Asks the guest to eject a NIC. The receiver is answered, if ever, when nothing of the NIC is
    /// left.
    pub fn remove_nic(&mut self, id: &str) -> Result<oneshot::Receiver<()>, NicError> {
        self.devices.remove_nic(id)
    }

    /// Sets a NIC's link up or down.
    pub fn set_link(&mut self, id: &str, up: bool) -> Result<(), NicError> {
        self.devices.set_link(id, up)
    }

    /// Drops the devices that the guest has ejected.
    pub fn reap_ejected(&mut self) {
        self.devices.reap_ejected();
    }

    /// Logs the pages of guest memory that are written from now on, until [`Machine::stop_log`] or a reset. A machine that
    /// runs stops for a moment.
    ///
    /// # Errors
    /// KVM refuses, and there is no log; or the machine does not run on.
    pub fn start_log(&mut self) -> Result<(), MachineError> {
        self.while_paused(|machine| {
            let log = machine.ram.start_log(&machine.vm)?;
            machine.devices.components.log_pages(Some(&log));
            Ok(())
        })
    }

    /// Returns the pages that were written since the start of the log, or the last call.
    ///
    /// # Errors
    /// There is no log, or KVM refuses.
    pub fn take_dirty(&self) -> Result<DirtyPages, MachineError> {
        Ok(self.ram.take_dirty(&self.vm)?)
    }

    /// Ends the log. Idempotent.
    ///
    /// # Errors
    /// The machine does not run on.
    pub fn stop_log(&mut self) -> Result<(), MachineError> {
        if !self.ram.is_logged() {
            return Ok(());
        }
        self.while_paused(|machine| {
            machine.devices.components.log_pages(None);
            machine.ram.stop_log(&machine.vm);
            Ok(())
        })
    }

    /// True if the machine is paused.
    pub fn is_paused(&self) -> bool {
        self.stopped_clock.is_some()
    }

    /// Changes the machine while it is paused for that. If it does not run on, it is paused afterwards.
    fn while_paused(
        &mut self,
        change: impl FnOnce(&mut Self) -> Result<(), MachineError>,
    ) -> Result<(), MachineError> {
        let runs = self.stopped_clock.is_none();
        self.pause()?;
        let changed = change(self);
        if runs {
            self.run()?;
        }
        changed
    }

    /// The map of guest memory.
    pub fn memory(&self) -> &GuestMem {
        self.ram.memory()
    }

    /// The balloon, if there is one.
    pub fn balloon(&self) -> Option<&BalloonHandle> {
        self.devices.balloon()
    }
}

impl Drop for Machine {
    /// Drops vCPUs and devices in that order, however the machine ended, so that its disks are closed: an image that
    /// keeps tables in memory writes them back only then.
    fn drop(&mut self) {
        self.vcpus.clear();
        self.devices.clear();
    }
}

/// Loads a boot payload. Created by [`Machine::loader`].
#[derive(Debug)]
pub struct Loader {
    memory: GuestMem,
    layout: Layout,
}

impl Loader {
    /// Loads a kernel into guest memory.
    pub fn load(&self, source: &boot::KernelSource) -> Result<LoadedKernel, BootError> {
        boot::load(source, &self.memory.memory(), &self.layout)
    }
}

fn vcpu_sink(event: EventFn) -> VcpuSink {
    Arc::new(move |index, e| event(VmEvent::Vcpu(index, e)))
}

fn spawn_vcpus(
    host: &KvmHost,
    vm: &VmFd,
    (topology, saved): (Topology, Option<&SavedMachine>),
    context: impl FnOnce(CoalescedWrites) -> VcpuContext,
) -> Result<Vec<Vcpu>, MachineError> {
    signal::install()?;
    let create = |index| {
        let saved = saved.and_then(|saved| {
            let index = index as usize;
            Some((saved.vcpus.get(index)?, saved.clock.tscs.get(index)?))
        });
        vcpu::create(host, vm, topology, index, saved)
    };
    let created = (0..topology.vcpus()).map(create);
    let created = created.collect::<Result<Vec<_>, _>>()?;
    let Some(first) = created.first() else {
        return Ok(vec![]);
    };
    let context = context(CoalescedWrites::new(vm, first)?);
    let spawn = |(index, new)| Vcpu::spawn(index, new, host.msrs.as_slice(), context.clone());
    Ok((0..).zip(created).map(spawn).collect::<Result<_, _>>()?)
}

/// Creates a nonblocking, close-on-exec eventfd.
pub fn eventfd() -> io::Result<EventFd> {
    EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)
}
