//! A driver that does anything with a virtio-rng device. The device gives its queue back, and after a reset a new driver
//! gets random bytes.
#![no_main]

use husk_fuzz::virtio::{Program, rng, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|program: Program<(), rng::Request>| run::<rng::RngBench>(program));
