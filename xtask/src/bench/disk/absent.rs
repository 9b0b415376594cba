//! Cases that a VMM does not serve, as opposed to those it fails at.

use crate::bench::started::Started;
use anyhow::{Result, bail};
use std::time::Instant;

/// The VMM's reason that a case cannot be measured. No second try changes it.
#[derive(Debug)]
pub struct Absent(pub String);

impl std::fmt::Display for Absent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Absent {}

/// Waits until the guest says `words`: when, and what it said since what was waited for before.
///
/// # Errors
/// [`Absent`] if the VMM says that it does not serve such a guest.
pub fn until(started: &mut Started, words: &str) -> Result<(Instant, String)> {
    const FAILED: &str = "husk-bench: failed;";
    match started.first_of(&[words, FAILED]) {
        Ok((0, when)) => Ok((when, started.serial.said())),
        Ok(_) => bail!("the guest cannot measure: {}", started.serial.said()),
        Err(error) => match unserved(&error.to_string()) {
            Some(why) => Err(Absent(why.to_owned()).into()),
            None => Err(error),
        },
    }
}

/// The line that says that something is not there in this VMM, as opposed to broken.
fn unserved(errors: &str) -> Option<&str> {
    let says = |line: &&str| line.contains("not served yet") || line.contains("not supported in this build");
    errors.lines().find(says).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_told_from_what_is_broken() {
        let note = "a note\nerror: bench-disk: disk \"data\": SCSI disks (bus scsi) are not served yet: use virtio\n";
        assert_eq!(
            unserved(note),
            Some("error: bench-disk: disk \"data\": SCSI disks (bus scsi) are not served yet: use virtio")
        );
        assert_eq!(unserved("error: bench-disk: the VMM died: SIGSEGV"), None);
        assert_eq!(unserved(""), None);
    }
}
