//! Name servers of a pod or of the host that a guest can reach.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::options::DnsConfig;

/// Limit for the size of a `resolv.conf`, in bytes.
const MAX_FILE: u64 = 64 << 10;
/// Directories in which `ip netns` keeps named namespaces.
const NETNS_DIRS: [&str; 2] = ["/run/netns", "/var/run/netns"];

impl DnsConfig {
    /// Reads a pod's `resolv.conf`. Missing servers and domains get KubeVirt's defaults.
    #[must_use]
    pub fn from_resolv_conf(resolv_conf: &Path) -> DnsConfig {
        without_loopback(DnsConfig::read(&text(resolv_conf))).or_defaults()
    }

    /// DNS configuration for guests in a network namespace: `/etc/netns/NAME/resolv.conf` if `ip netns` names the
    /// namespace, else the host's. Loopback servers are removed, since only the host reaches them; systemd-resolved's
    /// upstream servers replace its stub.
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

/// Path of the file that `ip netns exec` mounts as `/etc/resolv.conf` for this namespace.
fn netns_resolv_conf(netns: &Path) -> Option<PathBuf> {
    let name: OsString = netns.file_name()?.to_owned();
    let named = NETNS_DIRS
        .iter()
        .any(|dir| netns.parent() == Some(Path::new(dir)));
    named.then(|| Path::new("/etc/netns").join(name).join("resolv.conf"))
}

/// Content of a file; empty if it does not exist.
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
    fn a_pod_with_servers_on_loopback_only_gets_kubevirts_defaults() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "nameserver 127.0.0.53\n").unwrap();
        let resolver = DnsConfig::from_resolv_conf(file.path());
        assert_eq!(resolver, DnsConfig::parse(""));
    }

    #[test]
    fn a_named_namespace_may_have_its_own_network() {
        let of = |path: &str| netns_resolv_conf(Path::new(path));
        assert_eq!(of("/run/netns/red"), Some("/etc/netns/red/resolv.conf".into()));
        assert_eq!(of("/proc/1/ns/net"), None);
        assert_eq!(of("/run/netns/.."), None);
    }
}
