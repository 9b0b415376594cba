//! Rules on the DNS configuration of the pod.

use std::net::IpAddr;

use crate::field::FieldError;
use crate::load::Vmi;
use crate::names::subdomain_fault;

/// Maximum number of name servers.
const NAME_SERVERS: usize = 3;
/// Maximum number of search domains.
const SEARCHES: usize = 6;
/// Maximum length of the search list in characters, joined by spaces.
const SEARCH_LIST: usize = 256;

pub(super) fn check(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    let policy = vmi.spec.dns_policy.as_deref().unwrap_or_default();
    if !matches!(
        policy,
        "" | "ClusterFirstWithHostNet" | "ClusterFirst" | "Default" | "None"
    ) {
        let text = format!(
            "DNSPolicy: {policy} is not supported, valid values: [ClusterFirstWithHostNet ClusterFirst Default None ]"
        );
        errors.push(FieldError::unsupported(vmi.at("dnsPolicy"), text));
    }
    let Some(config) = &vmi.spec.dns_config else {
        if policy == "None" {
            let text = "must provide `dnsConfig` when `dnsPolicy` is None";
            errors.push(FieldError::required(vmi.at("dnsConfig"), text));
        }
        return;
    };
    let servers = &config.nameservers;
    if policy == "None" && servers.is_empty() {
        let text = "must provide at least one DNS nameserver when `dnsPolicy` is None";
        errors.push(FieldError::required("nameservers", text));
        return;
    }
    // KubeVirt names these fields without their path.
    let mut refuse = |field: &str, text: String| errors.push(FieldError::invalid(field, text));
    if servers.len() > NAME_SERVERS {
        let text = format!(
            "must not have more than {NAME_SERVERS} nameservers: [{}]",
            servers.join(" ")
        );
        refuse("nameservers", text);
    }
    for server in servers.iter().filter(|server| server.parse::<IpAddr>().is_err()) {
        refuse("nameservers", format!("must be valid IP address: {server}"));
    }
    if config.searches.len() > SEARCHES {
        refuse(
            "searchDomains",
            format!("must not have more than {SEARCHES} search paths"),
        );
    }
    if config.searches.join(" ").len() > SEARCH_LIST {
        let text =
            format!("must not have more than {SEARCH_LIST} characters (including spaces) in the search list");
        refuse("searchDomains", text);
    }
    for fault in config
        .searches
        .iter()
        .filter_map(|search| subdomain_fault(search))
    {
        refuse("searchDomains", fault.to_owned());
    }
    for _ in config.options.iter().filter(|option| option.name.is_empty()) {
        refuse("options", "Option.Name must not be empty".to_owned());
    }
}
