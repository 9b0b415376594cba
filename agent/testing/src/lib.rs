//! The agent's neighbours on a node, played: the kubelet's device manager and the shims of launcher pods. The agent's
//! tests use them, and the program `husk-played-nodes` runs real agents among them.

pub mod device_manager;
pub mod shim;
