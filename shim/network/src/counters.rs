//! The kernel's counters of taps.

use std::collections::HashMap;
use std::fs;
use std::io;

use crate::device_names::DeviceNames;
use crate::netns::Netns;

/// Counters of the devices of the thread's namespace (proc_pid_net(5)).
const DEVICES: &str = "/proc/thread-self/net/dev";

/// Frames of one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkCounters {
    /// Frames passed on.
    pub frames: u64,
    /// Bytes of these frames.
    pub bytes: u64,
    /// Frames dropped, such as for a guest that does not fetch them.
    pub dropped: u64,
    /// Invalid frames.
    pub errors: u64,
}

/// Frames of a guest's interface, seen from the guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuestCounters {
    /// Frames to the guest, which the tap sends.
    pub received: LinkCounters,
    /// Frames from the guest, which the tap receives.
    pub sent: LinkCounters,
}

/// Reads the counters of the taps of these NICs, by the NICs' names. One without a tap is left out. Blocks.
///
/// # Errors
/// The namespace cannot be entered, or its counters not be read.
pub fn tap_counters(netns: &Netns, nics: &[String]) -> io::Result<HashMap<String, GuestCounters>> {
    let text = netns.run(|| fs::read_to_string(DEVICES))??;
    let found = nics.iter().filter_map(|nic| {
        let tap = DeviceNames::for_nic(nic).ok()?.tap;
        Some((nic.clone(), parse(&text, &tap)?))
    });
    Ok(found.collect())
}

/// The counters of one device: 8 columns of what it received, then 8 of what it sent.
fn parse(text: &str, device: &str) -> Option<GuestCounters> {
    let line = text.lines().find_map(|line| {
        let (name, counters) = line.split_once(':')?;
        (name.trim() == device).then_some(counters)
    })?;
    let columns: Option<Vec<u64>> = line.split_whitespace().map(|word| word.parse().ok()).collect();
    let columns = columns.filter(|columns| columns.len() >= 16)?;
    let direction = |from: usize| LinkCounters {
        bytes: columns[from],
        frames: columns[from + 1],
        errors: columns[from + 2],
        dropped: columns[from + 3],
    };
    Some(GuestCounters {
        received: direction(8),
        sent: direction(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_receives_what_the_tap_sends() {
        let text = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0          0
  tap0: 5000 5 1 2 0 0 0 0 9000 9 3 4 0 0 0 0
 tap01: 1 2
";
        let sent = LinkCounters {
            frames: 5,
            bytes: 5000,
            dropped: 2,
            errors: 1,
        };
        let received = LinkCounters {
            frames: 9,
            bytes: 9000,
            dropped: 4,
            errors: 3,
        };
        assert_eq!(parse(text, "tap0"), Some(GuestCounters { received, sent }));
        for unknown in ["tap01", "tap", "0", "Inter-|   Receive"] {
            assert_eq!(parse(text, unknown), None, "{unknown}");
        }
    }
}
