//! End-to-end tests: real guests in VMs that the `husk` command starts, as a user starts them.
//!
//! The binary `husk-e2e` runs them, inside the lab or on a machine that runs guests natively. Each of [`cases`] is one
//! test; [`harness`] is their common code.

pub mod cases;
/// Runs commands as `cargo xtask` does; the tests are a separate crate.
#[path = "../../xtask/src/finish.rs"]
mod finish;
pub mod harness;
