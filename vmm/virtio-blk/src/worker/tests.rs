//! The worker against a disk that completes when it is told to.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use husk_devices::virtio::testing::{Driver, Interrupts, WRITE, memory, wait_for};
use husk_devices::{GuestMem, GuestMemMmap};
use husk_disk::Buffer;
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;
use crate::device::SERIAL_LEN;

const DATA: u64 = 0x10_0000;
const HEADERS: u64 = 0x1_0000;
const STATUSES: u64 = 0x2_0000;
const SIZE: u16 = 32;

#[derive(Debug, Default)]
struct Inner {
    /// Tag, and what was asked.
    submitted: Vec<(u16, String)>,
    done: VecDeque<(u16, bool)>,
    broken: bool,
    dropped: bool,
}

#[derive(Debug)]
struct Held {
    inner: Arc<(Mutex<Inner>, Condvar)>,
    event: EventFd,
    depth: u16,
}

impl DiskQueue for Held {
    fn depth(&self) -> u16 {
        self.depth
    }

    unsafe fn submit(&mut self, tag: u16, request: Request<'_>) {
        let total = |buffers: &[Buffer]| buffers.iter().map(Buffer::len).sum::<usize>();
        let what = match request {
            Request::Read { offset, buffers } => format!("read {offset}+{}", total(buffers)),
            Request::Write {
                offset,
                buffers,
                durable,
            } => {
                format!(
                    "write {offset}+{}{}",
                    total(buffers),
                    if durable { " durable" } else { "" }
                )
            }
            other => format!("{other:?}"),
        };
        self.inner.0.lock().unwrap().submitted.push((tag, what));
    }

    fn kick(&mut self) -> io::Result<()> {
        if self.inner.0.lock().unwrap().broken {
            Err(io::ErrorKind::BrokenPipe.into())
        } else {
            Ok(())
        }
    }

    fn complete(&mut self) -> Option<Completion> {
        let (tag, ok) = self.inner.0.lock().unwrap().done.pop_front()?;
        let result = if ok {
            Ok(())
        } else {
            Err(io::ErrorKind::StorageFull.into())
        };
        Some(Completion { tag, result })
    }

    fn event(&self) -> &EventFd {
        &self.event
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.inner.0.lock().unwrap().dropped = true;
    }
}

struct Bench {
    mem: GuestMem,
    driver: Driver,
    interrupts: Arc<Interrupts>,
    inner: Arc<(Mutex<Inner>, Condvar)>,
    event: EventFd,
    stop: EventFd,
    writeback: Arc<AtomicBool>,
    thread: Option<JoinHandle<Parked>>,
    requests: u64,
}

fn bench(event_idx: bool, depth: u16) -> Bench {
    let mem = memory(&[(0, 0x40_0000)]);
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    let inner = Arc::<(Mutex<Inner>, Condvar)>::default();
    let held = Held {
        inner: Arc::clone(&inner),
        event: event.try_clone().unwrap(),
        depth,
    };
    let driver = Driver::new(&mem, 0, SIZE, 0x1000);
    let mut bench = Bench {
        driver,
        mem,
        interrupts: Interrupts::new(),
        inner,
        event,
        stop: EventFd::new(EFD_NONBLOCK).unwrap(),
        writeback: Arc::new(AtomicBool::new(true)),
        thread: None,
        requests: 0,
    };
    let queue = bench.driver.queue(event_idx);
    bench.run((queue, Box::new(held)));
    bench
}

impl Bench {
    fn run(&mut self, parts: (ActiveQueue, Box<dyn DiskQueue>)) {
        let rules = Rules {
            capacity: 1 << 20,
            read_only: false,
            durable: false,
            serial: [0; SERIAL_LEN],
        };
        let interrupt = Arc::clone(&self.interrupts) as _;
        let writeback = Some(Arc::clone(&self.writeback));
        let worker = QueueWorker::new(parts, self.mem.clone(), interrupt, rules, writeback);
        let stop = self.stop.try_clone().unwrap();
        self.thread = Some(thread::spawn(move || worker.run(&stop)));
    }

    fn add(&mut self, kind: u8, data: &[(u64, u32, u16)]) -> (u16, u64) {
        let (header, status) = (HEADERS + 16 * self.requests, STATUSES + self.requests);
        self.requests += 1;
        let mem = self.mem.memory();
        mem.write_slice(
            &[kind, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            GuestAddress(header),
        )
        .unwrap();
        mem.write_obj(0xffu8, GuestAddress(status)).unwrap();
        let head = self
            .driver
            .add(&[&[(header, 16, 0)], data, &[(status, 1, WRITE)]].concat());
        (head, status)
    }

    fn submitted(&self, count: usize) -> Vec<(u16, String)> {
        wait_for("requests at the disk", || {
            let submitted = &self.inner.0.lock().unwrap().submitted;
            (submitted.len() >= count).then(|| submitted.clone())
        })
    }

    fn done(&self, done: &[(u16, bool)]) {
        self.inner.0.lock().unwrap().done.extend(done);
        self.event.write(1).unwrap();
    }

    fn status(&self, at: u64) -> u8 {
        self.mem.memory().read_obj(GuestAddress(at)).unwrap()
    }

    fn stopped(&mut self) -> Parked {
        self.thread.take().unwrap().join().unwrap()
    }
}

/// Long enough for a worker to do what it should not.
fn settle() {
    thread::sleep(Duration::from_millis(30));
}

#[test]
fn a_flush_is_answered_when_the_disk_has_done_it() {
    let mut bench = bench(true, 8);
    bench.add(1, &[(DATA, 512, 0)]);
    let (flush, status) = bench.add(4, &[]);
    bench.driver.kick();
    let submitted = bench.submitted(2);
    assert_eq!(submitted[1].1, "Flush");
    bench.done(&[(submitted[0].0, true)]);
    assert_ne!(bench.driver.wait().0, flush);
    settle();
    assert_eq!((bench.driver.used(), bench.status(status)), (None, 0xff));
    bench.done(&[(submitted[1].0, true)]);
    assert_eq!((bench.driver.wait().0, bench.status(status)), (flush, 0));
    bench.stop.write(1).unwrap();
    bench.stopped();
}

#[test]
fn stopping_waits_for_what_is_in_flight_and_takes_nothing_new() {
    let mut bench = bench(false, 8);
    for _ in 0..3 {
        bench.add(0, &[(DATA, 4096, WRITE)]);
    }
    bench.driver.kick();
    let submitted = bench.submitted(3);
    bench.stop.write(1).unwrap();
    settle();
    bench.add(0, &[(DATA, 4096, WRITE)]);
    bench.driver.kick();
    settle();
    assert!(!bench.thread.as_ref().unwrap().is_finished());
    bench.done(&[(submitted[2].0, true), (submitted[0].0, false)]);
    settle();
    assert!(!bench.thread.as_ref().unwrap().is_finished());
    bench.done(&[(submitted[1].0, true)]);
    let (queue, disk) = bench.stopped();
    assert_eq!(
        (bench.driver.wait(), bench.driver.wait(), bench.driver.wait()),
        ((6, 4097), (0, 0), (3, 4097))
    );
    assert_eq!(bench.driver.used(), None);
    assert_eq!([0, 1, 2].map(|i| bench.status(STATUSES + i)), [1, 0, 0]);
    assert!(bench.interrupts.queue() > 0);
    // And goes on with the fourth.
    bench.stop.read().unwrap();
    bench.run((queue, disk.unwrap()));
    let fourth = bench.submitted(4)[3].0;
    bench.done(&[(fourth, true)]);
    assert_eq!(bench.driver.wait().0, 9);
    bench.stop.write(1).unwrap();
    bench.stopped();
}

#[test]
fn completions_together_make_one_interrupt() {
    let mut bench = bench(true, 16);
    for _ in 0..10 {
        bench.add(1, &[(DATA, 512, 0)]);
    }
    bench.driver.kick();
    let tags: Vec<_> = bench.submitted(10).iter().map(|(tag, _)| (*tag, true)).collect();
    // The driver wants to hear of the fifth.
    bench.driver.set_used_event(4);
    bench.done(&tags[..4]);
    for _ in 0..4 {
        bench.driver.wait();
    }
    settle();
    assert_eq!(bench.interrupts.queue(), 0);
    bench.done(&tags[4..]);
    for _ in 0..6 {
        bench.driver.wait();
    }
    settle();
    assert_eq!(bench.interrupts.queue(), 1);
    bench.stop.write(1).unwrap();
    bench.stopped();
}

#[test]
fn the_driver_is_asked_to_kick_only_when_we_wait_for_it() {
    for event_idx in [false, true] {
        let mut bench = bench(event_idx, 2);
        settle();
        for _ in 0..5 {
            bench.add(1, &[(DATA, 512, 0)]);
        }
        assert!(bench.driver.wants_kick(event_idx, 0));
        bench.driver.kick();
        for answered in 0..8 {
            // No more than the disk has room for, and no kick wanted for the rest.
            let submitted = bench.submitted((answered + 2).min(8));
            settle();
            assert_eq!(bench.inner.0.lock().unwrap().submitted.len(), submitted.len());
            if answered < 3 {
                bench.add(1, &[(DATA, 512, 0)]);
                assert!(
                    !bench.driver.wants_kick(event_idx, 5 + answered as u16),
                    "{event_idx} {answered}"
                );
            }
            bench.done(&[(submitted[answered].0, true)]);
            bench.driver.wait();
        }
        settle();
        bench.add(1, &[(DATA, 512, 0)]);
        assert!(bench.driver.wants_kick(event_idx, 8));
        bench.driver.kick();
        let tag = bench.submitted(9)[8].0;
        bench.done(&[(tag, true)]);
        bench.driver.wait();
        bench.stop.write(1).unwrap();
        bench.stopped();
    }
}

#[test]
fn the_drivers_cache_mode_makes_writes_durable() {
    let mut bench = bench(true, 8);
    for (count, writeback) in [(1, true), (2, false), (3, true)] {
        bench.writeback.store(writeback, Ordering::Relaxed);
        bench.add(1, &[(DATA, 512, 0)]);
        bench.driver.kick();
        let (tag, what) = bench.submitted(count).pop().unwrap();
        assert_eq!(
            what,
            if writeback {
                "write 0+512"
            } else {
                "write 0+512 durable"
            }
        );
        bench.done(&[(tag, true)]);
        bench.driver.wait();
    }
    bench.stop.write(1).unwrap();
    bench.stopped();
}

#[test]
fn memory_stays_mapped_while_the_disk_has_it() {
    let mut bench = bench(true, 8);
    let old = Arc::downgrade(&bench.mem.memory().into_inner());
    bench.add(0, &[(DATA, 512, WRITE)]);
    bench.driver.kick();
    let tag = bench.submitted(1)[0].0;
    // The machine's memory changes: the same regions and one more.
    let more = GuestMemMmap::from_ranges(&[(GuestAddress(0x1000_0000), 0x1000)]).unwrap();
    let regions = old.upgrade().unwrap();
    let region = more.remove_region(GuestAddress(0x1000_0000), 0x1000).unwrap().1;
    let grown = regions.insert_region(region).unwrap();
    drop(regions);
    bench.mem.lock().unwrap().replace(grown);
    settle();
    assert!(old.upgrade().is_some());
    bench.done(&[(tag, true)]);
    bench.driver.wait();
    wait_for("the old map's end", || old.upgrade().is_none().then_some(()));
    bench.stop.write(1).unwrap();
    bench.stopped();
}

#[test]
fn a_broken_disk_costs_the_device() {
    let mut bench = bench(true, 8);
    bench.inner.0.lock().unwrap().broken = true;
    bench.add(0, &[(DATA, 512, WRITE)]);
    bench.driver.kick();
    let (queue, disk) = bench.stopped();
    assert!(bench.interrupts.reset().unwrap().starts_with("disk: "));
    assert!(disk.is_none() && bench.inner.0.lock().unwrap().dropped);
    assert_eq!(queue.index, 0);
}
