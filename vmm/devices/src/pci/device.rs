//! The interface of a PCI function.

/// A memory BAR that the function decodes at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// BAR number, 0 to 5 (the lower one of a 64-bit pair).
    pub index: u8,
    /// Guest-physical address, as the guest programmed it: any value.
    pub address: u64,
    /// Size in bytes, a power of two.
    pub size: u64,
}

/// One PCI function (always function 0 of its slot).
///
/// Called from any vCPU thread and from the machine's thread; a function guards its own state, and never
/// calls back into the [`PciRoot`](super::PciRoot).
pub trait PciDevice: Send + Sync {
    /// Fills `data` (1 to 8 bytes, any alignment, inside the 4 KiB of configuration space).
    fn config_read(&self, offset: u16, data: &mut [u8]);
    /// Handles a configuration write, with the same limits.
    fn config_write(&self, offset: u16, data: &[u8]);
    /// The memory BARs that the function decodes: those implemented while memory decoding is enabled, else none. The
    /// root bus calls this after every configuration write and maps the BARs where possible.
    fn bars(&self) -> Vec<Bar>;
    /// A read inside a BAR: 1, 2, 4 or 8 bytes, any alignment.
    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]);
    /// A write inside a BAR, with the same limits.
    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]);
    /// `bar` is now mapped at this guest-physical address, or unmapped. The function moves its ioeventfds and
    /// mappings.
    fn bar_mapped(&self, bar: u8, address: Option<u64>);
    /// Resets the function to its power-on state, with BARs at their initial addresses, on a VM reboot or before
    /// removal.
    fn reset(&self);
}
