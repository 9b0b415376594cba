//! Husk's gRPC contracts and the descriptor channel beside them.

mod disk_fault;
pub mod fds;

/// The service of one VM's monitor.
pub mod shim {
    /// Version 1.
    #[allow(missing_docs, unused_qualifications, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("husk.shim.v1");
    }
}

/// The VMM's service, spoken by its monitor.
pub mod vmm {
    /// Version 1.
    #[allow(missing_docs, unused_qualifications, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("husk.vmm.v1");
    }
}
