//! The least program that boots a Linux guest: `husk-floor KERNEL INITRD MIB COMMAND-LINE`.
//!
//! It is the floor of `cargo xtask bench boot`: one thread, one vCPU, the interrupt controllers and the timer that KVM
//! has, and a serial port. The guest sees no firmware, no bus, and of ACPI the table of interrupt controllers only. KERNEL
//! is an ELF file with a PVH entry. The program ends when the guest resets the machine by the keyboard controller.

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
