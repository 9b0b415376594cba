//! virtio-balloon: memory that the guest returns to the host (virtio 1.2, section 5.5).

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use husk_seccomp::ThreadRole;
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use vm_memory::bitmap::Bitmap;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::chain::Segment;
use super::queue_worker::{QueueWorker, RequestHandler};
use super::{ActivateError, Activation, ActiveQueue, VirtioDevice, VirtioInterrupt, config_space};
use crate::GuestMemMmap;
use crate::component::{ComponentState, RestoreError, SaveError};

mod private_file;

/// Bytes of a balloon page, independent of the page sizes of host and guest.
const PAGE: u64 = 4096;

/// Bytes of `struct virtio_balloon_config`.
const CONFIG_SIZE: usize = 16;

/// Most page numbers of a request, each of which may take a system call. Linux sends 256, Windows 1,024.
const MAX_NUMBERS: usize = 1 << 16;

const ACTUAL_OFFSET: u64 = 4;

const INFLATE: u16 = 0;
const DEFLATE: u16 = 1;

const F_DEFLATE_ON_OOM: u64 = 1 << 2;
const F_PAGE_REPORTING: u64 = 1 << 5;

#[derive(Default)]
struct Shared {
    target: AtomicU32,
    actual: AtomicU32,
    interrupt: Mutex<Option<Arc<dyn VirtioInterrupt>>>,
}

/// Sizes in pages of 4 KiB.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BalloonState {
    target: u32,
    actual: u32,
}

/// Host-side control of a [`Balloon`]. Usable from any thread and in any device state.
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
    /// Sets the target size of the balloon in bytes, rounded down to 4 KiB. The guest inflates or deflates to it. A
    /// driver that starts later sees the last target.
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

    /// Target size in bytes.
    #[must_use]
    pub fn target(&self) -> u64 {
        u64::from(self.0.target.load(Ordering::Relaxed)) * PAGE
    }

    /// Size that the guest reports, in bytes.
    #[must_use]
    pub fn actual(&self) -> u64 {
        u64::from(self.0.actual.load(Ordering::Relaxed)) * PAGE
    }
}

/// A memory balloon with free-page reporting.
pub struct Balloon {
    shared: Arc<Shared>,
    reporting: bool,
    worker: Option<QueueWorker>,
}

impl std::fmt::Debug for Balloon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Balloon")
            .field("reporting", &self.reporting)
            .finish_non_exhaustive()
    }
}

impl Balloon {
    /// An empty balloon and the handle that sizes it. `reporting` offers free-page reporting (section 5.5.6.7). It is
    /// useless for memory of reserved huge pages, which are never returned to the host.
    #[must_use]
    pub fn new(reporting: bool) -> (Self, BalloonHandle) {
        let shared = Arc::<Shared>::default();
        (
            Self {
                shared: Arc::clone(&shared),
                reporting,
                worker: None,
            },
            BalloonHandle(shared),
        )
    }

    fn set_interrupt(&self, interrupt: Option<Arc<dyn VirtioInterrupt>>) {
        *self
            .shared
            .interrupt
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = interrupt;
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
        // The reporting queue has index 4 (section 5.5.2), but drivers that leave no gap for the queues
        // of features not offered look for it at 2. Neither index can mean anything else here.
        if self.reporting { &[128; 5] } else { &[128; 2] }
    }

    fn config_size(&self) -> u16 {
        CONFIG_SIZE as u16
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut space = [0; CONFIG_SIZE];
        space[..4].copy_from_slice(&self.shared.target.load(Ordering::Relaxed).to_le_bytes());
        space[4..8].copy_from_slice(&self.shared.actual.load(Ordering::Relaxed).to_le_bytes());
        config_space::read(&space, offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if let (ACTUAL_OFFSET, Ok(actual)) = (offset, data.try_into()) {
            self.shared
                .actual
                .store(u32::from_le_bytes(actual), Ordering::Relaxed);
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        for index in [INFLATE, DEFLATE] {
            if !activation.queues.iter().any(|queue| queue.index == index) {
                return Err(ActivateError::MissingQueue(index));
            }
        }
        self.set_interrupt(Some(Arc::clone(&activation.interrupt)));
        self.worker = Some(QueueWorker::start(
            ThreadRole::Balloon,
            self.name(),
            BalloonHandler,
            activation,
        )?);
        Ok(())
    }

    fn reset(&mut self) {
        self.quiesce();
        self.set_interrupt(None);
        // A new driver starts with an empty balloon: the old one's pages are in use again.
        self.shared.actual.store(0, Ordering::Relaxed);
    }

    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>> {
        self.worker.take()?.stop()
    }

    fn save(&mut self) -> Result<ComponentState, SaveError> {
        ComponentState::new(&BalloonState {
            target: self.shared.target.load(Ordering::Relaxed),
            actual: self.shared.actual.load(Ordering::Relaxed),
        })
    }

    fn restore(&mut self, state: &ComponentState, _features: u64) -> Result<(), RestoreError> {
        let state: BalloonState = state.parse()?;
        self.shared.target.store(state.target, Ordering::Relaxed);
        self.shared.actual.store(state.actual, Ordering::Relaxed);
        Ok(())
    }
}

/// Returns the memory of inflated and reported pages to the host.
struct BalloonHandler;

impl RequestHandler for BalloonHandler {
    fn handle(
        &mut self,
        index: u16,
        mem: &GuestMemMmap,
        readable: &[Segment],
        writable: &[Segment],
    ) -> Result<u32, &'static str> {
        match index {
            INFLATE => inflate(mem, readable)?,
            // The host allocates a page again on access.
            DEFLATE => {}
            // Free pages, as buffers (section 5.5.6.7). Nothing is written to them that the driver may rely on.
            _ => writable
                .iter()
                .for_each(|s| drop_pages(mem, s.address.0, s.len.into())),
        }
        Ok(0)
    }
}

/// Drops the pages whose numbers are in `segments` (section 5.5.6), runs of neighbours in one go.
fn inflate(mem: &GuestMemMmap, segments: &[Segment]) -> Result<(), &'static str> {
    const NUMBER: usize = size_of::<u32>();
    let bytes: u64 = segments.iter().map(|segment| u64::from(segment.len)).sum();
    if bytes > (MAX_NUMBERS * NUMBER) as u64 {
        return Err("a request with too many page numbers");
    }
    let mut numbers = [0; 256 * NUMBER];
    for segment in segments {
        // First page and pages of the run so far.
        let (mut first, mut count) = (0, 0);
        // Ignore a partial page number at the end of a descriptor.
        let len = segment.len as usize / NUMBER * NUMBER;
        let mut done = 0;
        while done < len {
            let part = &mut numbers[..(len - done).min(256 * NUMBER)];
            let at = segment
                .address
                .0
                .checked_add(done as u64)
                .ok_or("buffer outside of guest memory")?;
            mem.read_slice(part, GuestAddress(at))
                .map_err(|_| "buffer outside of guest memory")?;
            done += part.len();
            for number in part.chunks_exact(NUMBER) {
                let page = u64::from(u32::from_le_bytes(std::array::from_fn(|i| number[i])));
                if page == first + count {
                    count += 1;
                } else if page + 1 == first {
                    (first, count) = (page, count + 1);
                } else {
                    drop_pages(mem, first * PAGE, count * PAGE);
                    (first, count) = (page, 1);
                }
            }
        }
        drop_pages(mem, first * PAGE, count * PAGE);
    }
    Ok(())
}

/// Returns the memory behind `len` bytes at guest address `start` to the host; they then read as zeroes. Ignores a
/// range that is not whole pages inside one region, and huge pages.
fn drop_pages(mem: &GuestMemMmap, start: u64, len: u64) {
    let Some((region, offset)) = mem.to_region_addr(GuestAddress(start)) else {
        return;
    };
    let inside = offset
        .raw_value()
        .checked_add(len)
        .is_some_and(|end| end <= region.len());
    // Reserved huge pages stay with the guest.
    let ours = region.is_hugetlbfs() != Some(true);
    if len == 0 || !(start | len).is_multiple_of(PAGE) || !inside || !ours {
        return;
    }
    let Ok(address) = region.get_host_address(offset) else {
        return;
    };
    // A shared mapping's memory belongs to its file, and stays there when only unmapped.
    let shared = region.flags() & libc::MAP_SHARED != 0;
    let dropped = if !shared && region.file_offset().is_some() {
        // SAFETY: the range lies in one mapping of guest memory, which nothing in this process takes to keep its content:
        // all of it is the guest's to change at any time.
        unsafe { private_file::discard(address, len as usize) }
    } else {
        let advice = if shared {
            libc::MADV_REMOVE
        } else {
            libc::MADV_DONTNEED
        };
        // SAFETY: as above.
        match unsafe { libc::madvise(address.cast(), len as usize, advice) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    if let Err(error) = dropped {
        tracing::debug!(start, len, %error, "pages not dropped");
    }
    region
        .bitmap()
        .mark_dirty(offset.raw_value() as usize, len as usize);
}

#[cfg(test)]
mod tests;
