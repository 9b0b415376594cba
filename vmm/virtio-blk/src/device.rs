//! The device model: features, configuration space, and workers that come and go with the driver.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use husk_devices::virtio::{ActivateError, Activation, ActiveQueue, VirtioDevice, config_space};
use husk_devices::worker::Worker;
use husk_disk::{Disk, DiskQueue, Geometry, SECTOR};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

use crate::config;
use crate::request::Rules;
use crate::worker::{Parked, QueueWorker};

/// Bytes of a serial number (section 5.2.6).
pub(crate) const SERIAL_LEN: usize = 20;

/// A virtio block device.
#[derive(Debug)]
pub struct Blk {
    name: String,
    serial: [u8; SERIAL_LEN],
    geometry: Geometry,
    /// By virtqueue: its queue to the disk while no worker has it.
    disk: Vec<Option<Box<dyn DiskQueue>>>,
    workers: Vec<Worker<Option<Parked>>>,
    queue_sizes: Vec<u16>,
    writeback: Arc<AtomicBool>,
}

impl Blk {
    /// A device called `blk-{id}` in logs and thread names, with as many virtqueues as `disk` has queues.
    ///
    /// The guest sees the first 20 bytes of `serial`.
    #[must_use]
    pub fn new(id: &str, mut disk: Disk, serial: &str) -> Self {
        let geometry = disk.geometry();
        let queues = disk.take_queues();
        let len = serial.len().min(SERIAL_LEN);
        let mut padded = [0; SERIAL_LEN];
        padded[..len].copy_from_slice(&serial.as_bytes()[..len]);
        Self {
            name: format!("blk-{id}"),
            serial: padded,
            geometry,
            queue_sizes: vec![crate::QUEUE_SIZE; queues.len()],
            disk: queues.into_iter().map(Some).collect(),
            workers: Vec::new(),
            writeback: Arc::new(AtomicBool::new(geometry.write_cache)),
        }
    }

    fn queues(&self) -> u16 {
        self.queue_sizes.len() as u16
    }

    /// What requests are judged by, and the cache mode if this driver can choose it.
    fn rules(&self, features: u64) -> (Rules, Option<Arc<AtomicBool>>) {
        // A driver that cannot flush is owed writes that need none (section 5.2.6.2).
        let flushes = features & (1 << VIRTIO_BLK_F_FLUSH) != 0;
        let rules = Rules {
            capacity: self.geometry.size / SECTOR,
            read_only: self.geometry.read_only,
            durable: self.geometry.write_cache && !flushes,
            serial: self.serial,
        };
        (rules, flushes.then(|| Arc::clone(&self.writeback)))
    }

    fn start(&mut self, queue: ActiveQueue, activation: &Common) -> Result<(), ActivateError> {
        let index = queue.index;
        let slot = self
            .disk
            .get_mut(usize::from(index))
            .ok_or(ActivateError::MissingQueue(index))?;
        let disk = slot.take().ok_or_else(|| io::Error::other("the disk failed"))?;
        let name = if index == 0 {
            self.name.clone()
        } else {
            format!("{}-{index}", self.name)
        };
        let Common {
            mem,
            interrupt,
            rules,
            writeback,
        } = activation.clone();
        let on_panic = {
            let interrupt = Arc::clone(&interrupt);
            move |message: &str| interrupt.needs_reset(message)
        };
        // Through a cell, so that the disk comes back if there is no thread to be had.
        let cell = QueueWorker::new((queue, disk), mem, interrupt, rules, writeback);
        let cell = Arc::new(Mutex::new(Some(cell)));
        let take =
            |cell: &Mutex<Option<QueueWorker>>| cell.lock().unwrap_or_else(PoisonError::into_inner).take();
        let theirs = Arc::clone(&cell);
        match Worker::spawn(&name, on_panic, move |stop| {
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

    /// Stops the workers, whose requests complete first, and takes back what they have.
    fn stop(&mut self) -> Vec<ActiveQueue> {
        let mut queues = Vec::new();
        for worker in self.workers.drain(..) {
            match worker.stop() {
                Ok(Some((queue, disk))) => {
                    self.disk[usize::from(queue.index)] = disk;
                    queues.push(queue);
                }
                Ok(None) => {}
                Err(error) => tracing::error!(device = self.name, %error, "a queue of the disk is lost"),
            }
        }
        queues
    }
}

/// What all workers of an activation get.
#[derive(Clone)]
struct Common {
    mem: husk_devices::GuestMem,
    interrupt: Arc<dyn husk_devices::virtio::VirtioInterrupt>,
    rules: Rules,
    writeback: Option<Arc<AtomicBool>>,
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
        config::features(&self.geometry, self.queues())
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn config_size(&self) -> u16 {
        config::CONFIG_SIZE as u16
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let space = config::space(
            &self.geometry,
            self.queues(),
            self.writeback.load(Ordering::Relaxed),
        );
        config_space::read(&space, offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if self.geometry.write_cache && offset == config::WRITEBACK_OFFSET && data.len() == 1 {
            self.writeback.store(data[0] & 1 != 0, Ordering::Relaxed);
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        if activation.queues.is_empty() {
            return Err(ActivateError::MissingQueue(0));
        }
        let (rules, writeback) = self.rules(activation.features);
        let common = Common {
            mem: activation.mem,
            interrupt: activation.interrupt,
            rules,
            writeback,
        };
        for queue in activation.queues {
            if let Err(error) = self.start(queue, &common) {
                self.stop();
                return Err(error);
            }
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.stop();
        self.writeback.store(self.geometry.write_cache, Ordering::Relaxed);
    }

    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>> {
        if self.workers.is_empty() {
            None
        } else {
            Some(self.stop())
        }
    }
}

#[cfg(test)]
mod tests {
    use husk_disk::{Cache, Options};

    use super::*;

    fn blk(options: Options) -> Blk {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        Blk::new(
            "x",
            Disk::open_raw(file.into(), options).unwrap(),
            "a serial that is too long",
        )
    }

    #[test]
    fn a_driver_that_cannot_flush_gets_durable_writes() {
        let blk = blk(Options::default());
        let (rules, writeback) = blk.rules(0);
        assert!(rules.durable && writeback.is_none());
        let (rules, writeback) = blk.rules(1 << VIRTIO_BLK_F_FLUSH);
        assert!(!rules.durable && writeback.is_some());
        assert_eq!((rules.capacity, rules.serial), (8, *b"a serial that is too"));
    }

    #[test]
    fn a_disk_without_a_cache_needs_no_help() {
        for options in [
            Options {
                cache: Cache::Writethrough,
                ..Options::default()
            },
            Options {
                read_only: true,
                ..Options::default()
            },
        ] {
            let blk = blk(options);
            assert!(!blk.rules(0).0.durable);
            assert_eq!(blk.features() & (1 << VIRTIO_BLK_F_FLUSH), 0);
        }
    }
}
