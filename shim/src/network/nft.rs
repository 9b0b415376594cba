//! Network address translation by nftables, spoken over netlink: tables, chains and rules as KubeVirt lays them out.

use std::net::IpAddr;

use super::error::Fault;
use super::interface::{Port, Protocol};

mod batch;
mod expression;
pub(super) mod outward;

use batch::{Batch, Chain};
use expression::{Rule, rule};

/// The table's name in each family.
const TABLE: &str = "nat";
const PRE_INBOUND: &str = "KUBEVIRT_PREINBOUND";
const POST_INBOUND: &str = "KUBEVIRT_POSTINBOUND";

/// The chains that see packets, with the kernel's hook and priority for each.
const HOOKED: [Chain; 4] = [
    Chain::hooked("prerouting", libc::NF_INET_PRE_ROUTING, -100),
    Chain::hooked("input", libc::NF_INET_LOCAL_IN, 100),
    Chain::hooked("output", libc::NF_INET_LOCAL_OUT, -100),
    Chain::hooked("postrouting", libc::NF_INET_POST_ROUTING, 100),
];
const JUMPED_TO: [Chain; 2] = [Chain::plain(PRE_INBOUND), Chain::plain(POST_INBOUND)];

/// What is to be translated, in the family of its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Translation {
    /// The bridge's address.
    pub(super) gateway: IpAddr,
    /// The guest's.
    pub(super) guest: IpAddr,
    /// The pod's device.
    pub(super) nic: String,
    /// The bridge.
    pub(super) bridge: String,
    /// What is let in; all if empty.
    pub(super) ports: Vec<Port>,
}

impl Translation {
    /// The name `nft` has for the table's family.
    pub(super) fn family(&self) -> &'static str {
        match self.guest {
            IpAddr::V4(_) => "ip",
            IpAddr::V6(_) => "ip6",
        }
    }

    fn loopback(&self) -> IpAddr {
        match self.guest {
            IpAddr::V4(_) => [127, 0, 0, 1].into(),
            IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        }
    }

    /// The rules, each with its chain.
    fn rules(&self) -> Vec<(&'static str, Rule)> {
        let (guest, loopback) = (self.guest, self.loopback());
        let mut rules = vec![
            ("postrouting", rule().from(guest).masquerade()),
            ("prerouting", rule().received_by(&self.nic).jump(PRE_INBOUND)),
            ("postrouting", rule().sent_by(&self.bridge).jump(POST_INBOUND)),
        ];
        let every: Vec<Option<Port>> = match self.ports.is_empty() {
            true => vec![None],
            false => self.ports.iter().copied().map(Some).collect(),
        };
        for port in every {
            let matching = || match port {
                Some(port) => rule().port(port),
                None => rule(),
            };
            rules.push((PRE_INBOUND, matching().destination_becomes(guest)));
            rules.push((
                POST_INBOUND,
                matching().from(loopback).source_becomes(self.gateway),
            ));
            rules.push(("output", matching().to(loopback).destination_becomes(guest)));
        }
        rules
    }
}

/// Whether a table of this name is there in the translation's family.
pub(super) fn is_there(translation: &Translation) -> Result<bool, Fault> {
    let mut batch = Batch::new(translation.guest);
    batch.new_table_exclusively(TABLE);
    // It is made and removed again in one transaction, or refused because it is there.
    batch.delete_table(TABLE);
    match batch.send() {
        Ok(()) => Ok(false),
        Err(e) if e.raw_os_error() == Some(libc::EEXIST) => Ok(true),
        Err(e) => Err(Fault::kernel("asking nftables for its tables")(e)),
    }
}

/// Adds table, chains and rules, all or none.
pub(super) fn add(translation: &Translation) -> Result<(), Fault> {
    let mut batch = Batch::new(translation.guest);
    batch.new_table(TABLE);
    for chain in HOOKED.iter().chain(&JUMPED_TO) {
        batch.new_chain(TABLE, chain);
    }
    for (chain, rule) in translation.rules() {
        batch.new_rule(TABLE, chain, rule);
    }
    let what = format!("adding nftables' table {} {TABLE}", translation.family());
    batch.send().map_err(Fault::kernel(what))
}

/// Removes the table; of a table that was there before, only what was added.
pub(super) fn remove(translation: &Translation, foreign: bool) -> Result<(), Fault> {
    let mut batch = Batch::new(translation.guest);
    if foreign {
        let chains = HOOKED.iter().chain(&JUMPED_TO);
        chains
            .clone()
            .for_each(|chain| batch.delete_rules(TABLE, chain.name));
        chains.for_each(|chain| batch.delete_chain(TABLE, chain.name));
    } else {
        batch.delete_table(TABLE);
    }
    match batch.send() {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        Err(e) => Err(Fault::kernel(format!(
            "removing nftables' table {} {TABLE}",
            translation.family()
        ))(e)),
        Ok(()) => Ok(()),
    }
}

impl Protocol {
    fn number(self) -> u8 {
        match self {
            Protocol::Tcp => libc::IPPROTO_TCP as u8,
            Protocol::Udp => libc::IPPROTO_UDP as u8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translation(ports: Vec<Port>) -> Translation {
        Translation {
            gateway: [10, 0, 2, 1].into(),
            guest: [10, 0, 2, 2].into(),
            nic: "eth0".to_owned(),
            bridge: "k6t-eth0".to_owned(),
            ports,
        }
    }

    #[test]
    fn a_table_that_was_there_stays() {
        if !crate::network::root::is_root() {
            return;
        }
        let netns = crate::network::Netns::create().unwrap();
        let work = || -> Result<(), Fault> {
            let ours = translation(Vec::new());
            assert!(!is_there(&ours)?);
            let mut foreign = Batch::new(ours.guest);
            foreign.new_table(TABLE);
            foreign.new_chain(TABLE, &Chain::plain("ISTIO_OUTPUT"));
            foreign.send().map_err(Fault::kernel("a foreign table"))?;
            assert!(is_there(&ours)?);
            add(&ours)?;
            assert!(add(&ours).is_err(), "rules twice");
            remove(&ours, true)?;
            assert!(is_there(&ours)?);
            // Nothing is left in the way.
            add(&ours)?;
            remove(&ours, false)?;
            assert!(!is_there(&ours)?);
            // What has gone need not be removed.
            remove(&ours, false)
        };
        netns.run(work).unwrap().unwrap();
    }

    #[test]
    fn each_port_has_its_three_rules() {
        let chains = |ports| -> Vec<&str> {
            let rules = translation(ports).rules();
            rules.into_iter().map(|(chain, _)| chain).collect()
        };
        assert_eq!(
            chains(Vec::new()),
            [
                "postrouting",
                "prerouting",
                "postrouting",
                PRE_INBOUND,
                POST_INBOUND,
                "output"
            ]
        );
        let port = |port| Port {
            protocol: Protocol::Tcp,
            port,
        };
        assert_eq!(chains(vec![port(80), port(443)]).len(), 9);
    }
}
