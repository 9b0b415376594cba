//! The reports of the confined process: one as JSON in each line.

use serde::{Deserialize, Serialize};

/// A report. The last one is `Done` or `Error`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// Bytes of the image that are converted, and all.
    Progress {
        done: u64,
        size: u64,
    },
    Done(Converted),
    Error(ConvertError),
}

/// The result of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Converted {
    /// A disk of this size in bytes.
    Disk { size: u64 },
    /// A qcow2 image that was compressed as a whole: it has to be converted itself.
    Unpacked,
}

/// Why an image was not converted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConvertError {
    /// The disk does not fit its size; what it needs in bytes, if the image says that.
    TooLarge { needed: Option<u64> },
    /// The file system is full.
    Full,
    /// The image is in a format that is not converted.
    Format { reason: String },
    /// The image is damaged or hostile.
    Unreadable { reason: String },
    /// The conversion failed on this machine.
    Failed { reason: String },
}
