//! End-to-end tests: real guests in VMs that are started by the `husk` command, as a user starts them.
//!
//! The binary `husk-e2e` runs them, inside the lab or on a machine that runs guests natively. Each of [`cases`] is
//! one test; [`harness`] is what they have in common.

pub mod cases;
pub mod harness;
