//! The device model: features, configuration space, and the workers of the active device.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use husk_devices::component::{ComponentState, RestoreError, SaveError};
use husk_devices::virtio::{ActivateError, Activation, ActiveQueue, VirtioDevice, config_space};
use husk_devices::worker::Worker;
use husk_disk::{Engine, Geometry, SECTOR};
use husk_seccomp::ThreadRole;
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

use crate::config::{self, QUEUE_SIZE};
use crate::handle::{BlkHandle, Shared};
use crate::queue_io::QueueIo;
use crate::request::{RequestLimits, SERIAL_LEN};
use crate::setup::{BlkSetup, OnIoStop};
use crate::state;
use crate::worker::{QueueWorker, StoppedQueue, WorkerContext};

/// A virtio block device.
pub struct Blk {
    name: String,
    serial: [u8; SERIAL_LEN],
    pub(crate) shared: Arc<Shared>,
    /// By virtqueue: its [`QueueIo`] while no worker owns it.
    pub(crate) queue_ios: Vec<Option<QueueIo>>,
    workers: Vec<Worker<Option<StoppedQueue>>>,
    queue_sizes: Vec<u16>,
    pub(crate) writeback: Arc<AtomicBool>,
    on_io_stop: OnIoStop,
}

impl std::fmt::Debug for Blk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Blk")
            .field("name", &self.name)
            .field("queue_ios", &self.queue_ios)
            .field("workers", &self.workers)
            .finish_non_exhaustive()
    }
}

impl Blk {
    /// A device and its handle. Creates every kernel object of the device except its threads, so that it can run
    /// before the seccomp filter is installed.
    ///
    /// # Errors
    /// The kernel refuses an engine.
    pub fn new(setup: BlkSetup) -> io::Result<(Self, BlkHandle)> {
        let BlkSetup { id, disk, serial, .. } = setup;
        let queues = if disk.needs_one_engine() {
            1
        } else {
            setup.queues.max(1)
        };
        let queue_io = |_| QueueIo::new(Engine::new(setup.engine, QUEUE_SIZE, 1)?, &disk).map(Some);
        let queue_ios = (0..queues).map(queue_io).collect::<io::Result<Vec<_>>>()?;
        let len = serial.len().min(SERIAL_LEN);
        let mut padded = [0; SERIAL_LEN];
        padded[..len].copy_from_slice(&serial.as_bytes()[..len]);
        let writeback = Arc::new(AtomicBool::new(disk.geometry().write_cache));
        let name = format!("blk-{id}");
        let shared = Shared::new(id, disk);
        let handle = BlkHandle(Arc::clone(&shared));
        let blk = Self {
            name,
            serial: padded,
            shared,
            queue_sizes: vec![QUEUE_SIZE; queue_ios.len()],
            queue_ios,
            workers: Vec::new(),
            writeback,
            on_io_stop: setup.on_io_stop,
        };
        Ok((blk, handle))
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.shared.disk.geometry()
    }

    fn queues(&self) -> u16 {
        self.queue_sizes.len() as u16
    }

    /// The limits of requests, and the cache mode if the driver can choose it.
    fn limits(&self, features: u64) -> (RequestLimits, Option<Arc<AtomicBool>>) {
        // Writes of a driver that cannot flush must be durable (section 5.2.6.2).
        let flushes = features & (1 << VIRTIO_BLK_F_FLUSH) != 0;
        let geometry = self.geometry();
        let limits = RequestLimits {
            capacity: geometry.size / SECTOR,
            block: u64::from(geometry.logical_block) / SECTOR,
            max_range: config::max_range_sectors(&geometry),
            read_only: geometry.read_only,
            durable: geometry.write_cache && !flushes,
            serial: self.serial,
        };
        (limits, flushes.then(|| Arc::clone(&self.writeback)))
    }

    fn start(&mut self, queue: ActiveQueue, context: &WorkerContext) -> Result<(), ActivateError> {
        let index = queue.index;
        let slot = self
            .queue_ios
            .get_mut(usize::from(index))
            .ok_or(ActivateError::MissingQueue(index))?;
        let queue_io = slot.take().ok_or_else(|| io::Error::other("the disk failed"))?;
        let name = if index == 0 {
            self.name.clone()
        } else {
            format!("{}-{index}", self.name)
        };
        let on_panic = {
            let interrupt = Arc::clone(&context.interrupt);
            move |message: &str| interrupt.needs_reset(message)
        };
        // Through a cell, to recover the queue I/O if the kernel refuses a thread.
        let cell = QueueWorker::new((queue, queue_io), context.clone());
        let cell = Arc::new(Mutex::new(Some(cell)));
        let take =
            |cell: &Mutex<Option<QueueWorker>>| cell.lock().unwrap_or_else(PoisonError::into_inner).take();
        let theirs = Arc::clone(&cell);
        match Worker::spawn(ThreadRole::Blk, &name, on_panic, move |stop| {
            take(&theirs).map(|worker| worker.run(stop))
        }) {
            Ok(worker) => self.workers.push(worker),
            Err(error) => {
                *slot = take(&cell).map(|worker| worker.into_parts().1);
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Stops the workers and takes back their queues. Requests complete first, except held ones.
    fn stop(&mut self) -> Vec<ActiveQueue> {
        let mut queues = Vec::new();
        for worker in self.workers.drain(..) {
            match worker.stop() {
                Ok(Some((queue, queue_io))) => {
                    self.queue_ios[usize::from(queue.index)] = queue_io;
                    queues.push(queue);
                }
                Ok(None) => {}
                Err(error) => tracing::error!(device = self.name, %error, "disk queue lost"),
            }
        }
        queues
    }
}

impl VirtioDevice for Blk {
    fn name(&self) -> &str {
        &self.name
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn pci_class(&self) -> [u8; 3] {
        [0x01, 0x00, 0x00]
    }

    fn features(&self) -> u64 {
        config::features(&self.geometry(), self.queues())
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn config_size(&self) -> u16 {
        config::CONFIG_SIZE as u16
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let space = config::space(
            &self.geometry(),
            self.queues(),
            self.writeback.load(Ordering::Relaxed),
        );
        config_space::read(&space, offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if self.geometry().write_cache && offset == config::WRITEBACK_OFFSET && data.len() == 1 {
            self.writeback.store(data[0] & 1 != 0, Ordering::Relaxed);
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        if activation.queues.is_empty() {
            return Err(ActivateError::MissingQueue(0));
        }
        let (limits, writeback) = self.limits(activation.features);
        let context = WorkerContext {
            mem: activation.mem,
            interrupt: Arc::clone(&activation.interrupt),
            disk: self.shared.disk.clone(),
            limits,
            writeback,
            on_io_stop: Arc::clone(&self.on_io_stop),
        };
        self.shared.set_interrupt(Some(activation.interrupt));
        for queue in activation.queues {
            if let Err(error) = self.start(queue, &context) {
                self.stop();
                return Err(error);
            }
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.stop();
        self.shared.set_interrupt(None);
        for slot in &mut self.queue_ios {
            if let Some(queue_io) = slot
                && let Err(error) = queue_io.abandon()
            {
                tracing::error!(device = self.name, %error, "disk queue lost");
                *slot = None;
            }
        }
        self.writeback
            .store(self.geometry().write_cache, Ordering::Relaxed);
    }

    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>> {
        if self.workers.is_empty() {
            None
        } else {
            Some(self.stop())
        }
    }

    fn save(&mut self) -> Result<ComponentState, SaveError> {
        state::save(self)
    }

    fn restore(&mut self, state: &ComponentState, _features: u64) -> Result<(), RestoreError> {
        state::restore(self, state)
    }
}

#[cfg(test)]
mod tests {
    use husk_disk::{CacheMode, Disk, DiskOptions, EngineKind};
    use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES};

    use super::*;

    fn blk(options: DiskOptions) -> Blk {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let setup = BlkSetup {
            id: "x".into(),
            disk: Disk::open_raw(file.into(), options).unwrap(),
            serial: "a serial that is too long".into(),
            queues: 1,
            engine: EngineKind::Auto,
            on_io_stop: Arc::new(|_| {}),
        };
        Blk::new(setup).unwrap().0
    }

    #[test]
    fn a_driver_that_cannot_flush_gets_durable_writes() {
        let blk = blk(DiskOptions::default());
        let (limits, writeback) = blk.limits(0);
        assert!(limits.durable && writeback.is_none());
        let (limits, writeback) = blk.limits(1 << VIRTIO_BLK_F_FLUSH);
        assert!(!limits.durable && writeback.is_some());
        assert_eq!((limits.capacity, limits.serial), (8, *b"a serial that is too"));
    }

    #[test]
    fn a_preallocated_disk_offers_no_discards() {
        let bits = |preallocated| {
            let options = DiskOptions {
                preallocated,
                ..DiskOptions::default()
            };
            let blk = blk(options);
            let space = config::space(&blk.geometry(), 1, true);
            let has = |bit: u32| blk.features() & (1 << bit) != 0;
            (
                has(VIRTIO_BLK_F_DISCARD),
                has(VIRTIO_BLK_F_WRITE_ZEROES),
                space[40],
                space[56],
            )
        };
        assert_eq!(bits(false), (true, true, 1, 1));
        assert_eq!(bits(true), (false, true, 0, 0));
    }

    #[test]
    fn a_disk_without_a_cache_needs_no_help() {
        for options in [
            DiskOptions {
                cache: CacheMode::Writethrough,
                ..DiskOptions::default()
            },
            DiskOptions {
                read_only: true,
                ..DiskOptions::default()
            },
        ] {
            let blk = blk(options);
            assert!(!blk.limits(0).0.durable);
            assert_eq!(blk.features() & (1 << VIRTIO_BLK_F_FLUSH), 0);
        }
    }
}
