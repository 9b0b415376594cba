//! Guests on networks: in namespaces with veth pairs, which represent pods that a container network plugin made.

pub mod bridge;
pub mod debian;
pub mod guest;
pub mod hotplug;
pub mod link_local;
pub mod masquerade;
pub mod soak;
pub mod ssh;
pub mod standalone;
pub mod wire;
