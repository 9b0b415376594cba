//! The search in less time, for fuzzing.

use std::sync::Arc;

use crate::{BootEntry, FindError, ReadAt, find};

/// As [`find`](crate::find()), with a read budget of `budget` bytes; each request costs 512 bytes more.
///
/// # Errors
/// As [`find`](crate::find()).
pub fn find_within(disk: Arc<dyn ReadAt>, budget: u64) -> Result<BootEntry, FindError> {
    find::find_within(disk, budget)
}
