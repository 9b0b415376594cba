//! The least program that boots a Linux guest: `husk-floor KERNEL INITRD MIB COMMAND-LINE [TAP]`.
//!
//! It is the floor of `cargo xtask bench boot` and `bench net`: one vCPU, KVM's interrupt controllers and timer, and a
//! serial port. The guest has no firmware, and its only ACPI table is that of the interrupt controllers. It has a bus
//! only with TAP, for one NIC. KERNEL is an ELF file with a PVH entry. The program ends when the guest resets the
//! machine through the keyboard controller.
//!
//! It shares no code with husk-vmm, so that it does not share its costs either.

mod acpi;
mod guest;
mod nic;
mod pci;
mod ring;
mod tap;
mod transfer;

use anyhow::{Context, Result, bail};
use guest::Guest;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (kernel, initrd, mib, command_line, tap) = match words.as_slice() {
        [kernel, initrd, mib, command_line] => (kernel, initrd, mib, command_line, None),
        [kernel, initrd, mib, command_line, tap] => (kernel, initrd, mib, command_line, Some(tap)),
        _ => bail!("usage: husk-floor KERNEL INITRD MIB COMMAND-LINE [TAP]"),
    };
    let mib: u64 = mib.parse().with_context(|| format!("{mib:?} is no number"))?;
    let mut guest = Guest::new(mib)?;
    if let Some(tap) = tap {
        guest = guest.with_tap(tap)?;
    }
    guest.boot(kernel, initrd, command_line)?.run()
}
