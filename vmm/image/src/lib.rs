//! Finds the kernel, initrds and command line that a disk image boots by default.
//!
//! The crate reads the disk through [`ReadAt`] and neither mounts nor changes it. It parses the partition table (GPT,
//! MBR or none), the filesystems (ext2, ext3, ext4, FAT) and the boot loader's configuration: GRUB's `grub.cfg` with
//! its environment, or Boot Loader Specification entries. The disk is untrusted: sizes, nesting, loops and reads are
//! bounded. If no kernel is found, [`FindError`] gives the reasons for each partition.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let disk = std::sync::Arc::new(std::fs::File::open("disk.raw")?);
//! let entry = husk_image::find(disk)?;
//! println!("{}: {}", entry.source, entry.command_line);
//! let mut kernel = Vec::new();
//! entry.kernel().read_into(&mut |bytes| Ok(kernel.extend_from_slice(bytes)))?;
//! # Ok(())
//! # }
//! ```

mod bls;
mod disk;
mod entry;
mod error;
mod ext4;
mod fat;
mod filesystem;
mod find;
mod grub;
mod partition;
mod pattern;
mod probe;
mod selected_entry;
mod source;
#[cfg(feature = "testing")]
pub mod testing;
mod volume;

pub use entry::{BootEntry, BootFiles, ReadError};
pub use error::{FindError, PartitionReport};
pub use find::find;
pub use partition::Table;
pub use source::ReadAt;
