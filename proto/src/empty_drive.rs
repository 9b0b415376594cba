//! CD-ROM drives without a disc.

use crate::shim::v1::Disk;

impl Disk {
    /// True if it is a CD-ROM drive without a disc: no volume is in it.
    #[must_use]
    pub fn is_empty_drive(&self) -> bool {
        self.bytes == Some(0) && !self.plugged
    }
}
