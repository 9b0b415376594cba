use proptest::prelude::*;
use vm_memory::GuestAddressSpace;
use vm_memory::mmap::MmapRegionBuilder;

use super::*;
use crate::GuestMem;
use crate::component::testing::{mutate, mutation};
use crate::virtio::testing::{Driver, Interrupts, WRITE, memory, wait_for};

const BASE: u64 = 0x10_0000;
const LIST: u64 = 0x1_0000;
const END: usize = 0x80_0000;
const GAP: u64 = 0x1_0000_0000;

struct Bench {
    mem: GuestMem,
    inflate: Driver,
    deflate: Driver,
    report: Driver,
    interrupts: Arc<Interrupts>,
    balloon: Balloon,
    handle: BalloonHandle,
}

fn bench(report_index: u16) -> Bench {
    bench_on(memory(&[(0, END), (GAP, END)]), report_index)
}

fn bench_on(mem: GuestMem, report_index: u16) -> Bench {
    let driver = |index, base| Driver::new(&mem, index, 16, base);
    let (inflate, deflate, report) = (driver(0, 0x1000), driver(1, 0x2000), driver(report_index, 0x3000));
    let (balloon, handle) = Balloon::new(true);
    let interrupts = Interrupts::new();
    let mut bench = Bench {
        mem,
        inflate,
        deflate,
        report,
        interrupts,
        balloon,
        handle,
    };
    let queues = [&bench.inflate, &bench.deflate, &bench.report]
        .map(|d| d.queue(false))
        .into();
    bench.activate(queues).unwrap();
    bench
}

impl Bench {
    fn activate(&mut self, queues: Vec<ActiveQueue>) -> Result<(), ActivateError> {
        let interrupt = Arc::clone(&self.interrupts) as _;
        self.balloon.activate(Activation {
            mem: self.mem.clone(),
            features: 0,
            queues,
            interrupt,
        })
    }

    fn dirty(&self, page: u64) {
        self.mem
            .memory()
            .write_obj(0xdead_beef_u32, GuestAddress(page * PAGE + 100))
            .unwrap();
    }

    fn is_dirty(&self, page: u64) -> bool {
        self.mem
            .memory()
            .read_obj::<u32>(GuestAddress(page * PAGE + 100))
            .unwrap()
            != 0
    }

    fn inflate(&mut self, pages: &[u32]) {
        let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        self.mem.memory().write_slice(&bytes, GuestAddress(LIST)).unwrap();
        self.inflate.add(&[(LIST, bytes.len() as u32, 0)]);
        self.inflate.kick();
        self.inflate.wait();
    }
}

#[test]
fn pages_put_into_the_balloon_are_dropped_and_no_others() {
    let mut bench = bench(2);
    let first = BASE / PAGE;
    for page in first..first + 700 {
        bench.dirty(page);
    }
    // Up, down, alone, twice, and more than is read at a time.
    let mut pages: Vec<u32> = vec![10, 11, 12, 30, 29, 28, 50, 50, 40];
    pages.extend(100..600);
    let pages: Vec<u32> = pages.iter().map(|page| page + first as u32).collect();
    bench.inflate(&pages);
    for page in first..first + 700 {
        assert_eq!(
            bench.is_dirty(page),
            !pages.contains(&(page as u32)),
            "page {}",
            page - first
        );
    }
    bench.deflate.add(&[(LIST, 4, 0)]);
    bench.deflate.kick();
    assert_eq!(bench.deflate.wait().1, 0);
}

#[test]
fn pages_that_do_not_exist_are_ignored() {
    let mut bench = bench(2);
    let last = (END as u64 / PAGE - 1) as u32;
    bench.dirty(u64::from(last));
    bench.dirty(GAP / PAGE);
    // A run across the end of a region, the hole, the last number there is, and a good one.
    bench.inflate(&[
        last,
        last + 1,
        0x9_0000,
        u32::MAX,
        u32::MAX - 1,
        (GAP / PAGE) as u32,
    ]);
    assert!(bench.is_dirty(u64::from(last)), "not wholly inside a region");
    assert!(!bench.is_dirty(GAP / PAGE));
    assert_eq!(bench.interrupts.reset(), None);
    // Half a number is none.
    bench.inflate.add(&[(LIST, 3, 0)]);
    bench.inflate.kick();
    bench.inflate.wait();
}

#[test]
fn reported_free_pages_are_dropped() {
    // The index in the specification, and the index used by drivers that number queues without gaps.
    for index in [4, 2] {
        let mut bench = bench(index);
        for page in 0..1024 {
            bench.dirty(BASE / PAGE + page);
        }
        bench
            .report
            .add(&[(BASE, 0x20_0000, WRITE), (BASE + 0x20_1000, 0x1000, WRITE)]);
        bench.report.kick();
        bench.report.wait();
        for page in 0..1024 {
            let dropped = page < 512 || page == 513;
            assert_eq!(bench.is_dirty(BASE / PAGE + page), !dropped, "page {page}");
        }
    }
}

#[test]
fn reports_of_partial_pages_are_ignored() {
    let mut bench = bench(2);
    let end = END as u64;
    bench.dirty(BASE / PAGE);
    bench.dirty(end / PAGE - 1);
    for bad in [
        (BASE + 1, 4096, WRITE),
        (BASE, 4095, WRITE),
        (end - PAGE, 8192, WRITE),
        (u64::MAX - 4095, 4096, WRITE),
    ] {
        bench.report.add(&[bad, (end, 4096, WRITE), (BASE, 0, WRITE)]);
        bench.report.kick();
        bench.report.wait();
    }
    // Not for the device to write: no report.
    bench.report.add(&[(BASE, 4096, 0)]);
    bench.report.kick();
    bench.report.wait();
    assert!(bench.is_dirty(BASE / PAGE) && bench.is_dirty(end / PAGE - 1));
}

fn special_memory(hugetlb: bool) -> GuestMem {
    let builder = MmapRegionBuilder::new_with_bitmap(END, vm_memory::bitmap::AtomicBitmap::default())
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_ANONYMOUS | libc::MAP_SHARED)
        .with_hugetlbfs(hugetlb);
    let region = vm_memory::GuestRegionMmap::new(builder.build().unwrap(), GuestAddress(0)).unwrap();
    GuestMem::new(GuestMemMmap::from_regions(vec![region]).unwrap())
}

#[test]
fn shared_memory_is_freed_and_reserved_huge_pages_are_kept() {
    for hugetlb in [false, true] {
        let mut bench = bench_on(special_memory(hugetlb), 2);
        bench.dirty(BASE / PAGE);
        bench.inflate(&[(BASE / PAGE) as u32]);
        assert_eq!(bench.is_dirty(BASE / PAGE), hugetlb);
    }
}

#[test]
fn pages_of_a_private_file_read_as_zeroes_and_not_as_the_file() {
    let file = tempfile::tempfile().unwrap();
    std::io::copy(
        &mut std::io::Read::take(std::io::repeat(0xab), END as u64),
        &mut &file,
    )
    .unwrap();
    let builder = MmapRegionBuilder::new_with_bitmap(END, vm_memory::bitmap::AtomicBitmap::default())
        .with_file_offset(vm_memory::FileOffset::new(file, 0))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_PRIVATE);
    let region = vm_memory::GuestRegionMmap::new(builder.build().unwrap(), GuestAddress(0)).unwrap();
    let mem = GuestMem::new(GuestMemMmap::from_regions(vec![region]).unwrap());
    // The rings are in this memory, too.
    mem.memory().write_slice(&[0; 0x8000], GuestAddress(0)).unwrap();
    let mut bench = bench_on(mem, 2);
    let first = BASE / PAGE;
    bench.dirty(first + 1);
    // The second time, one of the pages is replaced already.
    for pages in [vec![first + 1], vec![first + 1, first + 2], vec![first + 2]] {
        let numbers: Vec<u32> = pages.iter().map(|page| *page as u32).collect();
        bench.inflate(&numbers);
        for page in pages {
            assert!(!bench.is_dirty(page), "page {page}");
            bench.dirty(page);
        }
    }
    assert!(bench.is_dirty(first) && bench.is_dirty(first + 3));
}

#[test]
fn a_page_list_outside_of_memory_sets_device_needs_reset() {
    let mut bench = bench(2);
    bench.inflate.add(&[(GAP - 4, 16, 0)]);
    bench.inflate.kick();
    wait_for("a reset", || bench.interrupts.reset());
    bench.balloon.reset();
}

#[test]
fn a_page_list_without_an_end_sets_device_needs_reset() {
    let mut bench = bench(2);
    let most = (MAX_NUMBERS * 4) as u32;
    bench.inflate.add(&[(LIST, most, 0)]);
    bench.inflate.kick();
    bench.inflate.wait();
    // The same list again and again.
    bench.inflate.add(&[(LIST, most, 0), (LIST, 4, 0)]);
    bench.inflate.kick();
    wait_for("a reset", || bench.interrupts.reset());
    bench.balloon.reset();
}

fn target(balloon: &Balloon) -> u32 {
    let mut bytes = [0; 4];
    balloon.read_config(0, &mut bytes);
    u32::from_le_bytes(bytes)
}

#[test]
fn the_host_sets_the_target_and_the_guest_reports_the_size() {
    let mut bench = bench(2);
    bench.handle.set_target(5 * PAGE + 7);
    assert_eq!((target(&bench.balloon), bench.handle.target()), (5, 5 * PAGE));
    assert_eq!(bench.interrupts.config(), 1);
    bench.balloon.write_config(0, &9u32.to_le_bytes());
    bench.balloon.write_config(4, &[1, 2]);
    assert_eq!(
        (target(&bench.balloon), bench.handle.actual()),
        (5, 0),
        "not the driver's to write"
    );
    bench.balloon.write_config(4, &3u32.to_le_bytes());
    assert_eq!(bench.handle.actual(), 3 * PAGE);
    let mut all = [0xff; 24];
    bench.balloon.read_config(2, &mut all);
    assert_eq!((all[0], all[2], all[10]), (0, 3, 0));
    // Once more without a worker; then with no driver at all, the target stays.
    let queues = bench.balloon.quiesce().unwrap();
    bench.handle.set_target(u64::MAX);
    assert_eq!(
        (queues.len(), bench.interrupts.config(), target(&bench.balloon)),
        (3, 2, u32::MAX)
    );
    bench.balloon.reset();
    bench.handle.set_target(PAGE);
    assert_eq!(
        (
            bench.interrupts.config(),
            target(&bench.balloon),
            bench.handle.actual()
        ),
        (2, 1, 0)
    );
}

#[test]
fn activation_needs_both_queues() {
    let mut bench = bench(2);
    let mut queues = bench.balloon.quiesce().unwrap();
    queues.remove(1);
    assert!(matches!(
        bench.activate(queues),
        Err(ActivateError::MissingQueue(1))
    ));
    let (plain, _handle) = Balloon::new(false);
    assert_eq!(
        (plain.queue_max_sizes().len(), plain.features()),
        (2, F_DEFLATE_ON_OOM)
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn hostile_rings_are_survived(
        table in prop::collection::vec((0u64..0x90_0000, 0u32..0x2_0000, 0u16..8, 0u16..20), 16),
        heads in prop::collection::vec((0u8..3, 0u16..20), 0..40),
    ) {
        let mut bench = bench(4);
        let Bench { inflate, deflate, report, .. } = &mut bench;
        for driver in [&*inflate, &*deflate, &*report] {
            for (at, (address, len, flags, next)) in (0..).zip(&table) {
                // Not the rings: they may hold anything but must not change during the test.
                driver.put(at, ((*address).max(0x8000), *len, *flags), *next);
            }
        }
        for (queue, head) in heads {
            [&mut *inflate, &mut *deflate, &mut *report][usize::from(queue)].offer(head);
        }
        for driver in [inflate, deflate, report] {
            driver.kick();
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
        bench.balloon.reset();
    }

    /// Guest and host see the same sizes and pages if the device is saved and restored into a new device.
    #[test]
    fn a_restored_balloon_continues(steps in prop::collection::vec((0..4_u8, 0..64_u32, any::<bool>()), 1..30)) {
        let run = |save: bool| {
            let mut bench = bench(4);
            let mut seen = Vec::new();
            for (what, pages, now) in &steps {
                match what {
                    0 => bench.handle.set_target(u64::from(*pages) * PAGE),
                    1 => bench.balloon.write_config(ACTUAL_OFFSET, &pages.to_le_bytes()),
                    _ => {
                        let page = (BASE / PAGE) as u32 + pages;
                        bench.dirty(page.into());
                        bench.inflate(&[page]);
                        seen.push(u64::from(bench.is_dirty(page.into())));
                    }
                }
                if save && *now {
                    let queues = bench.balloon.quiesce().unwrap();
                    let state = bench.balloon.save().unwrap();
                    let text = serde_json::to_string(&state).unwrap();
                    (bench.balloon, bench.handle) = Balloon::new(true);
                    bench.balloon.restore(&serde_json::from_str(&text).unwrap(), 0).unwrap();
                    assert_eq!(bench.balloon.save().unwrap(), state);
                    bench.activate(queues).unwrap();
                }
                let mut config = [0; CONFIG_SIZE];
                bench.balloon.read_config(0, &mut config);
                seen.extend(config.map(u64::from));
                seen.extend([bench.handle.target(), bench.handle.actual()]);
            }
            seen
        };
        prop_assert_eq!(run(false), run(true));
    }

    #[test]
    fn a_hostile_state_is_refused_or_harmless(changes in prop::collection::vec(mutation(), 1..4)) {
        let (mut balloon, handle) = Balloon::new(false);
        handle.set_target(7 * PAGE);
        let fresh = balloon.save().unwrap();
        let mut state = fresh.clone();
        changes.iter().for_each(|(place, change)| mutate(&mut state, *place, change));
        if balloon.restore(&state, 0).is_err() {
            prop_assert_eq!(balloon.save().unwrap(), fresh);
        }
        balloon.read_config(0, &mut [0; CONFIG_SIZE]);
        handle.set_target(u64::MAX);
    }
}
