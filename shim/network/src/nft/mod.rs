//! NAT by nftables over netlink, with KubeVirt's tables, chains and rules.

use std::net::IpAddr;

use super::error::NetworkFault;
use super::interface::{Port, Protocol};

mod batch;
pub(super) mod egress;
mod expression;

use batch::{Batch, Chain, refused};
use expression::{Rule, rule};

/// Name of the table in each family.
const TABLE: &str = "nat";
const PRE: &str = "prerouting";
const IN: &str = "input";
const OUT: &str = "output";
const POST: &str = "postrouting";
const PRE_INBOUND: &str = "KUBEVIRT_PREINBOUND";
const POST_INBOUND: &str = "KUBEVIRT_POSTINBOUND";

/// Base chains.
const BASE_CHAINS: [Chain; 4] = [
    Chain::base(PRE, libc::NF_INET_PRE_ROUTING, -100),
    Chain::base(IN, libc::NF_INET_LOCAL_IN, 100),
    Chain::base(OUT, libc::NF_INET_LOCAL_OUT, -100),
    Chain::base(POST, libc::NF_INET_POST_ROUTING, 100),
];
/// Base chains in a table of another program, which may have chains with the usual names. The other chains see packets
/// first, as if these rules were appended to them.
const FOREIGN_BASE_CHAINS: [Chain; 4] = [
    Chain::base("KUBEVIRT_prerouting", libc::NF_INET_PRE_ROUTING, -99),
    Chain::base("KUBEVIRT_input", libc::NF_INET_LOCAL_IN, 101),
    Chain::base("KUBEVIRT_output", libc::NF_INET_LOCAL_OUT, -99),
    Chain::base("KUBEVIRT_postrouting", libc::NF_INET_POST_ROUTING, 101),
];
const REGULAR_CHAINS: [Chain; 2] = [Chain::regular(PRE_INBOUND), Chain::regular(POST_INBOUND)];

/// All chains, in Husk's table or another program's.
fn chains(foreign: bool) -> impl Iterator<Item = &'static Chain> + Clone {
    let hooked = if foreign {
        &FOREIGN_BASE_CHAINS
    } else {
        &BASE_CHAINS
    };
    hooked.iter().chain(&REGULAR_CHAINS)
}

/// NAT of one masqueraded guest, in one address family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NatConfig {
    /// Address of the bridge.
    pub(super) gateway: IpAddr,
    /// Address of the guest.
    pub(super) guest: IpAddr,
    /// Name of the pod's NIC.
    pub(super) nic: String,
    pub(super) bridge: String,
    /// Forwarded ports; all if empty.
    pub(super) ports: Vec<Port>,
}

impl NatConfig {
    /// Name of the family in `nft`.
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
    fn rules(&self, foreign: bool) -> Vec<(&'static str, Rule)> {
        let hooked = if foreign {
            &FOREIGN_BASE_CHAINS
        } else {
            &BASE_CHAINS
        };
        let [pre, _, out, post] = hooked.each_ref().map(|chain| chain.name);
        let (guest, loopback) = (self.guest, self.loopback());
        let mut rules = vec![
            (post, rule().saddr(guest).masquerade()),
            (pre, rule().iifname(&self.nic).jump(PRE_INBOUND)),
            (post, rule().oifname(&self.bridge).jump(POST_INBOUND)),
        ];
        let every: Vec<Option<Port>> = match self.ports.is_empty() {
            true => vec![None],
            false => self.ports.iter().copied().map(Some).collect(),
        };
        for port in every {
            let matching = || match port {
                Some(port) => rule().dport(port),
                None => rule(),
            };
            rules.push((PRE_INBOUND, matching().dnat(guest)));
            rules.push((POST_INBOUND, matching().saddr(loopback).snat(self.gateway)));
            rules.push((out, matching().daddr(loopback).dnat(guest)));
        }
        rules
    }
}

/// True if a table of this name exists in the family.
pub(super) fn table_exists(nat: &NatConfig) -> Result<bool, NetworkFault> {
    let mut batch = Batch::new(nat.guest);
    batch.new_table_exclusively(TABLE);
    // One transaction creates and deletes it, or fails because it exists.
    batch.delete_table(TABLE);
    match batch.send() {
        Ok(()) => Ok(false),
        Err(e) if e.raw_os_error() == Some(libc::EEXIST) => Ok(true),
        Err(e) => Err(refused("asking nftables for its tables".to_owned(), e)),
    }
}

/// Adds table, chains and rules in one transaction. `foreign` means that the table existed before.
pub(super) fn add(nat: &NatConfig, foreign: bool) -> Result<(), NetworkFault> {
    let mut batch = Batch::new(nat.guest);
    batch.new_table(TABLE);
    for chain in chains(foreign) {
        batch.new_chain(TABLE, chain);
    }
    for (chain, rule) in nat.rules(foreign) {
        batch.new_rule(TABLE, chain, rule);
    }
    batch.commit(format!("adding nftables' table {} {TABLE}", nat.family()))
}

/// Removes the chains and rules, and the table if `add` created it and nobody else uses it.
pub(super) fn remove(nat: &NatConfig, foreign: bool) -> Result<(), NetworkFault> {
    let ours = || {
        let mut batch = Batch::new(nat.guest);
        chains(foreign).for_each(|chain| batch.delete_rules(TABLE, chain.name));
        chains(foreign).for_each(|chain| batch.delete_chain(TABLE, chain.name));
        batch
    };
    let mut ways = vec![ours()];
    if !foreign {
        ways[0].delete_empty_table(TABLE);
        ways.push(ours());
        // Another program's rules jump to these chains, or some chains are gone.
        let mut all = Batch::new(nat.guest);
        all.delete_table(TABLE);
        ways.push(all);
    }
    let mut done = Ok(());
    for way in ways {
        done = way.send();
        if done.is_ok() {
            break;
        }
    }
    match done {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        Err(e) => {
            let what = format!("removing nftables' table {} {TABLE}", nat.family());
            Err(refused(what, e))
        }
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

    fn nat(ports: Vec<Port>) -> NatConfig {
        NatConfig {
            gateway: [10, 0, 2, 1].into(),
            guest: [10, 0, 2, 2].into(),
            nic: "eth0".to_owned(),
            bridge: "k6t-eth0".to_owned(),
            ports,
        }
    }

    #[test]
    #[ignore = "needs root"]
    fn foreign_tables_and_chains_are_kept() {
        let netns = crate::Netns::create().unwrap();
        let work = || -> Result<(), NetworkFault> {
            let ours = nat(Vec::new());
            assert!(!table_exists(&ours)?);
            // Chains as iptables and users of nft name them. The last is a regular chain, and must not be jumped to.
            let theirs = [
                Chain::base("PREROUTING", libc::NF_INET_PRE_ROUTING, -100),
                Chain::base(PRE, libc::NF_INET_PRE_ROUTING, -100),
                Chain::base(POST, libc::NF_INET_POST_ROUTING, 50),
                Chain::regular(OUT),
            ];
            let mut foreign = Batch::new(ours.guest);
            foreign.new_table(TABLE);
            theirs.iter().for_each(|chain| foreign.new_chain(TABLE, chain));
            foreign.new_rule(TABLE, PRE, rule().jump(OUT));
            foreign.send().map_err(NetworkFault::kernel("a foreign table"))?;
            assert!(table_exists(&ours)?);
            add(&ours, true)?;
            assert!(add(&ours, true).is_err(), "rules twice");
            remove(&ours, true)?;
            // Only the other program's chains are left, so the table can be deleted after them.
            let mut rest = Batch::new(ours.guest);
            rest.delete_rules(TABLE, PRE);
            theirs
                .iter()
                .for_each(|chain| rest.delete_chain(TABLE, chain.name));
            rest.delete_empty_table(TABLE);
            rest.send().map_err(NetworkFault::kernel("the foreign table"))?;

            // A chain that another program adds to Husk's table stays.
            add(&ours, false)?;
            let mut late = Batch::new(ours.guest);
            late.new_chain(TABLE, &theirs[0]);
            late.send().map_err(NetworkFault::kernel("a late chain"))?;
            remove(&ours, false)?;
            assert!(table_exists(&ours)?);
            let mut rest = Batch::new(ours.guest);
            rest.delete_chain(TABLE, theirs[0].name);
            rest.delete_empty_table(TABLE);
            rest.send().map_err(NetworkFault::kernel("the late chain"))?;

            add(&ours, false)?;
            remove(&ours, false)?;
            assert!(!table_exists(&ours)?);
            // Removing twice succeeds.
            remove(&ours, false)?;
            remove(&ours, true)
        };
        netns.run(work).unwrap().unwrap();
    }

    #[test]
    fn a_missing_kernel_feature_is_reported() {
        let error =
            |number| refused("asking".to_owned(), std::io::Error::from_raw_os_error(number)).to_string();
        assert!(error(libc::EPROTONOSUPPORT).starts_with("asking: the kernel lacks nf_tables"));
        assert!(error(libc::EPERM).contains("Operation not permitted"));
    }

    #[test]
    fn each_port_has_its_three_rules() {
        let chains = |ports| -> Vec<&str> {
            let rules = nat(ports).rules(false);
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
