//! The objects of a machine without a cluster: VirtualMachines, and what they need.
//!
//! ```text
//! STORE/NAMESPACE/KIND/NAME.yaml   an object of a namespace, as a manifest; KIND is its kind in lower case
//! STORE/.cluster/KIND/NAME.yaml    an object of the whole cluster
//! STORE/.lock                      locked during a change
//! ```
//!
//! The files can be read and edited: a change is one rename of a complete file, which is on stable storage. They hold
//! Secrets, so only their owner can read them. The status of an object is never stored. The deletion of an object
//! begins with a `deletionTimestamp` in its file, or, if the disk is full, with the sticky bit of that.

mod error;
mod key;
mod store;
mod stored;

pub use error::ObjectError;
pub use key::{Key, Kind};
pub use store::{Applied, ObjectStore, Outcome};
pub use stored::{Objects, StoredObject};
