//! A driver that does anything with a virtio-blk device whose image is in memory, and requests with any header. The device
//! gives its queues back, its saved state fits a twin, and after a reset a new driver reads what it writes.
#![no_main]

use husk_fuzz::virtio::{Program, blk, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|program: Program<blk::Setup, blk::Request>| run::<blk::BlkBench>(program));
