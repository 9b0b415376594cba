//! A driver that does anything with a virtio-balloon device, and lists of pages. The device gives its queues back, and
//! after a reset it drops the page of a new driver and no other.
#![no_main]

use husk_fuzz::virtio::{Program, balloon, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|program: Program<balloon::Setup, balloon::Request>| run::<balloon::BalloonBench>(program));
