//! A driver that does anything with a virtio-net device over sockets, control commands, and frames in both directions. The
//! device gives its queues back, its saved state fits a twin, and after a reset frames of a new driver pass.
#![no_main]

use husk_fuzz::virtio::{Program, net, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|program: Program<net::Setup, net::Request>| run::<net::NetBench>(program));
