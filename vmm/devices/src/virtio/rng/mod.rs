//! virtio-rng: entropy for the guest (virtio 1.2, section 5.4).

use std::io;

use husk_seccomp::ThreadRole;
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use vm_memory::{Bytes, GuestAddress};

use super::chain::Segment;
use super::queue_worker::{QueueWorker, RequestHandler};
use super::{ActivateError, Activation, ActiveQueue, VirtioDevice};
use crate::GuestMemMmap;
use crate::component::{ComponentState, RestoreError, SaveError};

/// Most bytes returned for one request.
const REQUEST_MAX: usize = 64 << 10;

/// Bytes requested from `getrandom(2)` at a time.
const DRAW: usize = 1024;

/// The device holds nothing.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RngState {}

/// An entropy device that reads the host kernel's random number generator.
#[derive(Debug, Default)]
pub struct Rng {
    worker: Option<QueueWorker>,
}

impl Rng {
    /// A device with one queue.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

impl VirtioDevice for Rng {
    fn name(&self) -> &str {
        "rng"
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn pci_class(&self) -> [u8; 3] {
        [0x00, 0xff, 0x00]
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &[64]
    }

    fn config_size(&self) -> u16 {
        0
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        if activation.queues.is_empty() {
            return Err(ActivateError::MissingQueue(0));
        }
        self.worker = Some(QueueWorker::start(
            ThreadRole::Rng,
            self.name(),
            EntropyHandler,
            activation,
        )?);
        Ok(())
    }

    fn reset(&mut self) {
        self.quiesce();
    }

    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>> {
        self.worker.take()?.stop()
    }

    fn save(&mut self) -> Result<ComponentState, SaveError> {
        ComponentState::new(&RngState {})
    }

    fn restore(&mut self, state: &ComponentState, _features: u64) -> Result<(), RestoreError> {
        state.parse::<RngState>().map(|_| ())
    }
}

struct EntropyHandler;

impl RequestHandler for EntropyHandler {
    fn handle(
        &mut self,
        _index: u16,
        mem: &GuestMemMmap,
        _readable: &[Segment],
        writable: &[Segment],
    ) -> Result<u32, &'static str> {
        let mut given = 0;
        let mut bytes = [0; DRAW];
        for segment in writable {
            let mut done = 0;
            while done < segment.len as usize && given < REQUEST_MAX {
                let len = (segment.len as usize - done).min(REQUEST_MAX - given).min(DRAW);
                fill(&mut bytes[..len]).map_err(|_| "the host has no entropy")?;
                let at = segment
                    .address
                    .0
                    .checked_add(done as u64)
                    .ok_or("buffer outside of guest memory")?;
                mem.write_slice(&bytes[..len], GuestAddress(at))
                    .map_err(|_| "buffer outside of guest memory")?;
                done += len;
                given += len;
            }
        }
        Ok(given as u32)
    }
}

fn fill(mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        // SAFETY: the kernel writes at most the given length, which lies in `bytes`.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        match usize::try_from(got) {
            Ok(got) => bytes = &mut bytes[got..],
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
