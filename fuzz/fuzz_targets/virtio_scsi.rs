//! A driver that does anything with a virtio-scsi controller, requests with known and unknown CDBs, and a host that changes
//! units and media. The controller gives its queues back, its saved state fits a twin, and after a reset a new driver
//! reads what it writes.
#![no_main]

use husk_fuzz::virtio::{Program, run, scsi};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|program: Program<scsi::Setup, scsi::Request>| run::<scsi::ScsiBench>(program));
