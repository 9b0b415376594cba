//! The error of a command.

use super::passthrough_device::DeliveryFailure;
use super::sense::Sense;
use super::step::ScsiStatus;

/// Reason why a command failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CommandError {
    Sense(Sense),
    /// RESERVATION CONFLICT
    Conflict,
    /// The initiator's buffers are smaller than the CDB says.
    Overrun,
    /// Status and sense data of a passthrough device.
    Ended(ScsiStatus, Vec<u8>),
    /// A passthrough device returned no status.
    Failed(DeliveryFailure),
}

impl From<Sense> for CommandError {
    fn from(sense: Sense) -> Self {
        Self::Sense(sense)
    }
}
