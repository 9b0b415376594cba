//! One pass over a receive or transmit queue.

/// Frames after which the driver is told and other work is looked at.
pub(crate) const BATCH: usize = 64;

/// The longest frame that is alone for want of anything else to send: one of the usual MTU.
pub(crate) const SHORT_FRAME_BYTES: usize = 1600;

/// What came of a pass.
pub(crate) struct PassOutcome {
    /// Frames there were.
    pub frames: usize,
    /// Their lengths' sum.
    pub bytes: usize,
    /// There is more to do without waiting.
    pub again: bool,
    /// The driver wants to be interrupted.
    pub interrupt: bool,
}

impl PassOutcome {
    /// How many frames there would have been without segmentation offload, for all that matters: 0, 1 or more.
    pub fn requests(&self) -> usize {
        match self.bytes {
            SHORT_FRAME_BYTES.. => self.frames.max(2),
            _ => self.frames,
        }
    }
}
