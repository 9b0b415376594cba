//! A pod's network in real network namespaces: what a container network plugin would have made, what becomes of it, and
//! a guest that is this program, reading and writing frames at the tap, or a namespace with udhcpc behind it.
//!
//! Needs `ip`, `nft`, busybox's udhcpc and /dev/net/tun, without which the tests fail, and root or user namespaces.

mod bridge;
mod dhcp;
mod guest_netns;
mod masquerade;
mod preflight;
mod raw_guest;
mod record;
mod renewal;
mod restore;
mod stack;
mod standalone;
