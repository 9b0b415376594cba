//! A pod's network in real network namespaces: what a container network plugin would have made, what becomes of it, and
//! a guest that is this program, reading and writing frames at the tap, or a namespace with udhcpc behind it.
//!
//! Needs root, `ip` and /dev/net/tun, and in part busybox; where they lack, the tests say so and pass.

mod bridge;
mod dhcp;
mod guest;
mod machine;
mod masquerade;
mod pod;
mod record;
mod stack;
