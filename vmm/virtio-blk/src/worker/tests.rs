//! The worker with a disk that completes requests on command.

use std::sync::Mutex;
use std::sync::atomic::AtomicI32;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use husk_devices::virtio::testing::{Driver, Interrupts, WRITE, memory, wait_for};
use husk_devices::{GuestMem, GuestMemMmap};
use husk_disk::testing::{BackendScript, CallKind, RecordedCall};
use husk_disk::{DiskOptions, ErrorPolicy};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;
use crate::request::SERIAL_LEN;

const DATA: u64 = 0x10_0000;
const HEADERS: u64 = 0x1_0000;
const STATUSES: u64 = 0x2_0000;
const SIZE: u16 = 32;

struct Bench {
    mem: GuestMem,
    driver: Driver,
    interrupts: Arc<Interrupts>,
    disk: Disk,
    script: BackendScript,
    stop: EventFd,
    stops: Arc<Mutex<Vec<io::Error>>>,
    /// Scheduling policy of the worker at the last of them.
    policy: Arc<AtomicI32>,
    writeback: Arc<AtomicBool>,
    thread: Option<JoinHandle<StoppedQueue>>,
    requests: u64,
}

fn bench(event_idx: bool, depth: u16) -> Bench {
    bench_with(event_idx, depth, ErrorPolicy::Report)
}

fn bench_with(event_idx: bool, depth: u16, error_policy: ErrorPolicy) -> Bench {
    let mem = memory(&[(0, 0x40_0000)]);
    let file = tempfile::tempfile_in("/var/tmp").unwrap();
    file.set_len(1 << 29).unwrap();
    let options = DiskOptions {
        error_policy,
        ..DiskOptions::default()
    };
    let disk = Disk::open_raw(file.into(), options).unwrap();
    let (engine, script) = BackendScript::engine(depth);
    let queue_io = QueueIo::new(engine, &disk).unwrap();
    let driver = Driver::new(&mem, 0, SIZE, 0x1000);
    let mut bench = Bench {
        driver,
        mem,
        interrupts: Interrupts::new(),
        disk,
        script,
        stop: EventFd::new(EFD_NONBLOCK).unwrap(),
        stops: Arc::default(),
        policy: Arc::new(AtomicI32::new(-1)),
        writeback: Arc::new(AtomicBool::new(true)),
        thread: None,
        requests: 0,
    };
    let queue = bench.driver.queue(event_idx);
    bench.run((queue, queue_io));
    bench
}

impl Bench {
    fn run(&mut self, parts: (ActiveQueue, QueueIo)) {
        let (stops, policy) = (Arc::clone(&self.stops), Arc::clone(&self.policy));
        let context = WorkerContext {
            mem: self.mem.clone(),
            interrupt: Arc::clone(&self.interrupts) as _,
            disk: self.disk.clone(),
            limits: RequestLimits {
                capacity: 0,
                block: 1,
                max_range: 1 << 10,
                read_only: false,
                durable: false,
                serial: [0; SERIAL_LEN],
            },
            writeback: Some(Arc::clone(&self.writeback)),
            on_io_stop: Arc::new(move |error| {
                // SAFETY: asks for the calling thread's policy.
                policy.store(unsafe { libc::sched_getscheduler(0) }, Ordering::SeqCst);
                stops.lock().unwrap().push(error);
            }),
        };
        let worker = QueueWorker::new(parts, context);
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

    fn submitted(&self, count: usize) -> Vec<RecordedCall> {
        wait_for("requests at the disk", || {
            let made = self.script.made();
            (made.len() >= count).then_some(made)
        })
    }

    fn done(&self, done: &[u16]) {
        for tag in done {
            self.script.finish(*tag, Ok(()));
        }
    }

    fn status(&self, at: u64) -> u8 {
        self.mem.memory().read_obj(GuestAddress(at)).unwrap()
    }

    fn stopped(&mut self) -> StoppedQueue {
        self.thread.take().unwrap().join().unwrap()
    }
}

/// Waits long enough for a worker to misbehave.
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
    assert_eq!(submitted[1].what, CallKind::Sync);
    bench.done(&[submitted[0].tag]);
    assert_ne!(bench.driver.wait().0, flush);
    settle();
    assert_eq!((bench.driver.used(), bench.status(status)), (None, 0xff));
    bench.done(&[submitted[1].tag]);
    assert_eq!((bench.driver.wait().0, bench.status(status)), (flush, 0));
    bench.stop.write(1).unwrap();
    bench.stopped();
}

#[test]
fn stopping_waits_for_requests_in_flight_and_takes_no_new_ones() {
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
    bench.done(&[submitted[2].tag]);
    bench.script.finish(submitted[0].tag, Err(libc::ENOSPC));
    settle();
    assert!(!bench.thread.as_ref().unwrap().is_finished());
    bench.done(&[submitted[1].tag]);
    let (queue, queue_io) = bench.stopped();
    assert_eq!(
        (bench.driver.wait(), bench.driver.wait(), bench.driver.wait()),
        ((6, 4097), (0, 0), (3, 4097))
    );
    assert_eq!(bench.driver.used(), None);
    assert_eq!([0, 1, 2].map(|i| bench.status(STATUSES + i)), [1, 0, 0]);
    assert!(bench.interrupts.queue() > 0);
    // The new worker continues with the fourth request.
    bench.stop.read().unwrap();
    bench.run((queue, queue_io.unwrap()));
    let fourth = bench.submitted(4)[3].tag;
    bench.done(&[fourth]);
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
    let tags: Vec<_> = bench.submitted(10).iter().map(|made| made.tag).collect();
    // The driver wants an interrupt for the fifth.
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
fn the_driver_notifies_only_while_the_device_waits() {
    for event_idx in [false, true] {
        let mut bench = bench(event_idx, 2);
        settle();
        for _ in 0..5 {
            bench.add(1, &[(DATA, 512, 0)]);
        }
        assert!(bench.driver.wants_kick(event_idx, 0));
        bench.driver.kick();
        for answered in 0..8 {
            // No more requests than the disk takes, and no notification for the rest.
            let submitted = bench.submitted((answered + 2).min(8));
            settle();
            assert_eq!(bench.script.made().len(), submitted.len());
            if answered < 3 {
                bench.add(1, &[(DATA, 512, 0)]);
                assert!(
                    !bench.driver.wants_kick(event_idx, 5 + answered as u16),
                    "{event_idx} {answered}"
                );
            }
            bench.done(&[submitted[answered].tag]);
            bench.driver.wait();
        }
        settle();
        bench.add(1, &[(DATA, 512, 0)]);
        assert!(bench.driver.wants_kick(event_idx, 8));
        bench.driver.kick();
        let tag = bench.submitted(9)[8].tag;
        bench.done(&[tag]);
        bench.driver.wait();
        bench.stop.write(1).unwrap();
        bench.stopped();
    }
}

#[test]
fn the_drivers_cache_mode_makes_writes_durable() {
    let mut bench = bench(true, 8);
    for (count, writeback) in [(1, true), (2, false), (4, true)] {
        bench.writeback.store(writeback, Ordering::Relaxed);
        bench.add(1, &[(DATA, 512, 0)]);
        bench.driver.kick();
        let RecordedCall { tag, what, .. } = bench.submitted(count).pop().unwrap();
        let (offset, len, durable) = (0, 512, false);
        assert_eq!(what, CallKind::Write { offset, len, durable });
        bench.done(&[tag]);
        if !writeback {
            // Through the page cache, a sync makes the write durable.
            let RecordedCall { tag, what, .. } = bench.submitted(count + 1).pop().unwrap();
            assert_eq!(what, CallKind::Sync);
            bench.done(&[tag]);
        }
        bench.driver.wait();
    }
    bench.stop.write(1).unwrap();
    bench.stopped();
}

#[test]
fn transfers_are_bounded() {
    let mut bench = bench(true, 8);
    // The same buffer several times.
    let most = [(DATA, 2 << 20, WRITE); 16];
    let (_, refused) = bench.add(0, &[&most[..], &[(DATA, 512, WRITE)]].concat());
    bench.driver.kick();
    bench.driver.wait();
    assert_eq!(bench.status(refused), 1);
    bench.add(0, &most);
    bench.driver.kick();
    let made = bench.submitted(1);
    assert_eq!(made.len(), 1);
    bench.done(&[made[0].tag]);
    bench.driver.wait();
    bench.stop.write(1).unwrap();
    bench.stopped();
}

#[test]
fn memory_is_mapped_until_the_disk_is_closed() {
    let mut bench = bench(true, 8);
    let old = Arc::downgrade(&bench.mem.memory().into_inner());
    bench.add(0, &[(DATA, 512, WRITE)]);
    bench.driver.kick();
    let tag = bench.submitted(1)[0].tag;
    // The machine's memory changes: the same regions and one more.
    let more = GuestMemMmap::from_ranges(&[(GuestAddress(0x1000_0000), 0x1000)]).unwrap();
    let regions = old.upgrade().unwrap();
    let region = more.remove_region(GuestAddress(0x1000_0000), 0x1000).unwrap().1;
    let grown = regions.insert_region(region).unwrap();
    drop(regions);
    bench.mem.lock().unwrap().replace(grown);
    settle();
    assert!(old.upgrade().is_some());
    bench.done(&[tag]);
    bench.driver.wait();
    wait_for("the old map's end", || old.upgrade().is_none().then_some(()));
    bench.stop.write(1).unwrap();
    bench.stopped();
}

#[test]
fn a_broken_disk_sets_device_needs_reset() {
    let mut bench = bench(true, 8);
    bench.script.break_down();
    bench.add(0, &[(DATA, 512, WRITE)]);
    bench.driver.kick();
    let (queue, queue_io) = bench.stopped();
    assert!(bench.interrupts.reset().unwrap().starts_with("disk: "));
    assert!(queue_io.is_none() && bench.script.is_dropped());
    assert_eq!(queue.index, 0);
}

#[test]
fn a_pause_and_a_reset_do_not_wait_for_zeroes() {
    const PIECE: u64 = 256 << 10;
    for reset in [false, true] {
        let mut bench = bench(true, 8);
        // Two pieces.
        let range = [&[0; 8][..], &1024u32.to_le_bytes(), &[0; 4]].concat();
        let mem = bench.mem.memory();
        mem.write_slice(&range, GuestAddress(DATA)).unwrap();
        let (head, status) = bench.add(13, &[(DATA, 16, 0)]);
        bench.driver.kick();
        let allocate = bench.submitted(1)[0];
        bench.script.finish(allocate.tag, Err(libc::EOPNOTSUPP));
        let first = bench.submitted(2)[1];
        bench.stop.write(1).unwrap();
        settle();
        bench.done(&[first.tag]);
        let (queue, queue_io) = bench.stopped();
        let mut queue_io = queue_io.unwrap();
        assert_eq!((bench.driver.used(), bench.status(status)), (None, 0xff));
        assert_eq!(queue_io.held(), [head], "a snapshot has it");
        if reset {
            queue_io.abandon().unwrap();
            assert_eq!((queue_io.held(), bench.script.made().len()), (vec![], 2));
            continue;
        }
        bench.stop.read().unwrap();
        bench.run((queue, queue_io));
        let second = bench.submitted(3)[2];
        let (offset, len, durable) = (PIECE, PIECE, false);
        assert_eq!(second.what, CallKind::Write { offset, len, durable });
        bench.done(&[second.tag]);
        assert_eq!((bench.driver.wait().0, bench.status(status)), (head, 0));
        bench.stop.write(1).unwrap();
        bench.stopped();
    }
}

#[test]
fn a_held_request_outlives_a_pause() {
    let mut bench = bench_with(true, 8, ErrorPolicy::Stop);
    let (first, status) = bench.add(0, &[(DATA, 4096, WRITE)]);
    let (second, _) = bench.add(1, &[(DATA + 4096, 512, 0)]);
    bench.driver.kick();
    let tags = bench.submitted(2);
    bench.script.finish(tags[0].tag, Err(libc::EIO));
    wait_for("the owner's call", || {
        (bench.stops.lock().unwrap().len() == 1).then_some(())
    });
    // Another request succeeds, and a second failure is not reported.
    bench.done(&[tags[1].tag]);
    assert_eq!(bench.driver.wait().0, second);
    bench.add(4, &[]);
    bench.driver.kick();
    let flush = bench.submitted(3)[2];
    bench.script.finish(flush.tag, Err(libc::EIO));
    settle();
    assert_eq!((bench.driver.used(), bench.status(status)), (None, 0xff));
    bench.stop.write(1).unwrap();
    let (queue, queue_io) = bench.stopped();
    assert_eq!(bench.script.made().len(), 3);
    bench.stop.read().unwrap();
    bench.run((queue, queue_io.unwrap()));
    let again = bench.submitted(5);
    assert_eq!([again[3], again[4]], [tags[0], flush]);
    // The retry fails once more.
    bench.script.finish(flush.tag, Err(libc::EIO));
    bench.done(&[tags[0].tag]);
    assert_eq!((bench.driver.wait(), bench.status(status)), ((first, 4097), 0));
    wait_for("the owner's second call", || {
        (bench.stops.lock().unwrap().len() == 2).then_some(())
    });
    bench.stop.write(1).unwrap();
    let (_, queue_io) = bench.stopped();
    // A reset drops held requests.
    let mut queue_io = queue_io.unwrap();
    queue_io.abandon().unwrap();
    assert_eq!(bench.script.made().len(), 5);
    assert_eq!(bench.driver.used(), None);
}

#[test]
fn the_worker_keeps_pace() {
    let mut bench = bench_with(true, 8, ErrorPolicy::Stop);
    let mut made = 0;
    for _ in 0..40 {
        bench.add(0, &[(DATA, 512, WRITE)]);
        bench.driver.kick();
        made += 1;
        let tag = bench.submitted(made)[made - 1].tag;
        bench.done(&[tag]);
        bench.driver.wait();
    }
    // The worker preempts the waking thread now. An error tells under which policy it runs.
    bench.add(0, &[(DATA, 512, WRITE)]);
    bench.driver.kick();
    let submitted = bench.submitted(made + 1);
    bench.script.finish(submitted[made].tag, Err(libc::EIO));
    wait_for("the owner's call", || {
        (bench.stops.lock().unwrap().len() == 1).then_some(())
    });
    assert_eq!(bench.policy.load(Ordering::SeqCst), libc::SCHED_OTHER);
}
