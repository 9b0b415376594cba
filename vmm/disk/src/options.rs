//! Options of disks and engines.

/// When a completed write is safe from a power failure (KubeVirt: `cache`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// After a flush. Bypasses the host's page cache: the descriptor must have been opened with `O_DIRECT`.
    None,
    /// At once: every write is on stable storage before it completes.
    Writethrough,
    /// After a flush.
    #[default]
    Writeback,
}

/// The I/O backend of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring, or threads if the kernel refuses it.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// A few threads with blocking system calls, started at once: create the engine before you drop privileges.
    Threads,
}

/// Format of an image file. The opener states it and it is never guessed: a guest can write any header into a raw disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// The content of the disk, byte for byte.
    Raw,
    /// qcow2, version 2 or 3.
    Qcow2,
}

/// Block sizes that the guest sees. Powers of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockSize {
    /// Logical blocks of 512 bytes, physical blocks as large as the volume's.
    #[default]
    Auto,
    /// The block sizes of the block device, or the block of the file system, at most 4096 bytes.
    MatchVolume,
    /// In bytes.
    Custom {
        /// Logical block: 512 to 4096.
        logical: u32,
        /// Physical block: from `logical` to 2 MiB.
        physical: u32,
    },
}

/// Handling of a request that failed on the host (QEMU: `werror`, `rerror`). A request that does not fit the disk
/// is an error of the guest and fails under every policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ErrorPolicy {
    /// It is held and not completed. The owner is notified, stops the VM, and retries after the fault was fixed.
    #[default]
    Stop,
    /// It completes with the error.
    Report,
    /// It completes as if it had succeeded. A read returns zeroes for the rest.
    Ignore,
    /// It is held if the volume or its quota is full, else it completes with the error.
    NoSpace,
}

impl ErrorPolicy {
    pub(crate) fn holds(self, errno: i32) -> bool {
        match self {
            Self::Stop => true,
            Self::NoSpace => matches!(errno, libc::ENOSPC | libc::EDQUOT),
            Self::Report | Self::Ignore => false,
        }
    }
}

/// Options to open a disk.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskOptions {
    /// Refuse every change of the image.
    pub read_only: bool,
    /// When writes become stable.
    pub cache: CacheMode,
    /// Block sizes that the guest sees.
    pub block_size: BlockSize,
    /// Policy for I/O errors.
    pub error_policy: ErrorPolicy,
    /// The image is fully allocated and stays so: discards are ignored.
    pub preallocated: bool,
}
