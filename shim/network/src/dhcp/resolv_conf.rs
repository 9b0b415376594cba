//! The name servers of this machine, as far as a guest can reach them.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::options::DnsConfig;

/// A `resolv.conf` larger than this is not one.
const MAX_FILE: u64 = 64 << 10;
/// Where `ip netns` keeps names of namespaces.
const NETNS_DIRS: [&str; 2] = ["/run/netns", "/var/run/netns"];

impl DnsConfig {
    /// That of a pod, whose resolv.conf this is.
    #[must_use]
    pub fn from_resolv_conf(resolv_conf: &Path) -> DnsConfig {
        without_loopback(DnsConfig::read(&text(resolv_conf)))
    }

    /// What the guests of a network namespace are told: by `/etc/netns/NAME/resolv.conf`, if that is what the namespace
    /// is called by `ip netns`, else by this machine's. Servers on loopback are this machine's alone; where they are
    /// systemd-resolved's, those that it asks take their place.
    pub fn for_host(netns: Option<&Path>) -> DnsConfig {
        let own = netns.and_then(netns_resolv_conf).filter(|path| path.exists());
        let first = own.unwrap_or_else(|| "/etc/resolv.conf".into());
        let found = without_loopback(DnsConfig::read(&text(&first)));
        if found.has_servers() {
            return found;
        }
        let behind = without_loopback(DnsConfig::read(&text(Path::new(
            "/run/systemd/resolve/resolv.conf",
        ))));
        DnsConfig {
            search: found.search,
            ..behind
        }
    }
}

fn without_loopback(mut resolver: DnsConfig) -> DnsConfig {
    resolver
        .ipv4
        .retain(|server| !server.is_loopback() && !server.is_unspecified());
    resolver
        .ipv6
        .retain(|server| !server.is_loopback() && !server.is_unspecified());
    resolver
}

/// What `ip netns exec` shows as `/etc/resolv.conf` in this namespace.
fn netns_resolv_conf(netns: &Path) -> Option<PathBuf> {
    let name: OsString = netns.file_name()?.to_owned();
    let named = NETNS_DIRS
        .iter()
        .any(|dir| netns.parent() == Some(Path::new(dir)));
    named.then(|| Path::new("/etc/netns").join(name).join("resolv.conf"))
}

/// What the file says; nothing where there is none.
fn text(path: &Path) -> String {
    let mut text = Vec::new();
    let read = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .and_then(|file| file.take(MAX_FILE).read_to_end(&mut text));
    match read {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!("{}: {e}", path.display());
        }
        _ => {}
    }
    String::from_utf8_lossy(&text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_on_loopback_are_not_a_guests() {
        let text = "nameserver 127.0.0.53\nnameserver ::1\nnameserver 192.0.2.53\nsearch example.org\n";
        let resolver = without_loopback(DnsConfig::read(text));
        assert_eq!(resolver.ipv4, [std::net::Ipv4Addr::new(192, 0, 2, 53)]);
        assert!(resolver.ipv6.is_empty());
        assert_eq!(resolver.search, ["example.org"]);
        assert!(!without_loopback(DnsConfig::read("nameserver 127.0.0.1\n")).has_servers());
    }

    #[test]
    fn a_named_namespace_may_have_its_own() {
        let of = |path: &str| netns_resolv_conf(Path::new(path));
        assert_eq!(of("/run/netns/red"), Some("/etc/netns/red/resolv.conf".into()));
        assert_eq!(of("/proc/1/ns/net"), None);
        assert_eq!(of("/run/netns/.."), None);
    }
}
