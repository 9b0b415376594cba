//! VMs under KubeVirt's stock control plane, by `kubectl` and `virtctl` alone.

pub mod access;
pub mod debian;
pub mod end;
pub mod examples;
pub mod guest_agent;
pub mod hotplug;
pub mod kills;
pub mod life;
pub mod network;
pub mod node;
pub mod sets;
pub mod snapshot;
pub mod vsock;
