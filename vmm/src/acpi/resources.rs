//! Interrupt and ports that the tables name and the devices serve.

/// I/O APIC pin of the generic event device.
pub const GED_PIN: u32 = 9;
/// First port of the PCI hotplug registers.
pub const PCI_HOTPLUG_PORT: u64 = 0x620;
