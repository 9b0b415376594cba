//! Allocated ranges and holes of a disk.

/// A range of a disk that is wholly allocated or wholly a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte, as requested.
    pub offset: u64,
    /// Length in bytes, not 0.
    pub len: u64,
    /// True if the volume has storage for the range. A hole reads as zeroes.
    pub allocated: bool,
}
