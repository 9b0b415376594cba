//! Pods as VMs, under real containerds.

pub mod agent;
pub mod ctr;
pub mod debian;
pub mod hotplug;
pub mod killed;
pub mod kubelet;
pub mod launcher;
pub mod nfs;
pub mod pod;
pub mod refused;
pub mod systemd;
