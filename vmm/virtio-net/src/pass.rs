//! One pass over a receive or transmit queue.

/// Most frames of one pass, after which the driver is interrupted and other work is served.
pub(crate) const BATCH: usize = 64;

/// Longest frame, in bytes, that does not count as part of a stream: one of the usual MTU.
pub(crate) const SHORT_FRAME_BYTES: usize = 1600;

/// The result of a pass.
pub(crate) struct PassOutcome {
    /// Number of frames.
    pub frames: usize,
    /// Sum of their lengths in bytes.
    pub bytes: usize,
    /// There is more to do without waiting.
    pub again: bool,
    /// The driver wants to be interrupted.
    pub interrupt: bool,
}

impl PassOutcome {
    /// Number of frames without segmentation offload, exact only for 0, 1 or more than one.
    pub fn requests(&self) -> usize {
        match self.bytes {
            SHORT_FRAME_BYTES.. => self.frames.max(2),
            _ => self.frames,
        }
    }
}
