//! DHCP options.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use super::super::error::NetworkFault;

/// KubeVirt's lease of 999 days, which no guest renews.
pub const LONG_LEASE: Duration = Duration::from_secs(86_313_600);
/// Name server for a pod without any.
const DEFAULT_DNS: Ipv4Addr = Ipv4Addr::new(8, 8, 8, 8);
/// Search domain for a pod without any.
const DEFAULT_DOMAIN: &str = "cluster.local";
/// Longest encoded search list, in bytes: the size of one option.
const SEARCH_MAX: usize = 255;

/// DHCP options beside the lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DhcpOptions {
    pub hostname: Option<String>,
    pub resolver: DnsConfig,
    /// `dhcpOptions.ntpServers`.
    pub ntp_servers: Vec<Ipv4Addr>,
    /// `dhcpOptions.tftpServerName`.
    pub tftp_server: Option<String>,
    /// `dhcpOptions.bootFileName`.
    pub boot_file: Option<String>,
    /// `dhcpOptions.privateOptions`: 224 to 254.
    pub private: Vec<(u8, String)>,
    pub lease_time: Duration,
}

impl Default for DhcpOptions {
    fn default() -> DhcpOptions {
        DhcpOptions {
            hostname: None,
            resolver: DnsConfig::parse(""),
            ntp_servers: Vec::new(),
            tftp_server: None,
            boot_file: None,
            private: Vec::new(),
            lease_time: LONG_LEASE,
        }
    }
}

impl DhcpOptions {
    /// Refuses values that do not fit into an option.
    pub(super) fn check(&self) -> Result<(), NetworkFault> {
        let refused = |field, reason: &str| {
            Err(NetworkFault::InvalidField {
                field,
                reason: reason.to_owned(),
            })
        };
        if self.private.iter().any(|(code, _)| !(224..=254).contains(code)) {
            let reason = "provided DHCPPrivateOptions are out of range, must be in range 224 to 254";
            return refused("dhcpOptions.privateOptions", reason);
        }
        let texts = [
            ("hostname", self.hostname.as_deref()),
            ("dhcpOptions.tftpServerName", self.tftp_server.as_deref()),
            ("dhcpOptions.bootFileName", self.boot_file.as_deref()),
        ];
        let private = self
            .private
            .iter()
            .map(|(_, value)| ("dhcpOptions.privateOptions", Some(value.as_str())));
        for (field, text) in texts.into_iter().chain(private) {
            if text.is_some_and(|text| text.len() > 255) {
                return refused(field, "a DHCP option has at most 255 bytes");
            }
        }
        if self.ntp_servers.len() > 63 || self.resolver.ipv4.len() > 63 {
            return refused("dhcpOptions", "a DHCP option has at most 63 addresses");
        }
        if self.lease_time < Duration::from_secs(2) {
            return refused("leaseTime", "a lease of less than 2 s cannot be renewed");
        }
        Ok(())
    }
}

/// Name servers and search domains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DnsConfig {
    pub ipv4: Vec<Ipv4Addr>,
    pub ipv6: Vec<Ipv6Addr>,
    pub search: Vec<String>,
}

impl DnsConfig {
    /// Parses a pod's `resolv.conf`. Missing servers and domains get KubeVirt's defaults.
    pub fn parse(text: &str) -> DnsConfig {
        DnsConfig::read(text).or_defaults()
    }

    /// With KubeVirt's defaults for missing servers and domains.
    pub(super) fn or_defaults(mut self) -> DnsConfig {
        if !self.has_servers() {
            self.ipv4.push(DEFAULT_DNS);
        }
        if self.search.is_empty() {
            self.search.push(DEFAULT_DOMAIN.to_owned());
        }
        self
    }

    pub fn has_servers(&self) -> bool {
        !self.ipv4.is_empty() || !self.ipv6.is_empty()
    }

    /// Parses a `resolv.conf`.
    pub(super) fn read(text: &str) -> DnsConfig {
        let mut found = DnsConfig {
            ipv4: Vec::new(),
            ipv6: Vec::new(),
            search: Vec::new(),
        };
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace();
            match words.next() {
                Some("nameserver") => match words.next().and_then(|word| word.parse().ok()) {
                    Some(IpAddr::V4(address)) => found.ipv4.push(address),
                    Some(IpAddr::V6(address)) => found.ipv6.push(address),
                    None => {}
                },
                // The last line wins.
                Some("search" | "domain") => {
                    found.search = words
                        .map(|word| word.trim_end_matches('.').to_ascii_lowercase())
                        .collect();
                }
                _ => {}
            }
        }
        found.search.retain(|domain| is_domain(domain));
        found
    }

    /// Inserts the domain of a VM with a `subdomain` before the others: SUBDOMAIN and the longest cluster domain of
    /// services, unless that one begins with SUBDOMAIN.
    pub fn with_subdomain(mut self, subdomain: &str) -> Result<DnsConfig, NetworkFault> {
        let is_services = |domain: &str| domain.contains(".svc.");
        // In "db.svc.cluster.local", db is a namespace, which may have a subdomain db.
        let has_it = |domain: &str| {
            let rest = domain
                .strip_prefix(subdomain)
                .and_then(|rest| rest.strip_prefix('.'));
            rest.is_some_and(is_services)
        };
        let services = self.search.iter().filter(|domain| is_services(domain));
        if let Some(domain) = longest(services).filter(|domain| !has_it(domain)) {
            let first = format!("{subdomain}.{domain}");
            if !is_domain(&first) {
                return Err(NetworkFault::InvalidField {
                    field: "spec.subdomain",
                    reason: format!("{first:?} is no domain"),
                });
            }
            if !self.search.contains(&first) {
                self.search.insert(0, first);
            }
        }
        let bytes: usize = self.search.iter().map(|domain| domain.len() + 2).sum();
        match bytes > SEARCH_MAX {
            true => Err(NetworkFault::InvalidField {
                field: "spec.subdomain",
                reason: format!(
                    "the search domains take {bytes} bytes, more than the {SEARCH_MAX} of a DHCP option"
                ),
            }),
            false => Ok(self),
        }
    }

    /// The guest's domain name: the longest search domain.
    pub(super) fn domain(&self) -> Option<&str> {
        longest(self.search.iter()).map(String::as_str)
    }
}

/// First of the longest domains.
fn longest<'a>(domains: impl Iterator<Item = &'a String>) -> Option<&'a String> {
    domains.fold(None, |best: Option<&String>, domain| match best {
        Some(best) if best.len() >= domain.len() => Some(best),
        _ => Some(domain),
    })
}

/// True if DNS can encode the domain.
fn is_domain(domain: &str) -> bool {
    let label = |label: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        (1..=63).contains(&label.len()) && label.bytes().all(plain)
    };
    domain.len() <= 253 && domain.split('.').all(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pods_resolver() {
        let text = "# made by the kubelet\nsearch default.svc.cluster.local svc.cluster.local cluster.local\n\
                    nameserver 10.96.0.10\nnameserver fd00::10\nnameserver\noptions ndots:5\nsearch2 x\n";
        let resolver = DnsConfig::parse(text);
        assert_eq!(resolver.ipv4, [Ipv4Addr::new(10, 96, 0, 10)]);
        assert_eq!(resolver.ipv6, ["fd00::10".parse::<Ipv6Addr>().unwrap()]);
        assert_eq!(resolver.domain(), Some("default.svc.cluster.local"));
        let resolver = resolver.with_subdomain("db").unwrap();
        assert_eq!(resolver.search[0], "db.default.svc.cluster.local");
        assert_eq!(resolver.search.len(), 4);
    }

    #[test]
    fn a_subdomain_is_added_once() {
        let searched = |search: &str| {
            let resolver = DnsConfig::parse(&format!("search {search}"));
            resolver.with_subdomain("db").unwrap()
        };
        let whole = "db.default.svc.cluster.local default.svc.cluster.local svc.cluster.local cluster.local";
        let resolver = searched(whole);
        assert_eq!(resolver.search.join(" "), whole);
        assert_eq!(resolver.domain(), Some("db.default.svc.cluster.local"));
        // A namespace of that name is not the subdomain.
        let resolver = searched("db.svc.cluster.local svc.cluster.local cluster.local");
        assert_eq!(resolver.search[0], "db.db.svc.cluster.local");
    }

    #[test]
    fn an_empty_resolv_conf_gets_kubevirts_defaults() {
        let resolver = DnsConfig::parse("search bad..domain\n");
        assert_eq!(resolver.ipv4, [DEFAULT_DNS]);
        assert_eq!(resolver.search, [DEFAULT_DOMAIN]);
    }

    #[test]
    fn too_many_domains_are_refused() {
        let domains: Vec<String> = (0..10)
            .map(|i| format!("a-rather-long-namespace-{i}.svc.cluster.local"))
            .collect();
        let resolver = DnsConfig::parse(&format!("search {}", domains.join(" ")));
        let error = resolver.with_subdomain("db").unwrap_err();
        assert!(error.to_string().starts_with("spec.subdomain: "), "{error}");
    }

    #[test]
    fn options_that_fit_nowhere_are_refused() {
        let private = |code, value: &str| DhcpOptions {
            private: vec![(code, value.to_owned())],
            ..DhcpOptions::default()
        };
        DhcpOptions::default().check().unwrap();
        private(240, "x").check().unwrap();
        private(223, "x").check().unwrap_err();
        private(255, "x").check().unwrap_err();
        private(240, &"x".repeat(256)).check().unwrap_err();
    }
}
