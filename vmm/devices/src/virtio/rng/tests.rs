use std::sync::Arc;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::{ActivateError, Activation, ActiveQueue, Rng, VirtioDevice};
use crate::GuestMem;
use crate::component::testing::{mutate, mutation};
use crate::virtio::testing::{Driver, Interrupts, WRITE, memory, wait_for};

const QUEUE: u64 = 0x1000;
const DATA: u64 = 0x10_0000;
const END: usize = 0x40_0000;

struct Bench {
    mem: GuestMem,
    driver: Driver,
    interrupts: Arc<Interrupts>,
    rng: Rng,
}

fn bench() -> Bench {
    let mem = memory(&[(0, END)]);
    let driver = Driver::new(&mem, 0, 16, QUEUE);
    let mut bench = Bench {
        mem,
        driver,
        interrupts: Interrupts::new(),
        rng: Rng::new(),
    };
    let queue = bench.driver.queue(false);
    bench.activate(vec![queue]).unwrap();
    bench
}

impl Bench {
    fn activate(&mut self, queues: Vec<ActiveQueue>) -> Result<(), ActivateError> {
        let interrupt = Arc::clone(&self.interrupts) as _;
        self.rng.activate(Activation {
            mem: self.mem.clone(),
            features: 0,
            queues,
            interrupt,
        })
    }

    fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mem
            .memory()
            .read_slice(&mut bytes, GuestAddress(at))
            .unwrap();
        bytes
    }

    fn get(&mut self, descriptors: &[(u64, u32, u16)]) -> u32 {
        let head = self.driver.add(descriptors);
        self.driver.kick();
        let (used, len) = self.driver.wait();
        assert_eq!(used, head);
        len
    }
}

#[test]
fn writable_buffers_are_filled_and_nothing_else() {
    let mut bench = bench();
    let len = bench.get(&[
        (DATA - 64, 64, 0),
        (DATA, 3000, WRITE),
        (DATA + 8192, 0, WRITE),
        (DATA + 4096, 96, WRITE),
    ]);
    assert_eq!(len, 3096);
    assert_eq!(bench.bytes(DATA - 64, 64), [0; 64], "a readable buffer");
    for (at, len) in [
        (DATA, 1000),
        (DATA + 1000, 1000),
        (DATA + 2000, 1000),
        (DATA + 4096, 96),
    ] {
        let zeroes = bench.bytes(at, len).iter().filter(|byte| **byte == 0).count();
        assert!(zeroes < len / 4, "{zeroes} zeroes of {len}");
    }
    assert_eq!(bench.bytes(DATA + 3000, 1096), [0; 1096]);
    assert_eq!(bench.bytes(DATA + 4192, 1000), [0; 1000]);
    wait_for("an interrupt", || (bench.interrupts.queue() == 1).then_some(()));
}

#[test]
fn one_request_gets_64_kib_at_most() {
    let mut bench = bench();
    assert_eq!(
        bench.get(&[(DATA, 0x8000, WRITE), (DATA + 0x8000, 0x10_0000, WRITE)]),
        0x1_0000
    );
    assert_eq!(bench.bytes(DATA + 0x1_0000, 4096), [0; 4096]);
}

#[test]
fn a_buffer_outside_of_memory_sets_device_needs_reset() {
    for bad in [
        (END as u64 - 10, 11, WRITE),
        (u64::MAX - 1, 4096, WRITE),
        (1 << 40, 1, WRITE),
    ] {
        let mut bench = bench();
        bench.driver.add(&[bad]);
        bench.driver.kick();
        wait_for("a reset", || bench.interrupts.reset());
        bench.rng.reset();
        // And a new driver finds it working.
        bench.driver = Driver::new(&bench.mem, 0, 16, QUEUE + 0x8000);
        let queue = bench.driver.queue(false);
        bench.activate(vec![queue]).unwrap();
        assert_eq!(bench.get(&[(DATA, 16, WRITE)]), 16);
    }
}

#[test]
fn a_quiesced_device_continues_where_it_stopped() {
    let mut bench = bench();
    assert_eq!(bench.get(&[(DATA, 16, WRITE)]), 16);
    let queues = bench.rng.quiesce().unwrap();
    assert!(bench.rng.quiesce().is_none());
    bench.driver.add(&[(DATA, 32, WRITE)]);
    assert_eq!((queues.len(), bench.driver.used()), (1, None));
    bench.activate(queues).unwrap();
    // Not kicked again: it looks by itself.
    assert_eq!(bench.driver.wait().1, 32);
    assert_eq!(bench.get(&[(DATA, 64, WRITE)]), 64);
}

#[test]
fn activation_needs_the_queue() {
    let mut bench = bench();
    bench.rng.reset();
    bench.rng.reset();
    assert!(matches!(
        bench.activate(Vec::new()),
        Err(ActivateError::MissingQueue(0))
    ));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// With any content of the rings, the device stops on request and writes only to memory in the chains.
    #[test]
    fn hostile_rings_are_survived(
        table in prop::collection::vec((0u64..0x50_0000, 0u32..0x2_0000, 0u16..8, 0u16..20), 16),
        heads in prop::collection::vec(0u16..20, 0..40),
        jump: Option<u16>,
    ) {
        let mut bench = bench();
        for (at, (address, len, flags, next)) in (0..).zip(table) {
            bench.driver.put(at, (address.max(0x8000), len, flags), next);
        }
        for head in heads {
            bench.driver.offer(head);
        }
        if let Some(jump) = jump {
            bench.driver.set_available(jump);
        }
        bench.driver.kick();
        std::thread::sleep(std::time::Duration::from_millis(2));
        bench.rng.reset();
    }

    /// The device serves each request once, also if it is saved and restored into a new device meanwhile.
    #[test]
    fn a_restored_device_continues(steps in prop::collection::vec((1..4_u16, any::<bool>(), any::<bool>()), 1..20)) {
        let mut bench = bench();
        for (requests, kick, save) in steps {
            for at in 0..requests {
                bench.driver.add(&[(DATA + 64 * u64::from(at), 64, WRITE)]);
            }
            if kick {
                bench.driver.kick();
            }
            if save {
                let queues = bench.rng.quiesce().unwrap();
                let text = serde_json::to_string(&bench.rng.save().unwrap()).unwrap();
                bench.rng = Rng::new();
                bench.rng.restore(&serde_json::from_str(&text).unwrap(), 0).unwrap();
                bench.activate(queues).unwrap();
            }
            bench.driver.kick();
            for _ in 0..requests {
                prop_assert_eq!(bench.driver.wait().1, 64);
            }
            prop_assert_eq!(bench.driver.used(), None);
        }
    }

    #[test]
    fn a_hostile_state_is_refused_or_harmless(changes in prop::collection::vec(mutation(), 1..4)) {
        let mut rng = Rng::new();
        let mut state = rng.save().unwrap();
        changes.iter().for_each(|(place, change)| mutate(&mut state, *place, change));
        let _ = rng.restore(&state, 0);
        let other = serde_json::json!({ "seed": 1 });
        prop_assert!(rng.restore(&other.into(), 0).is_err());
    }
}
