//! Husk's gRPC contracts and the descriptor channel beside them.

pub mod fds;

/// The VMM's service, spoken by its monitor.
pub mod vmm {
    /// Version 1.
    #[allow(missing_docs, unused_qualifications, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("husk.vmm.v1");
    }
}
