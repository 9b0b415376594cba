//! Helpers that the tests of several crates share.

#![allow(missing_docs, reason = "a private crate")]

pub mod pod;
