//! The agent's neighbours, played: an API server and the shim of a launcher pod.

pub mod api_server;
pub mod authority;
pub mod shim;
