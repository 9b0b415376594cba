//! ACPI 6.5 tables of the machine: hardware-reduced, hence without SCI, PM timer and fixed events.

use acpi_tables::Aml;
use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use husk_devices::legacy::{power, rtc};

use crate::cpuid::Topology;
use crate::layout::{self, Layout};

mod dsdt;
mod resources;

pub use resources::{GED_PIN, PCI_HOTPLUG_PORT};

const OEM: [u8; 6] = *b"HUSK  ";
const TABLE: [u8; 8] = *b"HUSKVMM ";
const REVISION: u32 = 1;

/// IA-PC boot architecture flags (table 5.10): no VGA, no ASPM. Flags left clear: no 8042, a CMOS clock.
const VGA_NOT_PRESENT: u16 = 1 << 2;
const NO_PCIE_ASPM: u16 = 1 << 4;

/// The tables are larger than [`layout::ACPI`].
#[derive(Debug, thiserror::Error)]
#[error("ACPI tables need {0} bytes, only {limit} are reserved", limit = layout::ACPI.end - layout::ACPI.start)]
pub struct AcpiTooLarge(usize);

fn port(address: u64) -> GAS {
    GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, address)
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut out = Vec::new();
    table.to_aml_bytes(&mut out);
    out
}

fn fadt(dsdt: u64) -> Vec<u8> {
    let mut fadt = FADTBuilder::new(OEM, TABLE, REVISION)
        .dsdt_64(dsdt)
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::Wbinvd)
        .flag(Flags::Headless);
    fadt.iapc_boot_arch = (VGA_NOT_PRESENT | NO_PCIE_ASPM).into();
    fadt.reset_reg = port(power::PORT + power::RESET);
    fadt.reset_value = power::RESET_VALUE;
    fadt.sleep_control_reg = port(power::PORT + power::SLEEP_CONTROL);
    fadt.sleep_status_reg = port(power::PORT + power::SLEEP_STATUS);
    fadt.century = rtc::CENTURY;
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(*b"HUSK\0\0\0\0").into();
    bytes(&fadt.finalize())
}

fn madt(topology: Topology) -> Vec<u8> {
    let lapic = LocalInterruptController::Address(layout::LAPIC as u32);
    let mut madt = MADT::new(OEM, TABLE, REVISION, lapic);
    for index in 0..topology.vcpus() {
        madt.add_structure(ProcessorLocalApic::new(
            index as u8,
            topology.apic_id(index) as u8,
            EnabledStatus::Enabled,
        ));
    }
    madt.add_structure(IoApic::new(0, layout::IOAPIC as u32, 0));
    bytes(&madt)
}

fn mcfg() -> Vec<u8> {
    let mut mcfg = MCFG::new(OEM, TABLE, REVISION);
    mcfg.add_ecam(layout::ECAM.start, 0, 0, 0);
    bytes(&mcfg)
}

/// The PCI slots whose functions come and go.
#[derive(Debug, Clone, Copy, Default)]
pub struct PciSlots<'a> {
    /// Slots into which functions can be plugged.
    pub hotplug: &'a [u8],
    /// Slots of the NICs that the machine starts with.
    pub nics: &'a [u8],
}

/// All tables as they are written to [`layout::ACPI`], the RSDP first.
pub fn tables(layout: &Layout, topology: Topology, slots: PciSlots<'_>) -> Result<Vec<u8>, AcpiTooLarge> {
    let mut image = vec![0; Rsdp::len()];
    let mut place = |table: &[u8]| {
        image.resize(image.len().next_multiple_of(16), 0);
        let address = layout::ACPI.start + image.len() as u64;
        image.extend_from_slice(table);
        address
    };
    let mut dsdt = Sdt::new(*b"DSDT", 36, 6, OEM, TABLE, REVISION);
    dsdt.append_slice(&dsdt::definition_block(layout, slots));
    let dsdt = place(dsdt.as_slice());
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    for table in [fadt(dsdt), madt(topology), mcfg()] {
        xsdt.add_entry(place(&table));
    }
    let xsdt = place(&bytes(&xsdt));
    image[..Rsdp::len()].copy_from_slice(&bytes(&Rsdp::new(OEM, xsdt)));
    let limit = (layout::ACPI.end - layout::ACPI.start) as usize;
    if image.len() > limit {
        Err(AcpiTooLarge(image.len()))
    } else {
        Ok(image)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |a, b| a.wrapping_add(*b))
    }

    fn u64_at(image: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(image[at..at + 8].try_into().unwrap())
    }

    fn table(image: &[u8], address: u64) -> &[u8] {
        let at = (address - layout::ACPI.start) as usize;
        let len = u32::from_le_bytes(image[at + 4..at + 8].try_into().unwrap()) as usize;
        &image[at..at + len]
    }

    #[test]
    fn every_table_is_reachable_and_sums_to_zero() {
        let layout = Layout::new(5 << 30, 48).unwrap();
        let topology = Topology {
            sockets: 2,
            cores: 3,
            threads: 2,
        };
        let hotplug: Vec<u8> = (24..32).collect();
        let slots = PciSlots {
            hotplug: &hotplug,
            nics: &[1],
        };
        let image = tables(&layout, topology, slots).unwrap();
        assert_eq!(&image[..8], b"RSD PTR ");
        assert_eq!(sum(&image[..20]), 0);
        assert_eq!(sum(&image[..36]), 0);
        let xsdt = table(&image, u64_at(&image, 24));
        assert_eq!(sum(xsdt), 0);
        let mut names = Vec::new();
        for entry in xsdt[36..].chunks_exact(8) {
            let table = table(&image, u64_at(entry, 0));
            assert_eq!(sum(table), 0);
            names.push(String::from_utf8(table[..4].to_vec()).unwrap());
            if &table[..4] == b"FACP" {
                let dsdt = self::table(&image, u64_at(table, 140));
                assert_eq!((&dsdt[..4], sum(dsdt)), (&b"DSDT"[..], 0));
                let flags = u32::from_le_bytes(table[112..116].try_into().unwrap());
                assert_eq!(
                    flags & (1 << 20 | 1 << 10),
                    1 << 20 | 1 << 10,
                    "hardware-reduced, reset register"
                );
                let arch = u16::from_le_bytes(table[109..111].try_into().unwrap());
                assert_eq!(arch & (1 << 5 | 1 << 1), 0, "a CMOS clock and no 8042");
            }
        }
        assert_eq!(names, ["FACP", "APIC", "MCFG"]);
    }

    #[test]
    fn the_largest_machine_fits() {
        let layout = Layout::new(64 << 20, 48).unwrap();
        let topology = Topology {
            sockets: 255,
            cores: 1,
            threads: 1,
        };
        let all: Vec<u8> = (1..32).collect();
        for (hotplug, nics) in [(&all[..], &[][..]), (&[], &all)] {
            tables(&layout, topology, PciSlots { hotplug, nics }).unwrap();
        }
    }
}
