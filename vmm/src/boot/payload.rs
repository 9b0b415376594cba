//! A kernel with its initrd and command line, opened but not loaded yet.

use std::fs::File;
use std::io;

use husk_devices::GuestMemMmap;
use vm_memory::GuestAddress;

/// An initial RAM disk of known size, which is read once.
pub(super) struct Initrd<'a> {
    pub(super) size: u64,
    pub(super) read: ReadInitrd<'a>,
}

pub(super) type ReadInitrd<'a> = Box<dyn FnOnce(&GuestMemMmap, GuestAddress) -> io::Result<()> + 'a>;

/// A kernel, its initrd and its command line.
pub(super) struct BootPayload<'a> {
    pub(super) kernel: Kernel<'a>,
    pub(super) initrd: Option<Initrd<'a>>,
    pub(super) command_line: String,
    pub(super) description: String,
}

pub(super) enum Kernel<'a> {
    File(&'a File),
    Bytes(Vec<u8>),
}

/// Size limit of a kernel file in bytes.
pub(super) const KERNEL_MAX: u64 = 256 << 20;
