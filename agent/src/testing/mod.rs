//! An API server, played, and certificates.

pub mod api_server;
pub mod authority;
