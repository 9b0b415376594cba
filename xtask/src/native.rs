//! Whether this machine runs stock guests itself, so that no lab is needed.

/// True if `/dev/kvm` runs guest kernel mode natively.
///
/// Told by `husk doctor`, which runs payloads instead of looking at names. Until a `husk` is built nothing is known,
/// and the lab, which works everywhere, is used.
pub fn native_kvm() -> bool {
    false
}
