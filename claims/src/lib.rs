//! The store of volumes on a machine without a cluster: each PersistentVolumeClaim is a sparse raw file.
//!
//! ```text
//! STORE/NAMESPACE/NAME/claim.yaml  the PersistentVolumeClaim, as a manifest
//! STORE/NAMESPACE/NAME/disk.img    the volume
//! STORE/.changes/UUID/             a claim that is being made or removed, locked by its process
//! STORE/.imports/NAMESPACE:NAME/   a volume that is being filled, locked by its process
//! ```
//!
//! A claim appears and disappears by one rename, after its data is on stable storage; what a power cut leaves in
//! `.changes` is removed at the next change; an import goes on with what is in its directory. Status is
//! never stored: size and use are those of the file.

mod claim;
mod copy;
mod error;
mod import;
mod store;

pub use claim::{Claim, NewClaim};
pub use error::ClaimError;
pub use import::Import;
pub use store::ClaimStore;
