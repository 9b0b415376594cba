//! Cases that a VMM does not support, as opposed to those that fail.

use crate::started::Started;
use anyhow::Result;
use std::time::Instant;

/// The VMM's reason why a case cannot be measured. It is not retried.
#[derive(Debug)]
pub struct Absent(pub String);

impl std::fmt::Display for Absent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Absent {}

/// Waits until the guest prints `words`; returns the time, and the output since the previous match.
///
/// # Errors
/// [`Absent`] if the VMM reports that it does not support such a guest.
pub fn until(started: &mut Started, words: &str) -> Result<(Instant, String)> {
    match started.until_script(words) {
        Ok(when) => Ok((when, started.serial.said())),
        Err(error) => match unserved(&error.to_string()) {
            Some(why) => Err(Absent(why.to_owned()).into()),
            None => Err(error),
        },
    }
}

/// The line which reports that something is unsupported by this VMM, as opposed to broken.
fn unserved(errors: &str) -> Option<&str> {
    let says = |line: &&str| line.contains("not served yet") || line.contains("not supported in this build");
    errors.lines().find(says).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_devices_are_distinguished_from_crashes() {
        let note = "a note\nerror: bench-disk: disk \"data\": SCSI disks (bus scsi) are not served yet: use virtio\n";
        assert_eq!(
            unserved(note),
            Some("error: bench-disk: disk \"data\": SCSI disks (bus scsi) are not served yet: use virtio")
        );
        assert_eq!(unserved("error: bench-disk: the VMM died: SIGSEGV"), None);
        assert_eq!(unserved(""), None);
    }
}
