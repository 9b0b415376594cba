//! Types that several parts of the spec share.

use serde::Deserialize;

manifest! {
    /// `spec.domain.devices.filesystems[]` and `spec.dnsConfig.options[]`
    Named {
        name: String,
    }

    /// An object whose presence is all that matters
    Empty {}
}
