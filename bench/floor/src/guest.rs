//! The guest: memory, boot protocol and exits.

use crate::acpi;
use crate::nic::Nic;
use anyhow::{Context, Result, bail, ensure};
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_pit_config, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use linux_loader::loader::KernelLoader;
use linux_loader::loader::elf::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use std::fs::File;
use std::io::{self, Stdout};
use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, ReadVolatile};
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Addresses of the boot structures of PVH (Xen's docs/misc/pvh.pandoc).
const START_INFO: u64 = 0x6000;
const MODULES: u64 = 0x6100;
const MEMORY_MAP: u64 = 0x6200;
const MEMORY_MAP_ENTRY: u64 = size_of::<hvm_memmap_table_entry>() as u64;
const COMMAND_LINE: u64 = 0x7000;
const COMMAND_LINE_LIMIT: usize = 2048;
/// End of the memory below the ACPI tables.
const LOW_END: u64 = acpi::START;
/// Start of the memory above the hole for video memory and option ROMs.
const HIGH_START: u64 = 0x10_0000;
const PAGE: u64 = 4096;
const MAGIC: u32 = 0x336e_c578;
const RAM: u32 = 1;

const COM1: u16 = 0x3f8;
const COM1_IRQ: u32 = 4;
const KEYBOARD_COMMAND: u16 = 0x64;
const KEYBOARD_RESET: u8 = 0xfe;
const RTC_DATA: u16 = 0x71;

const CPUID_FEATURES: u32 = 1;
const ECX_TSC_DEADLINE: u32 = 1 << 24;
const ECX_HYPERVISOR: u32 = 1 << 31;

/// Address of the three pages that KVM uses itself on an Intel processor without unrestricted guests.
const TSS: usize = 0xfffb_d000;

struct Interrupt(EventFd);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// A VM with one vCPU.
pub struct Guest {
    vcpu: VcpuFd,
    /// When it is closed, KVM no longer delivers the serial port's interrupt.
    vm: Arc<VmFd>,
    memory: GuestMemoryMmap,
    size: u64,
    serial: Serial<Interrupt, NoEvents, Stdout>,
    nic: Option<Nic>,
}

impl Guest {
    /// Creates a VM with `mib` MiB of memory.
    pub fn new(mib: u64) -> Result<Self> {
        let size = mib << 20;
        ensure!(
            size > HIGH_START && mib < 3072,
            "{mib} MiB: not between 2 and 3071"
        );
        let kvm = Kvm::new().context("/dev/kvm")?;
        let vm = kvm.create_vm()?;
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), usize::try_from(size)?)])?;
        let host = memory.get_host_address(GuestAddress(0))?;
        // SAFETY: the advice changes no byte of the mapping, which is `size` bytes long.
        unsafe { libc::madvise(host.cast(), usize::try_from(size)?, libc::MADV_HUGEPAGE) };
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: size,
            userspace_addr: host as u64,
        };
        // SAFETY: the guest accesses the mapping only while the vCPU runs, and it runs only in `run`, whose value owns
        // the mapping. No other slot overlaps it.
        unsafe { vm.set_user_memory_region(region) }?;
        vm.set_tss_address(TSS)?;
        vm.create_irq_chip()?;
        vm.create_pit2(kvm_pit_config::default())?;
        let vcpu = vm.create_vcpu(0)?;
        let mut cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
        for entry in cpuid.as_mut_slice() {
            if entry.function == CPUID_FEATURES {
                entry.ecx |= ECX_TSC_DEADLINE | ECX_HYPERVISOR;
            }
        }
        vcpu.set_cpuid2(&cpuid)?;
        let interrupt = EventFd::new(EFD_NONBLOCK)?;
        vm.register_irqfd(&interrupt, COM1_IRQ)?;
        Ok(Self {
            vcpu,
            vm: Arc::new(vm),
            memory,
            size,
            serial: Serial::new(Interrupt(interrupt), io::stdout()),
            nic: None,
        })
    }

    /// Adds a PCI bus with a NIC for the tap `name`.
    pub fn with_tap(mut self, name: &str) -> Result<Self> {
        self.nic = Some(Nic::new(name, Arc::clone(&self.vm), self.memory.clone())?);
        Ok(self)
    }

    /// Loads a kernel and its initrd, and sets the registers of the entry point.
    pub fn boot(self, kernel: &str, initrd: &str, command_line: &str) -> Result<Self> {
        let mut file = File::open(kernel).with_context(|| kernel.to_owned())?;
        let loaded = Elf::load(&self.memory, None, &mut file, Some(GuestAddress(HIGH_START)))
            .with_context(|| kernel.to_owned())?;
        let PvhBootCapability::PvhEntryPresent(entry) = loaded.pvh_boot_cap else {
            bail!("{kernel}: has no PVH entry");
        };
        let module = self.load_initrd(initrd).with_context(|| initrd.to_owned())?;
        ensure!(
            command_line.len() < COMMAND_LINE_LIMIT,
            "the command line is too long"
        );
        self.memory
            .write_slice(command_line.as_bytes(), GuestAddress(COMMAND_LINE))?;
        let map = [(0, LOW_END), (HIGH_START, self.size)].map(|(start, end)| hvm_memmap_table_entry {
            addr: start,
            size: end - start,
            type_: RAM,
            reserved: 0,
        });
        for (entry, index) in map.into_iter().zip(0..) {
            self.memory
                .write_obj(entry, GuestAddress(MEMORY_MAP + index * MEMORY_MAP_ENTRY))?;
        }
        self.memory.write_obj(module, GuestAddress(MODULES))?;
        self.memory
            .write_slice(&acpi::tables(), GuestAddress(acpi::START))?;
        let info = hvm_start_info {
            magic: MAGIC,
            version: 1,
            nr_modules: 1,
            modlist_paddr: MODULES,
            cmdline_paddr: COMMAND_LINE,
            rsdp_paddr: acpi::START,
            memmap_paddr: MEMORY_MAP,
            memmap_entries: u32::try_from(map.len())?,
            ..Default::default()
        };
        self.memory.write_obj(info, GuestAddress(START_INFO))?;
        self.enter(entry.0)?;
        Ok(self)
    }

    /// Reads the initrd to the end of memory.
    fn load_initrd(&self, path: &str) -> Result<hvm_modlist_entry> {
        let mut file = File::open(path)?;
        let size = file.metadata()?.len();
        let start = self.size.checked_sub(size).context("does not fit")? / PAGE * PAGE;
        let mut slice = self
            .memory
            .get_slice(GuestAddress(start), usize::try_from(size)?)?;
        file.read_exact_volatile(&mut slice)?;
        Ok(hvm_modlist_entry {
            paddr: start,
            size,
            ..Default::default()
        })
    }

    /// 32-bit protected mode without paging, with the start info in EBX.
    fn enter(&self, rip: u64) -> Result<()> {
        let mut sregs = self.vcpu.get_sregs()?;
        let segment = |type_, s, limit| kvm_segment {
            limit,
            type_,
            s,
            present: 1,
            db: s,
            g: s,
            ..Default::default()
        };
        let data = segment(0x3, 1, u32::MAX);
        sregs.cs = segment(0xb, 1, u32::MAX);
        (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
        sregs.tr = segment(0xb, 0, 0x67);
        sregs.cr0 = 1;
        self.vcpu.set_sregs(&sregs)?;
        let mut regs = self.vcpu.get_regs()?;
        (regs.rip, regs.rbx, regs.rflags) = (rip, START_INFO, 2);
        self.vcpu.set_regs(&regs)?;
        Ok(())
    }

    /// Runs the guest until it resets the machine.
    pub fn run(mut self) -> Result<()> {
        loop {
            match self.vcpu.run() {
                Ok(VcpuExit::IoOut(KEYBOARD_COMMAND, [KEYBOARD_RESET])) => break,
                Ok(VcpuExit::IoOut(port, data)) => {
                    if let (Some(register), Some(value)) = (register(port), data.first()) {
                        self.serial
                            .write(register, *value)
                            .map_err(|error| anyhow::anyhow!("ttyS0: {error:?}"))?;
                    } else if let Some(nic) = &mut self.nic {
                        nic.write(port, data)?;
                    }
                }
                Ok(VcpuExit::IoIn(port, data)) => {
                    // An RTC of zeroes has no update in progress, for which Linux would wait.
                    data.fill(if port == RTC_DATA { 0 } else { 0xff });
                    if let (Some(register), Some(value)) = (register(port), data.first_mut()) {
                        *value = self.serial.read(register);
                    } else if let Some(nic) = &self.nic {
                        nic.read(port, data);
                    }
                }
                Ok(VcpuExit::MmioRead(address, data)) => match &self.nic {
                    Some(nic) => nic.read_memory(address, data),
                    None => data.fill(0xff),
                },
                Ok(VcpuExit::MmioWrite(address, data)) => {
                    if let Some(nic) = &mut self.nic {
                        nic.write_memory(address, data);
                    }
                }
                Ok(VcpuExit::Intr) => {}
                Ok(exit) => bail!("the guest ended: {exit:?}"),
                Err(error) if error.errno() == libc::EINTR => {}
                Err(error) => return Err(error).context("KVM_RUN"),
            }
        }
        Ok(())
    }
}

/// The register of COM1 at a port.
fn register(port: u16) -> Option<u8> {
    port.checked_sub(COM1)
        .and_then(|register| u8::try_from(register).ok())
        .filter(|register| *register < 8)
}
