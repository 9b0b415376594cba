//! Register and memory state at the entry point, as the boot protocols require it.

use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress};

use husk_devices::GuestMemMmap;

use crate::kvm::{KvmError, failed};
use crate::layout;

/// Boot protocol and entry point of the boot processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuEntry {
    /// Linux 64-bit boot protocol (Documentation/arch/x86/boot.rst): long mode, zero page in RSI.
    Linux64 {
        /// Address of `startup_64`.
        rip: u64,
    },
    /// PVH (Xen's docs/misc/pvh.pandoc): 32-bit protected mode without paging, start info in EBX.
    Pvh {
        /// Address from the PVH note.
        rip: u64,
    },
}

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
const PTE_PRESENT_WRITE: u64 = 3;
const PDE_LARGE: u64 = 1 << 7;

/// GDT selectors that the 64-bit protocol prescribes: __BOOT_CS and __BOOT_DS. PVH prescribes none.
const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;

fn segment(selector: u16, type_: u8, long: bool) -> kvm_segment {
    let system = selector == TASK;
    kvm_segment {
        base: 0,
        limit: if system { 0x67 } else { 0xffff_ffff },
        selector,
        type_,
        present: 1,
        dpl: 0,
        db: u8::from(!long && !system),
        s: u8::from(!system),
        l: u8::from(long),
        g: u8::from(!system),
        ..Default::default()
    }
}

/// The 8-byte descriptor of a segment (SDM volume 3, section 3.4.5).
fn descriptor(s: &kvm_segment) -> u64 {
    let limit = u64::from(if s.g == 1 { s.limit >> 12 } else { s.limit });
    let access = u64::from(s.type_) | u64::from(s.s) << 4 | u64::from(s.dpl) << 5 | u64::from(s.present) << 7;
    let flags = u64::from(s.l) << 1 | u64::from(s.db) << 2 | u64::from(s.g) << 3;
    (limit & 0xffff)
        | (s.base & 0xff_ffff) << 16
        | access << 40
        | (limit >> 16) << 48
        | flags << 52
        | (s.base >> 24) << 56
}

/// Converts the error of a write to guest memory, which is smaller than [`layout::MIN_MEMORY`] then.
fn memory(error: vm_memory::GuestMemoryError) -> KvmError {
    tracing::error!(%error, "cannot write boot structures");
    KvmError::NoBootMemory
}

impl CpuEntry {
    fn long(self) -> bool {
        matches!(self, Self::Linux64 { .. })
    }

    fn segments(self) -> [kvm_segment; 3] {
        [
            segment(CODE, 0xb, self.long()),
            segment(DATA, 0x3, false),
            segment(TASK, 0xb, false),
        ]
    }

    /// Writes the GDT, an empty IDT and, for long mode, page tables that map the first 4 GiB one to one.
    pub fn prepare_memory(self, mem: &GuestMemMmap) -> Result<(), KvmError> {
        for s in self.segments() {
            mem.write_obj(descriptor(&s), GuestAddress(layout::GDT + u64::from(s.selector)))
                .map_err(memory)?;
        }
        mem.write_obj(0u64, GuestAddress(layout::IDT)).map_err(memory)?;
        if !self.long() {
            return Ok(());
        }
        let (pml4, pdpt, first_pd) = (
            layout::PAGE_TABLES,
            layout::PAGE_TABLES + 0x1000,
            layout::PAGE_TABLES + 0x2000,
        );
        mem.write_obj(pdpt | PTE_PRESENT_WRITE, GuestAddress(pml4))
            .map_err(memory)?;
        for gib in 0..4u64 {
            let pd = first_pd + gib * 0x1000;
            mem.write_obj(pd | PTE_PRESENT_WRITE, GuestAddress(pdpt + gib * 8))
                .map_err(memory)?;
            let entries: Vec<u8> = (0..512u64)
                .flat_map(|i| ((gib << 30 | i << 21) | PTE_PRESENT_WRITE | PDE_LARGE).to_le_bytes())
                .collect();
            mem.write_slice(&entries, GuestAddress(pd)).map_err(memory)?;
        }
        Ok(())
    }

    /// Sets the registers of the boot processor.
    pub fn apply(self, vcpu: &VcpuFd) -> Result<(), KvmError> {
        let mut sregs = vcpu.get_sregs().map_err(failed("special registers"))?;
        let [code, data, task] = self.segments();
        sregs.cs = code;
        (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
        sregs.tr = task;
        (sregs.gdt.base, sregs.gdt.limit) = (layout::GDT, 0x27);
        (sregs.idt.base, sregs.idt.limit) = (layout::IDT, 7);
        sregs.cr0 = CR0_PE | CR0_ET;
        let mut regs = kvm_regs {
            rflags: 2,
            ..Default::default()
        };
        match self {
            Self::Linux64 { rip } => {
                sregs.cr0 |= CR0_PG;
                sregs.cr3 = layout::PAGE_TABLES;
                sregs.cr4 = CR4_PAE;
                sregs.efer = EFER_LME | EFER_LMA;
                (regs.rip, regs.rsi) = (rip, layout::ZERO_PAGE);
            }
            Self::Pvh { rip } => {
                (sregs.cr4, sregs.efer) = (0, 0);
                (regs.rip, regs.rbx) = (rip, layout::PVH_INFO);
            }
        }
        vcpu.set_sregs(&sregs).map_err(failed("set special registers"))?;
        vcpu.set_regs(&regs).map_err(failed("set registers"))
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddressSpace;

    use super::*;
    use crate::layout::Layout;
    use crate::ram::{GuestRam, MemoryBacking};

    #[test]
    fn descriptors_are_flat_with_the_protocols_selectors() {
        let [code, data, _] = CpuEntry::Linux64 { rip: 0 }.segments();
        assert_eq!(descriptor(&code), 0x00af_9b00_0000_ffff);
        assert_eq!(descriptor(&data), 0x00cf_9300_0000_ffff);
        let [code, ..] = CpuEntry::Pvh { rip: 0 }.segments();
        assert_eq!(descriptor(&code), 0x00cf_9b00_0000_ffff);
    }

    #[test]
    fn page_tables_map_four_gibibytes_one_to_one() {
        let ram = GuestRam::new(&Layout::new(32 << 20, 40).unwrap(), MemoryBacking::Anonymous).unwrap();
        let mem = ram.memory().memory();
        CpuEntry::Linux64 { rip: 0 }.prepare_memory(&mem).unwrap();
        let entry = |at: u64| mem.read_obj::<u64>(GuestAddress(at)).unwrap();
        for address in [0u64, 0x1234_5678, 0xfff0_0000] {
            let pdpt = entry(layout::PAGE_TABLES) & !0xfff;
            let pd = entry(pdpt + (address >> 30) * 8) & !0xfff;
            let pde = entry(pd + (address >> 21 & 511) * 8);
            assert_eq!(pde & !0xfff, address & !0x1f_ffff);
            assert_eq!(pde & 0xfff, PTE_PRESENT_WRITE | PDE_LARGE);
        }
    }
}
