//! What whoever opens a disk, or makes an engine, decides.

/// When a completed write is safe from a power cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// After a flush. The host's page cache is not used: the descriptor must have been opened with `O_DIRECT`.
    None,
    /// At once: every write is on stable storage before it completes.
    Writethrough,
    /// After a flush.
    #[default]
    Writeback,
}

/// Who does the I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring, or threads where the kernel refuses it.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// A few threads with blocking system calls, started at once: whoever drops privileges does it before.
    Threads,
}

/// What a file that holds a disk's content looks like. Said by who opens it, never guessed: a guest can write any
/// header into a raw disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// The content, byte for byte.
    Raw,
    /// qcow2, version 2 or 3.
    Qcow2,
}

/// The block sizes a disk shows. Powers of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockSize {
    /// Logical blocks of 512 bytes on physical ones as large as the volume's.
    #[default]
    Auto,
    /// Those of the block device, or the block of the file system, 4096 bytes at most.
    MatchVolume,
    /// In bytes.
    Custom {
        /// What the disk is addressed in: 512 to 4096.
        logical: u32,
        /// What it writes without reading first: from `logical` to 2 MiB.
        physical: u32,
    },
}

/// What becomes of a request that the host could not carry out. A request that does not fit the disk is the guest's
/// own fault and fails under each of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ErrorPolicy {
    /// It is held, not completed, and the owner is told, who stops the VM, has the fault seen to, and retries.
    #[default]
    Stop,
    /// It completes with the error.
    Report,
    /// It completes as if it had been done. What a read could not get is zeroes.
    Ignore,
    /// It is held where the volume or its quota is full, else it completes with the error.
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

/// How to open a disk.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskOptions {
    /// Refuse everything that changes the image.
    pub read_only: bool,
    /// When writes become stable.
    pub cache: CacheMode,
    /// Block sizes to show.
    pub block_size: BlockSize,
    /// What an I/O error does.
    pub error_policy: ErrorPolicy,
}
