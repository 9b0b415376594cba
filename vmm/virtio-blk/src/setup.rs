//! The parameters of a block device.

use std::io;
use std::sync::Arc;

use husk_disk::{Disk, EngineKind};

/// Called on a worker thread with the error for which a disk began to hold requests (error policy `stop`). The
/// requests are retried when the device is quiesced and activated again.
pub type OnIoStop = Arc<dyn Fn(io::Error) + Send + Sync>;

/// The parameters of a new device.
pub struct BlkSetup {
    /// The device is called `blk-{id}` in logs and thread names.
    pub id: String,
    /// The disk that the guest sees.
    pub disk: Disk,
    /// Serial number; the guest sees its first 20 bytes.
    pub serial: String,
    /// Virtqueues, each with a worker and an engine. At least 1, and 1 where the disk
    /// [needs one engine](Disk::needs_one_engine).
    pub queues: u16,
    /// The engine that does the I/O.
    pub engine: EngineKind,
    /// See [`OnIoStop`].
    pub on_io_stop: OnIoStop,
}

impl std::fmt::Debug for BlkSetup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlkSetup")
            .field("id", &self.id)
            .field("disk", &self.disk)
            .field("queues", &self.queues)
            .finish_non_exhaustive()
    }
}
