//! VMs under KubeVirt's stock control plane, by `kubectl` and `virtctl` alone.

pub mod hotplug;
pub mod life;
