//! The store of container images: what is unpacked of them, once for all VMs.
//!
//! ```text
//! STORE/names/HASH.json           a name, the digest of the manifest that it refers to, and when it was pulled
//! STORE/sha256-HEX/manifest.json  the image's manifest
//! STORE/sha256-HEX/sole-disk      path of the only file in the image's folder `disk`, if that was wanted
//! STORE/sha256-HEX/rootfs/        the files that were wanted of the image, under their paths in it
//! STORE/staging/sha256-HEX/       an image that is being pulled: an OCI layout and the files unpacked so far
//! STORE/staging/trash-N/          an image that is being removed
//! STORE/.lock                     held while something is put into the store, or what to remove is decided
//! ```
//!
//! An image appears under its digest by one rename, after all its data is on stable storage; a name is written after
//! that. So a power cut leaves complete images and staging, which the next pull continues and `prune` removes. Further
//! files of an image are added by a rename each. The files of an image are never written again.

mod error;
mod name;
mod protocol;
mod staging;
mod store;
mod store_lock;
mod trash;
mod volume_request;

pub use error::StoreError;
pub use husk_volumes::ImageFile;
pub use name::{ImageName, InvalidName, PullPolicy};
pub use protocol::{Event, PullRequest, Request};
pub use staging::{Blob, Staging};
pub use store::{ImageStore, Pruned, StoredImage, data_directory};
pub use volume_request::{
    Checksum, ChecksumAlgorithm, HttpSource, Login, RegistrySource, VolumeRequest, VolumeSource,
};
