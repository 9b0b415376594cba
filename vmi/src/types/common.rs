//! Types that several parts of the spec share.

use serde::Deserialize;

manifest! {
    /// `spec.domain.devices.filesystems[]` and `spec.dnsConfig.options[]`
    Named {
        name: String,
    }

    /// An object that only needs to be there
    Empty {}
}
