//! A pod's network in real network namespaces, with a guest that is this program at the tap, or a namespace with
//! udhcpc.
//!
//! Needs root, `ip`, `nft`, busybox's udhcpc and /dev/net/tun; ignored by default.

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
