//! A queue driven through the transport. A real worker copies the device-readable to the device-writable bytes.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use husk_seccomp::ThreadRole;
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::{AvailRing, DescriptorTable, UsedRing};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmm_sys_util::eventfd::EventFd;

use super::fake::{Machine, VERSION_1, WINDOW, memory};
use crate::GuestMemMmap;
use crate::component::{Component, ComponentState, RestoreError, SaveError};
use crate::pci::PciDevice;
use crate::virtio::transport::BAR_SIZE;
use crate::virtio::{ActivateError, Activation, ActiveQueue, VirtioDevice};
use crate::worker::Worker;

const SIZE: u16 = 16;
const RINGS: [u64; 3] = [0x1000, 0x2000, 0x3000];
const EVENT_IDX: u64 = 1 << 29;
const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Default)]
struct Echo(Option<Worker<ActiveQueue>>);

impl VirtioDevice for Echo {
    fn name(&self) -> &str {
        "echo"
    }
    fn device_type(&self) -> u32 {
        42
    }
    fn pci_class(&self) -> [u8; 3] {
        [0xff, 0, 0]
    }
    fn features(&self) -> u64 {
        EVENT_IDX
    }
    fn queue_max_sizes(&self) -> &[u16] {
        &[SIZE]
    }
    fn read_config(&self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation {
            mem,
            interrupt,
            mut queues,
            ..
        } = activation;
        let mut active = queues.pop().ok_or(ActivateError::MissingQueue(0))?;
        let failed = interrupt.clone();
        let body = move |stop: &EventFd| {
            while !wait(&[stop.as_raw_fd(), active.kick.as_raw_fd()], TIMEOUT)[0] {
                _ = active.kick.read();
                let memory = mem.memory();
                while serve(&mut active.queue, &memory) {
                    if active.needs_notification(&memory) {
                        interrupt.signal_queue(0);
                    }
                }
            }
            active
        };
        self.0 = Some(Worker::spawn(
            ThreadRole::Rng,
            "echo",
            move |reason| failed.needs_reset(reason),
            body,
        )?);
        Ok(())
    }
    fn reset(&mut self) {
        self.0 = None;
    }
    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>> {
        Some(vec![self.0.take()?.stop().ok()?])
    }
    fn save(&mut self) -> Result<ComponentState, SaveError> {
        ComponentState::new(&())
    }
    fn restore(&mut self, state: &ComponentState, features: u64) -> Result<(), RestoreError> {
        assert_eq!(features, VERSION_1 | EVENT_IDX);
        state.parse()
    }
}

fn serve(queue: &mut Queue, mem: &GuestMemMmap) -> bool {
    _ = queue.disable_notification(mem);
    let Some(chain) = queue.iter(mem).unwrap().next() else {
        return queue.enable_notification(mem).unwrap();
    };
    let mut bytes = Vec::new();
    chain
        .clone()
        .reader(mem)
        .unwrap()
        .read_to_end(&mut bytes)
        .unwrap();
    let head = chain.head_index();
    chain.writer(mem).unwrap().write_all(&bytes).unwrap();
    queue.add_used(mem, head, bytes.len() as u32).unwrap();
    true
}

/// For each descriptor, true if it is readable.
fn wait<const N: usize>(fds: &[RawFd; N], limit: Duration) -> [bool; N] {
    let mut polled = fds.map(|fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    });
    let timeout = limit.as_millis() as i32;
    // SAFETY: N pollfds, alive for the call.
    unsafe { libc::poll(polled.as_mut_ptr(), N as libc::nfds_t, timeout) };
    polled.map(|fd| fd.revents & libc::POLLIN != 0)
}

/// The driver's side of the queue.
struct Driver<'a> {
    m: &'a Machine,
    mem: &'a GuestMemMmap,
    table: DescriptorTable<'a, GuestMemMmap>,
    avail: AvailRing<'a, GuestMemMmap>,
    used: UsedRing<'a, GuestMemMmap>,
    sent: u16,
}

impl<'a> Driver<'a> {
    fn start(m: &'a Machine, mem: &'a GuestMemMmap) -> Self {
        let [table, avail, used] = RINGS.map(GuestAddress);
        let table = DescriptorTable::new(mem, table, SIZE);
        let (avail, used) = (AvailRing::new(mem, avail, SIZE), UsedRing::new(mem, used, SIZE));
        m.enable();
        m.set_config(0x42, &[0, 0x80]);
        m.write(0x2000, &0xfee0_0000_u64.to_le_bytes());
        m.write(0x2008, &[0; 8]);
        assert!(m.negotiate(VERSION_1 | EVENT_IDX));
        m.queue(0, SIZE, RINGS);
        m.ready();
        Self {
            m,
            mem,
            table,
            avail,
            used,
            sent: 0,
        }
    }

    /// Makes a request available: four bytes to read, four to write.
    fn send(&mut self) {
        let (slot, at) = (
            self.sent % (SIZE / 2),
            0x8000 + u64::from(self.sent % (SIZE / 2)) * 8,
        );
        self.mem
            .write_obj(u32::from(self.sent) + 1, GuestAddress(at))
            .unwrap();
        let read = Descriptor::new(at, 4, 1, slot * 2 + 1);
        let write = Descriptor::new(at + 4, 4, 2, 0);
        self.table.store(slot * 2, RawDescriptor::from(read)).unwrap();
        self.table
            .store(slot * 2 + 1, RawDescriptor::from(write))
            .unwrap();
        let place = usize::from(self.sent % SIZE);
        self.avail.ring().ref_at(place).unwrap().store(slot * 2);
        self.sent += 1;
        self.avail.idx().store(self.sent);
    }

    fn notify(&self, bar: u64) {
        assert!(self.m.ioeventfds.ring(bar + 0x1000), "no exit");
    }

    /// Waits for the interrupt of the last request and checks the reply.
    fn receive(&self) {
        let line = self.m.msi.line(0);
        while self.used.idx().load() != self.sent {
            assert!(
                wait(&[line.trigger.as_raw_fd()], TIMEOUT)[0],
                "no interrupt for {}",
                self.sent
            );
            line.fired();
        }
        let at = 0x8000 + u64::from((self.sent - 1) % (SIZE / 2)) * 8;
        let echoed: u32 = self.mem.read_obj(GuestAddress(at + 4)).unwrap();
        assert_eq!(echoed, u32::from(self.sent));
        // Section 2.7.7.2: request the next interrupt for the next buffer.
        let used_event = RINGS[1] + 4 + 2 * u64::from(SIZE);
        self.mem.write_obj(self.sent, GuestAddress(used_event)).unwrap();
    }
}

#[test]
fn requests_complete_across_pause_and_bar_move() {
    let mut m = Machine::with_memory(Echo::default(), memory());
    let mem = m.mem.clone();
    let mem = mem.memory();
    let mut bar = WINDOW;
    let mut driver = Driver::start(&m, &mem);
    for round in 0..60 {
        let paused = matches!(round % 6, 1 | 5);
        if paused {
            m.pci.pause();
        }
        driver.send();
        match round % 6 {
            3 => {
                bar = if bar == WINDOW { WINDOW + BAR_SIZE } else { WINDOW };
                m.set_config(0x10, &bar.to_le_bytes());
                driver.notify(bar);
            }
            // No notification: the device finds buffers that became available during a pause.
            5 => {}
            _ => driver.notify(bar),
        }
        if paused {
            assert_eq!(driver.used.idx().load(), driver.sent - 1, "nobody serves it");
            m.pci.resume();
        }
        driver.receive();
    }
    drop(driver);
    m.bar = bar;
    m.write(0x14, &[0]);
    let mut driver = Driver::start(&m, &mem);
    driver.send();
    driver.notify(bar);
    driver.receive();
    assert!(!m.ioeventfds.violated.load(Ordering::Relaxed));
}

#[test]
fn requests_complete_across_save_and_restore_in_machines_that_are_built_anew() {
    let mem = memory();
    let guest = mem.memory();
    let old = Machine::with_memory(Echo::default(), mem.clone());
    let mut driver = Driver::start(&old, &guest);
    let machines: Vec<_> = (0..20)
        .map(|_| Machine::with_memory(Echo::default(), mem.clone()))
        .collect();
    for (round, new) in machines.iter().enumerate() {
        driver.send();
        if round % 3 == 0 {
            driver.notify(WINDOW);
            driver.receive();
        } else if round % 3 == 1 {
            // The interrupt is the old machine's or the new one's.
            driver.notify(WINDOW);
        }
        let state = driver.m.save();
        new.restore(&state).unwrap();
        let line = driver.m.msi.line(0);
        if line.fired() != 0 {
            new.msi.line(0).trigger.write(1).unwrap();
        }
        driver.m = new;
        new.pci.resume();
        driver.receive();
    }
}

#[test]
fn a_broken_ring_breaks_only_its_device() {
    let m = Machine::with_memory(Echo::default(), memory());
    let mem = m.mem.clone();
    let mem = mem.memory();
    let mut driver = Driver::start(&m, &mem);
    driver.send();
    driver.avail.idx().store(1000);
    driver.notify(WINDOW);
    for _ in 0..2000 {
        if m.status() == 0x4f {
            break;
        }
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(m.status(), 0x4f);
    drop(driver);
    m.write(0x14, &[0]);
    let mut driver = Driver::start(&m, &mem);
    driver.send();
    driver.notify(WINDOW);
    driver.receive();
}

/// A worker that raises interrupts without end, so that it always does so while it is being stopped.
struct Noise(Option<Worker<ActiveQueue>>);

impl VirtioDevice for Noise {
    fn name(&self) -> &str {
        "noise"
    }
    fn device_type(&self) -> u32 {
        42
    }
    fn pci_class(&self) -> [u8; 3] {
        [0xff, 0, 0]
    }
    fn features(&self) -> u64 {
        EVENT_IDX
    }
    fn queue_max_sizes(&self) -> &[u16] {
        &[SIZE]
    }
    fn read_config(&self, _: u64, _: &mut [u8]) {}
    fn activate(&mut self, mut activation: Activation) -> Result<(), ActivateError> {
        let active = activation.queues.remove(0);
        let interrupt = activation.interrupt;
        let body = move |stop: &EventFd| {
            while stop.read().is_err() {
                interrupt.signal_queue(0);
                interrupt.signal_config();
                interrupt.needs_reset("noise");
            }
            active
        };
        self.0 = Some(Worker::spawn(ThreadRole::Rng, "noise", |_| {}, body)?);
        Ok(())
    }
    fn reset(&mut self) {
        self.0 = None;
    }
    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>> {
        Some(vec![self.0.take()?.stop().ok()?])
    }
}

#[test]
fn stopping_a_worker_that_raises_interrupts_does_not_deadlock() {
    let (done, finished) = mpsc::channel();
    let runner = thread::spawn(move || {
        let m = Machine::with_memory(Noise(None), memory());
        let mem = m.mem.clone();
        let mem = mem.memory();
        let over = Arc::new(AtomicBool::new(false));
        let (pci, root, also_over) = (m.pci.clone(), m.root.clone(), over.clone());
        let others = thread::spawn(move || {
            while !also_over.load(Ordering::Relaxed) {
                pci.bar_read(0, 0, &mut [0; 4]);
                pci.bar_write(0, 0x2000, &[0; 4]);
                root.refresh();
            }
        });
        for _ in 0..50 {
            drop(Driver::start(&m, &mem));
            m.pci.pause();
            m.pci.resume();
            m.set_config(0x42, &[0, 0xc0]);
            m.set_config(0x42, &[0, 0x80]);
            m.write(0x14, &[0]);
        }
        over.store(true, Ordering::Relaxed);
        others.join().unwrap();
        done.send(()).unwrap();
    });
    finished
        .recv_timeout(TIMEOUT)
        .expect("everybody is still alive and nobody waits for ever");
    runner.join().unwrap();
}
