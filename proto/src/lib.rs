//! Husk's gRPC APIs, and the channel that carries file descriptors for them.

#![warn(missing_docs)]

mod disk_fault;
mod empty_drive;
pub mod fds;
pub mod services;

/// The API of a VM's monitor.
pub mod shim {
    /// Version 1.
    #[allow(missing_docs, unused_qualifications, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("husk.shim.v1");
    }
}

/// The API of a VMM, used by its monitor.
pub mod vmm {
    /// Version 1.
    #[allow(missing_docs, unused_qualifications, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("husk.vmm.v1");
    }
}
