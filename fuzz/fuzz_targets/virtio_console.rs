//! A driver that does anything with a virtio-console device, control messages, and hosts that send and close. The device
//! gives its queues back, its saved state fits a twin, and after a reset bytes of a new driver arrive.
#![no_main]

use husk_fuzz::virtio::{Program, console, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|program: Program<(), console::Request>| run::<console::ConsoleBench>(program));
