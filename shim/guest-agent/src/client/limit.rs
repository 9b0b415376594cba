//! Time limits that fit the commands.

use std::time::Duration;

/// A query, as those of the poller.
pub const QUERY: Duration = Duration::from_secs(5);

/// `guest-fsfreeze-freeze` writes all dirty pages first, and Windows may take a minute for its shadow copies. It is
/// also virt-handler's time limit; that of virt-api is 10 s.
pub const FREEZE: Duration = Duration::from_secs(60);

/// `guest-fsfreeze-thaw` runs the hooks of the guest.
pub const THAW: Duration = Duration::from_secs(10);

/// Time to wait for an error of `guest-shutdown`. The agent reports one after the program that it runs has ended.
pub const SHUTDOWN: Duration = Duration::from_secs(5);

/// Commands that change accounts or the time run programs in the guest.
pub const CHANGE: Duration = Duration::from_secs(10);
