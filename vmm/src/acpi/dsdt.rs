//! The DSDT: the devices that PCI does not enumerate, and the methods that handle events.

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, And, Arg, Device, EISAName, Equal, Field, FieldAccessType,
    FieldEntry, FieldLockRule, FieldUpdateRule, IO, If, Interrupt, Local, Memory32Fixed, Method, MethodCall,
    Name, Notify, OpRegion, OpRegionSpace, Package, Path, ResourceTemplate, Scope, Store, ZERO,
};
use acpi_tables::{Aml, AmlSink};
use husk_devices::legacy::power::{self, PowerEvent};
use husk_devices::legacy::{pvpanic, rtc, serial};
use husk_devices::pci::hotplug;

use super::PciSlots;
use super::resources::{GED_PIN, PCI_HOTPLUG_PORT};
use crate::layout::{ECAM, GENERATION_ID, Layout, PCI_MMIO32};

/// Notification values (ACPI 6.5, sections 5.6.6 and 4.8.2.2; the specification of the generation ID).
const DEVICE_CHECK: u8 = 1;
const EJECT_REQUEST: u8 = 3;
const BUTTON_PRESSED: u8 = 0x80;
const NEW_GENERATION: u8 = 0x80;

fn append(out: &mut Vec<u8>, term: &dyn Aml) {
    term.to_aml_bytes(out);
}

fn hid(id: &str) -> Name {
    Name::new("_HID".into(), &EISAName::new(id))
}

fn dword_fields(names: &[[u8; 4]], region: &str) -> Field {
    let entries = names.iter().map(|name| FieldEntry::Named(*name, 32)).collect();
    let update = FieldUpdateRule::WriteAsZeroes;
    Field::new(
        region.into(),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        update,
        entries,
    )
}

/// Raw bytes of terms already encoded.
struct Encoded(Vec<u8>);

impl Aml for Encoded {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(&self.0);
    }
}

fn slot_path(slot: u8) -> String {
    format!("S{slot:02}_")
}

/// A slot into which functions can be plugged.
fn hotplug_slot(out: &mut Vec<u8>, slot: u8) {
    let (bit, register) = (1u32 << slot, Path::new("B0EJ"));
    let eject = Store::new(&register, &bit);
    let method = Method::new("_EJ0".into(), 1, true, vec![&eject]);
    let address = Name::new("_ADR".into(), &(u32::from(slot) << 16));
    let number = Name::new("_SUN".into(), &slot);
    append(
        out,
        &Device::new(slot_path(slot).as_str().into(), vec![&address, &number, &method]),
    );
}

/// The slot of a NIC that a machine starts with. Neither `_EJ0` nor `_SUN`: by both udev would name the NIC after a slot
/// (`ens1`), which it does not by the address alone (`enp0s1`). The guest says by `_OST` (ACPI 6.5, section 6.3.5) that it
/// has let go.
fn nic_slot(out: &mut Vec<u8>, slot: u8) {
    let (bit, register) = (1u32 << slot, Path::new("B0EJ"));
    let eject = Store::new(&register, &bit);
    let (event, status) = (Arg(0), Arg(1));
    let has_succeeded = Equal::new(&status, &ZERO);
    let if_succeeded = If::new(&has_succeeded, vec![&eject]);
    let is_ejection = Equal::new(&event, &EJECT_REQUEST);
    let ejected = If::new(&is_ejection, vec![&if_succeeded]);
    let method = Method::new("_OST".into(), 3, true, vec![&ejected]);
    let address = Name::new("_ADR".into(), &(u32::from(slot) << 16));
    append(
        out,
        &Device::new(slot_path(slot).as_str().into(), vec![&address, &method]),
    );
}

/// The root bridge with its windows, the slots whose functions come and go, and the method that scans them for changes.
fn pci_root(out: &mut Vec<u8>, layout: &Layout, pci: PciSlots<'_>) {
    let bus = AddressSpace::new_bus_number(0u16, 0u16);
    let config = IO::new(0xcf8, 0xcf8, 1, 8);
    let low = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        PCI_MMIO32.start as u32,
        (PCI_MMIO32.end - 1) as u32,
        None::<u32>,
    );
    let window = &layout.pci_mmio64;
    let high = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        window.start,
        window.end - 1,
        None::<u64>,
    );

    let mut slots = Vec::new();
    pci.hotplug
        .iter()
        .for_each(|&slot| hotplug_slot(&mut slots, slot));
    pci.nics.iter().for_each(|&slot| nic_slot(&mut slots, slot));
    let mut scan = Vec::new();
    for (local, register) in [(0, "PCIU"), (1, "PCID")] {
        append(&mut scan, &Store::new(&Local(local), &Path::new(register)));
    }
    for &slot in pci.hotplug.iter().chain(pci.nics) {
        let bit = 1u32 << slot;
        for (local, value) in [(0, DEVICE_CHECK), (1, EJECT_REQUEST)] {
            let (masked, path) = (Local(2), Path::new(&slot_path(slot)));
            append(&mut scan, &And::new(&masked, &Local(local), &bit));
            append(
                &mut scan,
                &If::new(&Equal::new(&masked, &bit), vec![&Notify::new(&path, &value)]),
            );
        }
    }
    let port = PCI_HOTPLUG_PORT as u16;
    let length = hotplug::REGISTERS as u8;
    let mut root = Vec::new();
    append(&mut root, &hid("PNP0A08"));
    append(&mut root, &Name::new("_CID".into(), &EISAName::new("PNP0A03")));
    for name in ["_SEG", "_BBN", "_UID"] {
        append(&mut root, &Name::new(name.into(), &ZERO));
    }
    let resources = ResourceTemplate::new(vec![&bus, &config, &low, &high]);
    append(&mut root, &Name::new("_CRS".into(), &resources));
    append(
        &mut root,
        &OpRegion::new("PHPR".into(), OpRegionSpace::SystemIO, &port, &length),
    );
    append(&mut root, &dword_fields(&[*b"PCIU", *b"PCID", *b"B0EJ"], "PHPR"));
    root.append(&mut slots);
    append(
        &mut root,
        &Method::new("PSCN".into(), 0, true, vec![&Encoded(scan)]),
    );
    append(out, &Device::new("PCI0".into(), vec![&Encoded(root)]));

    // Keeps the guest from using ECAM as a free window. Linux trusts the MCFG only if a device reserves its range.
    let ecam = Memory32Fixed::new(true, ECAM.start as u32, (ECAM.end - ECAM.start) as u32);
    let resources = Name::new("_CRS".into(), &ResourceTemplate::new(vec![&ecam]));
    let uid = Name::new("_UID".into(), &ZERO);
    append(
        out,
        &Device::new("MBRD".into(), vec![&hid("PNP0C02"), &uid, &resources]),
    );
}

fn legacy_device(out: &mut Vec<u8>, name: &str, id: &dyn Aml, port: u64, len: u64, irq: Option<u32>) {
    let io = IO::new(port as u16, port as u16, 1, len as u8);
    let interrupt = irq.map(|irq| Interrupt::new(true, true, false, false, irq));
    let mut resources: Vec<&dyn Aml> = vec![&io];
    resources.extend(interrupt.as_ref().map(|i| i as &dyn Aml));
    let crs = Name::new("_CRS".into(), &ResourceTemplate::new(resources));
    let (uid, status) = (Name::new("_UID".into(), &ZERO), Name::new("_STA".into(), &0xfu8));
    append(out, &Device::new(name.into(), vec![id, &uid, &status, &crs]));
}

/// The device of Microsoft's "Virtual Machine Generation ID": says where the ID is. Guests find it by its compatible ID.
fn generation(out: &mut Vec<u8>) {
    let kind = "VM_Gen_Counter";
    let (low, high) = (GENERATION_ID as u32, (GENERATION_ID >> 32) as u32);
    let address = Package::new(vec![&low, &high]);
    append(
        out,
        &Device::new(
            "VGEN".into(),
            vec![
                &Name::new("_HID".into(), &"HUSK0001"),
                &Name::new("_CID".into(), &kind),
                &Name::new("_DDN".into(), &kind),
                &Name::new("ADDR".into(), &address),
            ],
        ),
    );
}

/// The generic event device (ACPI 6.5, section 5.6.9): reads the event register and notifies the devices named there.
fn events(out: &mut Vec<u8>) {
    append(
        out,
        &Device::new(
            "PWRB".into(),
            vec![&hid("PNP0C0C"), &Name::new("_UID".into(), &ZERO)],
        ),
    );
    let button = PowerEvent::PowerButton as u32;
    let hotplug = PowerEvent::PciHotplug as u32;
    let generation = PowerEvent::NewGeneration as u32;
    let mut body = Vec::new();
    append(&mut body, &Store::new(&Local(0), &Path::new("ESTS")));
    let (masked, taken, power_button) = (Local(1), Local(0), Path::new("\\_SB_.PWRB"));
    append(&mut body, &And::new(&masked, &taken, &button));
    append(
        &mut body,
        &If::new(
            &Equal::new(&masked, &button),
            vec![&Notify::new(&power_button, &BUTTON_PRESSED)],
        ),
    );
    append(&mut body, &And::new(&masked, &taken, &hotplug));
    let scan = MethodCall::new("\\_SB_.PCI0.PSCN".into(), vec![]);
    append(&mut body, &If::new(&Equal::new(&masked, &hotplug), vec![&scan]));
    append(&mut body, &And::new(&masked, &taken, &generation));
    append(
        &mut body,
        &If::new(
            &Equal::new(&masked, &generation),
            vec![&Notify::new(&Path::new("\\_SB_.VGEN"), &NEW_GENERATION)],
        ),
    );

    let interrupt = Interrupt::new(true, true, false, false, GED_PIN);
    let (port, length) = ((power::PORT + power::EVENTS) as u16, 4u8);
    let mut device = Vec::new();
    append(&mut device, &Name::new("_HID".into(), &"ACPI0013"));
    append(&mut device, &Name::new("_UID".into(), &ZERO));
    append(
        &mut device,
        &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&interrupt])),
    );
    append(
        &mut device,
        &OpRegion::new("EREG".into(), OpRegionSpace::SystemIO, &port, &length),
    );
    append(&mut device, &dword_fields(&[*b"ESTS"], "EREG"));
    append(
        &mut device,
        &Method::new("_EVT".into(), 1, true, vec![&Encoded(body)]),
    );
    append(out, &Device::new("GED_".into(), vec![&Encoded(device)]));
}

/// The definition block of the DSDT, without its header.
pub fn definition_block(layout: &Layout, slots: PciSlots<'_>) -> Vec<u8> {
    let mut scope = Vec::new();
    pci_root(&mut scope, layout, slots);
    legacy_device(
        &mut scope,
        "COM1",
        &hid("PNP0501"),
        serial::PORT,
        serial::LEN,
        Some(serial::IRQ),
    );
    legacy_device(
        &mut scope,
        "RTC_",
        &hid("PNP0B00"),
        rtc::PORT,
        rtc::LEN,
        Some(rtc::IRQ),
    );
    legacy_device(
        &mut scope,
        "PEVT",
        &Name::new("_HID".into(), &"QEMU0001"),
        pvpanic::PORT,
        1,
        None,
    );
    generation(&mut scope);
    events(&mut scope);
    let mut out = Vec::new();
    append(&mut out, &Scope::new("\\_SB_".into(), vec![&Encoded(scope)]));
    append(
        &mut out,
        &Name::new(
            "_S5_".into(),
            &Package::new(vec![&power::S5, &ZERO, &ZERO, &ZERO]),
        ),
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(block: &[u8], part: &[u8]) -> bool {
        block.windows(part.len()).any(|window| window == part)
    }

    #[test]
    fn guests_find_the_generation_id_and_are_notified_of_a_new_one() {
        let block = definition_block(&Layout::new(64 << 20, 48).unwrap(), PciSlots::default());
        assert!(has(&block, b"_HID\x0dHUSK0001\0"));
        assert!(has(&block, b"_CID\x0dVM_Gen_Counter\0"));
        assert!(has(&block, b"_DDN\x0dVM_Gen_Counter\0"));
        // A package of a double word and a zero, from its name on: its length is 8 with that byte.
        let mut address = b"ADDR\x12\x08\x02\x0c".to_vec();
        address.extend((GENERATION_ID as u32).to_le_bytes());
        address.push(0);
        assert!(has(&block, &address));
        // If (Local1 == 4) { Notify (\_SB.VGEN, 0x80) }
        assert!(has(&block, b"\x93\x61\x0a\x04\x86\\\x2e_SB_VGEN\x0a\x80"));
    }

    #[test]
    fn a_nic_of_the_start_is_ejected_by_ost_and_has_no_slot_number() {
        let slots = |hotplug: &'static [u8], nics: &'static [u8]| PciSlots { hotplug, nics };
        let layout = Layout::new(64 << 20, 48).unwrap();
        let block = definition_block(&layout, slots(&[], &[2]));
        // Method (_OST, 3, Serialized) { If (Arg0 == 3) { If (Arg1 == 0) { B0EJ = 4 } } }
        let method = b"_OST\x0b\xa0\x11\x93\x68\x0a\x03\xa0\x0b\x93\x69\x00\x70\x0a\x04B0EJ";
        assert!(has(&block, method));
        assert!(!has(&block, b"_EJ0") && !has(&block, b"_SUN"));
        // If (Local2 == 4) { Notify (S02, 3) }
        assert!(has(&block, b"\x93\x62\x0a\x04\x86S02_\x0a\x03"));
        let block = definition_block(&layout, slots(&[31], &[]));
        assert!(has(&block, b"_EJ0") && has(&block, b"_SUN") && !has(&block, b"_OST"));
    }
}
