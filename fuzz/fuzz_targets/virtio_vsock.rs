//! A driver that does anything with a virtio-vsock device, packets with any header, and a host that answers and connects.
//! The device gives its queues back, and after a reset a new driver has a connection.
#![no_main]

use husk_fuzz::virtio::{Program, run, vsock};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|program: Program<(), vsock::Request>| run::<vsock::VsockBench>(program));
