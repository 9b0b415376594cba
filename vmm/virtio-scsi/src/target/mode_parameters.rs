//! Mode parameters that the initiator can change.

use serde::{Deserialize, Serialize};

use super::properties::MediumLimits;

/// The mode parameters that the initiator can change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Modes {
    /// WCE
    pub write_cache: bool,
    /// D_SENSE
    pub descriptor_sense: bool,
}

impl Modes {
    /// Default values for this medium.
    pub fn new(limits: Option<&MediumLimits>) -> Self {
        Self {
            write_cache: limits.is_some_and(|limits| limits.write_cache && !limits.read_only),
            descriptor_sense: false,
        }
    }
}
