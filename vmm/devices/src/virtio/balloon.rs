//! virtio-balloon: memory the guest gives back to the host (virtio 1.2, section 5.5).

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;

use super::{ActivateError, Activation, ActiveQueue, VirtioDevice, VirtioInterrupt};

/// Unit of everything the balloon counts, whatever the pages of host or guest.
const PAGE: u64 = 4096;

const F_DEFLATE_ON_OOM: u64 = 1 << 2;
const F_PAGE_REPORTING: u64 = 1 << 5;

#[derive(Default)]
struct Shared {
    target: AtomicU32,
    actual: AtomicU32,
    interrupt: Mutex<Option<Arc<dyn VirtioInterrupt>>>,
}

/// The host's end of a [`Balloon`]. Usable from any thread, whatever state the device is in.
#[derive(Clone)]
pub struct BalloonHandle(Arc<Shared>);

impl std::fmt::Debug for BalloonHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BalloonHandle")
            .field("target", &self.target())
            .field("actual", &self.actual())
            .finish()
    }
}

impl BalloonHandle {
    /// Asks the guest to put `bytes` of its memory into the balloon (rounded down to 4 KiB), or to take
    /// back what is more. A guest without a driver sees it when it gets one.
    pub fn set_target(&self, bytes: u64) {
        self.0
            .target
            .store(u32::try_from(bytes / PAGE).unwrap_or(u32::MAX), Ordering::Relaxed);
        let interrupt = self
            .0
            .interrupt
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        if let Some(interrupt) = interrupt {
            interrupt.signal_config();
        }
    }

    /// Bytes last asked for.
    #[must_use]
    pub fn target(&self) -> u64 {
        u64::from(self.0.target.load(Ordering::Relaxed)) * PAGE
    }

    /// Bytes the guest says it has given.
    #[must_use]
    pub fn actual(&self) -> u64 {
        u64::from(self.0.actual.load(Ordering::Relaxed)) * PAGE
    }
}

/// A memory balloon with free-page reporting.
pub struct Balloon {
    shared: Arc<Shared>,
    reporting: bool,
}

impl std::fmt::Debug for Balloon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Balloon")
            .field("reporting", &self.reporting)
            .finish_non_exhaustive()
    }
}

impl Balloon {
    /// A balloon with nothing in it and the handle to size it. `reporting` offers free-page reporting;
    /// leave it out where the memory is huge pages reserved for good, which are never given back.
    #[must_use]
    pub fn new(reporting: bool) -> (Self, BalloonHandle) {
        let shared = Arc::<Shared>::default();
        (
            Self {
                shared: Arc::clone(&shared),
                reporting,
            },
            BalloonHandle(shared),
        )
    }
}

impl VirtioDevice for Balloon {
    fn name(&self) -> &str {
        "balloon"
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn pci_class(&self) -> [u8; 3] {
        [0x00, 0xff, 0x00]
    }

    fn features(&self) -> u64 {
        F_DEFLATE_ON_OOM | if self.reporting { F_PAGE_REPORTING } else { 0 }
    }

    fn queue_max_sizes(&self) -> &[u16] {
        if self.reporting { &[128; 5] } else { &[128; 2] }
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn activate(&mut self, _activation: Activation) -> Result<(), ActivateError> {
        Err(std::io::Error::from(std::io::ErrorKind::Unsupported).into())
    }

    fn reset(&mut self) {}

    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>> {
        None
    }
}
