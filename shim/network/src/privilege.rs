//! Checks the privileges for preparing networks.

use std::fs::OpenOptions;
use std::io;

use super::netns::Netns;
use super::nsfs;
use super::tap::TUN;

/// Required capabilities, by bit number.
const NEEDED: [(u32, &str); 2] = [(12, "CAP_NET_ADMIN"), (21, "CAP_SYS_ADMIN")];

/// Missing privilege.
#[derive(Debug, thiserror::Error)]
pub enum PrivilegeError {
    /// A capability is missing.
    #[error("it takes {0}")]
    Capability(&'static str),
    /// The capabilities are those of a user namespace that does not own the network namespace.
    #[error("the network belongs to another user namespace")]
    ForeignNetwork,
    /// Taps cannot be created.
    #[error("{TUN}: {0}")]
    Tun(#[source] io::Error),
}

/// Checks that this process may change network namespaces and create taps and, if `in_own`, change its own network
/// namespace.
pub fn check_privileges(in_own: bool) -> Result<(), PrivilegeError> {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let effective = effective(&status);
    if let Some((_, name)) = NEEDED.iter().find(|(bit, _)| effective & 1 << bit == 0) {
        return Err(PrivilegeError::Capability(name));
    }
    if in_own && !owns_network() {
        return Err(PrivilegeError::ForeignNetwork);
    }
    let tun = OpenOptions::new().read(true).write(true).open(TUN);
    tun.map(drop).map_err(PrivilegeError::Tun)
}

/// Effective capabilities in the text of `/proc/PID/status`.
fn effective(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok())
        .unwrap_or(0)
}

/// True if this process's capabilities apply to its network namespace.
fn owns_network() -> bool {
    // The kernel refuses to show a user namespace outside of the caller's own.
    Netns::own().is_ok_and(|own| nsfs::owner(own).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_their_line() {
        assert_eq!(
            effective("Name:\tx\nCapEff:\t000001fffeffffff\n"),
            0x1ff_feff_ffff
        );
        assert_eq!(effective("CapEff:\t0000000000000000\n"), 0);
        assert_eq!(effective("nothing of it"), 0);
    }

    #[test]
    #[ignore = "needs root"]
    fn root_may() {
        // Whether root may open /dev/net/tun depends on the machine.
        let inside = Netns::create().unwrap().run(|| check_privileges(true)).unwrap();
        for may in [check_privileges(false), inside] {
            assert!(matches!(may, Ok(()) | Err(PrivilegeError::Tun(_))), "{may:?}");
        }
    }
}
