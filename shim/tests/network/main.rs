//! A pod's network in real network namespaces: what a container network plugin would have made, what becomes of it, and
//! a guest that is this program, reading and writing frames at the tap.
//!
//! Needs root, `ip` and /dev/net/tun; where they lack, the tests say so and pass.

mod bridge;
mod dhcp;
mod guest;
mod masquerade;
mod pod;
mod record;
