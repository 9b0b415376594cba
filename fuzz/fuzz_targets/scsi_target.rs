//! Sequences of CDBs with data for one disk or CD-ROM drive, and changes by its host. Each step stays inside the medium and
//! the buffers, each command ends, and its response has the residual and the sense data that fit.
#![no_main]

use husk_fuzz::virtio::unit::{Program, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|program: Program| run(program));
