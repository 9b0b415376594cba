//! CDBs with data for a unit that passes them to a device of the host, and any answers of the device. No command that is
//! not allowed reaches the device, and each transfer fits the buffers.
#![no_main]

use husk_fuzz::virtio::lun::{Program, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|program: Program| run(program));
