//! Errors of finding and loading a kernel.

use std::io;

/// Errors of finding and loading a kernel.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// No disk has a kernel that can be booted. Holds the reason for each disk.
    #[error("no disk can be booted: {0}")]
    NoBootableDisk(String),
    /// The file is neither a bzImage nor an ELF file.
    #[error(
        "{0} is not a kernel: neither a bzImage (boot protocol 2.12 or later with a 64-bit entry) nor an x86-64 ELF \
         file"
    )]
    NotAKernel(String),
    /// The kernel file is larger than 256 MiB.
    #[error("{what} of {size} bytes is larger than 256 MiB")]
    KernelSize {
        /// Name of the kernel: "the kernel", after the disk it is on.
        what: String,
        /// Its size in bytes.
        size: u64,
    },
    /// The kernel's header or segments are invalid.
    #[error("{what} cannot be loaded: {reason}")]
    BadKernel {
        /// Name of the kernel.
        what: String,
        /// The reason.
        reason: String,
    },
    /// Guest memory is too small.
    #[error("{what} of {size} bytes does not fit guest memory of {memory} bytes below 3 GiB")]
    NoRoom {
        /// Kernel or initrd.
        what: &'static str,
        /// Its size.
        size: u64,
        /// Guest memory below 3 GiB.
        memory: u64,
    },
    /// The command line is longer than the kernel, or the machine, accepts.
    #[error("kernel command line of {length} bytes is longer than the {limit} that the kernel accepts")]
    CommandLine {
        /// Its length.
        length: usize,
        /// The limit.
        limit: usize,
    },
    /// The command line contains a NUL byte, where the kernel would stop reading.
    #[error("the kernel command line contains a NUL byte")]
    CommandLineNul,
    /// A file could not be read.
    #[error("read {what}: {source}")]
    Read {
        /// Name of the file.
        what: String,
        /// The cause.
        source: io::Error,
    },
    /// Guest memory could not be written.
    #[error("write guest memory: {0}")]
    Memory(#[from] vm_memory::GuestMemoryError),
}
