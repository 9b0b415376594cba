//! The parts of `husk-agent`, which `main.rs` puts together.

pub mod api_client;
pub mod device_plugin;
pub mod event;
pub mod monitoring;
pub mod node;
pub mod rest;
pub mod service;
#[cfg(test)]
mod testing;
pub mod vmi;
mod watching;
