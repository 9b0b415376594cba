//! Husk's gRPC contracts and the descriptor channel beside them.

/// The VMM's service, spoken by its monitor.
pub mod vmm {
    /// Version 1.
    #[allow(missing_docs, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("husk.vmm.v1");
    }
}
