//! Errors of finding and loading a kernel.

use std::io;

/// Why there is nothing to boot.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// No disk carries a kernel; what was looked for and found.
    #[error("no disk can be booted: {0}")]
    NoBootableDisk(String),
    /// Neither bzImage nor ELF.
    #[error(
        "{0} is not a kernel: neither a bzImage (boot protocol 2.12 or later with a 64-bit entry) nor an x86-64 ELF file"
    )]
    NotAKernel(String),
    /// The kernel's own header or segments make no sense.
    #[error("{what} cannot be loaded: {reason}")]
    BadKernel {
        /// Which kernel.
        what: String,
        /// The loader's words.
        reason: String,
    },
    /// Not enough guest memory.
    #[error("{what} of {size} bytes does not fit guest memory of {memory} bytes below 3 GiB")]
    NoRoom {
        /// Kernel or initrd.
        what: &'static str,
        /// Its size.
        size: u64,
        /// Guest memory below 3 GiB.
        memory: u64,
    },
    /// Longer than the kernel, or the machine, takes.
    #[error("kernel command line of {length} bytes is longer than the {limit} the kernel takes")]
    CommandLine {
        /// Its length.
        length: usize,
        /// The limit.
        limit: usize,
    },
    /// The kernel would stop reading there.
    #[error("kernel command line has a NUL byte in it")]
    CommandLineNul,
    /// Reading failed.
    #[error("read {what}: {source}")]
    Read {
        /// What was read.
        what: String,
        /// The cause.
        source: io::Error,
    },
    /// Guest memory could not be written.
    #[error("write guest memory: {0}")]
    Memory(#[from] vm_memory::GuestMemoryError),
}
