//! The least program that boots a Linux guest: `husk-floor KERNEL INITRD MIB COMMAND-LINE`.
//!
//! It is the floor of `cargo xtask bench boot`: one thread, one vCPU, KVM's interrupt controllers and timer, and a
//! serial port. The guest has no firmware and no bus, and its only ACPI table is that of the interrupt controllers.
//! KERNEL is an ELF file with a PVH entry. The program ends when the guest resets the machine through the keyboard
//! controller.
//!
//! It shares no code with husk-vmm, so that it does not share its costs either.

mod acpi;
mod guest;

use anyhow::{Context, Result, bail};
use guest::Guest;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("husk-floor: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [kernel, initrd, mib, command_line] = words.as_slice() else {
        bail!("usage: husk-floor KERNEL INITRD MIB COMMAND-LINE");
    };
    let mib: u64 = mib.parse().with_context(|| format!("{mib:?} is no number"))?;
    Guest::new(mib)?.boot(kernel, initrd, command_line)?.run()
}
