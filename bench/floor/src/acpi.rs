//! The MADT, by which Linux finds the I/O APIC. Without it, Linux uses the slower 8259 interrupt controllers.

use acpi_tables::Aml;
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::xsdt::XSDT;

/// Address and room of the tables.
pub const START: u64 = 0x9_0000;

const OEM: [u8; 6] = *b"HUSK  ";
const TABLE: [u8; 8] = *b"HUSKFLR ";
const REVISION: u32 = 1;
const LOCAL_APIC: u32 = 0xfee0_0000;
const IO_APIC: u32 = 0xfec0_0000;
const XSDT_OFFSET: u64 = 0x40;
const MADT_OFFSET: u64 = 0x80;

/// The tables of a machine with one processor, as they lie at [`START`]; the RSDP is the first.
pub fn tables() -> Vec<u8> {
    let mut madt = MADT::new(
        OEM,
        TABLE,
        REVISION,
        LocalInterruptController::Address(LOCAL_APIC),
    );
    madt.add_structure(ProcessorLocalApic::new(0, 0, EnabledStatus::Enabled));
    madt.add_structure(IoApic::new(0, IO_APIC, 0));
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    xsdt.add_entry(START + MADT_OFFSET);
    let mut all = Vec::new();
    Rsdp::new(OEM, START + XSDT_OFFSET).to_aml_bytes(&mut all);
    all.resize(XSDT_OFFSET as usize, 0);
    xsdt.to_aml_bytes(&mut all);
    all.resize(MADT_OFFSET as usize, 0);
    madt.to_aml_bytes(&mut all);
    all
}
