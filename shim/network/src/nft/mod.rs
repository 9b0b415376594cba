//! Network address translation by nftables, spoken over netlink: tables, chains and rules as KubeVirt lays them out.

use std::net::IpAddr;

use super::error::Fault;
use super::interface::{Port, Protocol};

mod batch;
mod expression;
pub(super) mod outward;

use batch::{Batch, Chain, refused};
use expression::{Rule, rule};

/// The table's name in each family.
const TABLE: &str = "nat";
const PRE: &str = "prerouting";
const IN: &str = "input";
const OUT: &str = "output";
const POST: &str = "postrouting";
const PRE_INBOUND: &str = "KUBEVIRT_PREINBOUND";
const POST_INBOUND: &str = "KUBEVIRT_POSTINBOUND";

/// The chains that see packets, with the kernel's hook and priority for each.
const HOOKED: [Chain; 4] = [
    Chain::hooked(PRE, libc::NF_INET_PRE_ROUTING, -100),
    Chain::hooked(IN, libc::NF_INET_LOCAL_IN, 100),
    Chain::hooked(OUT, libc::NF_INET_LOCAL_OUT, -100),
    Chain::hooked(POST, libc::NF_INET_POST_ROUTING, 100),
];
/// The same in another's table, which may have chains of those names. The other's see packets first, as they would if
/// the rules were added to their ends.
const HOOKED_BESIDE: [Chain; 4] = [
    Chain::hooked("KUBEVIRT_prerouting", libc::NF_INET_PRE_ROUTING, -99),
    Chain::hooked("KUBEVIRT_input", libc::NF_INET_LOCAL_IN, 101),
    Chain::hooked("KUBEVIRT_output", libc::NF_INET_LOCAL_OUT, -99),
    Chain::hooked("KUBEVIRT_postrouting", libc::NF_INET_POST_ROUTING, 101),
];
const JUMPED_TO: [Chain; 2] = [Chain::plain(PRE_INBOUND), Chain::plain(POST_INBOUND)];

/// The chains in a table that is another's, or not.
fn chains(foreign: bool) -> impl Iterator<Item = &'static Chain> + Clone {
    let hooked = if foreign { &HOOKED_BESIDE } else { &HOOKED };
    hooked.iter().chain(&JUMPED_TO)
}

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
    fn rules(&self, foreign: bool) -> Vec<(&'static str, Rule)> {
        let hooked = if foreign { &HOOKED_BESIDE } else { &HOOKED };
        let [pre, _, out, post] = hooked.each_ref().map(|chain| chain.name);
        let (guest, loopback) = (self.guest, self.loopback());
        let mut rules = vec![
            (post, rule().from(guest).masquerade()),
            (pre, rule().received_by(&self.nic).jump(PRE_INBOUND)),
            (post, rule().sent_by(&self.bridge).jump(POST_INBOUND)),
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
            rules.push((out, matching().to(loopback).destination_becomes(guest)));
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
        Err(e) => Err(refused("asking nftables for its tables".to_owned(), e)),
    }
}

/// Adds table, chains and rules, all or none. A foreign table is one that was there before.
pub(super) fn add(translation: &Translation, foreign: bool) -> Result<(), Fault> {
    let mut batch = Batch::new(translation.guest);
    batch.new_table(TABLE);
    for chain in chains(foreign) {
        batch.new_chain(TABLE, chain);
    }
    for (chain, rule) in translation.rules(foreign) {
        batch.new_rule(TABLE, chain, rule);
    }
    batch.carry_out(format!("adding nftables' table {} {TABLE}", translation.family()))
}

/// Removes what was added, and the table if it was, unless somebody else has put something there meanwhile.
pub(super) fn remove(translation: &Translation, foreign: bool) -> Result<(), Fault> {
    let ours = || {
        let mut batch = Batch::new(translation.guest);
        chains(foreign).for_each(|chain| batch.delete_rules(TABLE, chain.name));
        chains(foreign).for_each(|chain| batch.delete_chain(TABLE, chain.name));
        batch
    };
    let mut ways = vec![ours()];
    if !foreign {
        ways[0].delete_empty_table(TABLE);
        ways.push(ours());
        // Somebody's rules lead to our chains, or some of those have gone.
        let mut all = Batch::new(translation.guest);
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
            let what = format!("removing nftables' table {} {TABLE}", translation.family());
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
        if !husk_shim_testing::root::is_root() {
            return;
        }
        let netns = crate::Netns::create().unwrap();
        let work = || -> Result<(), Fault> {
            let ours = translation(Vec::new());
            assert!(!is_there(&ours)?);
            // As iptables and as users of nft call theirs; the last one hangs elsewhere, and is not to be jumped to.
            let theirs = [
                Chain::hooked("PREROUTING", libc::NF_INET_PRE_ROUTING, -100),
                Chain::hooked(PRE, libc::NF_INET_PRE_ROUTING, -100),
                Chain::hooked(POST, libc::NF_INET_POST_ROUTING, 50),
                Chain::plain(OUT),
            ];
            let mut foreign = Batch::new(ours.guest);
            foreign.new_table(TABLE);
            theirs.iter().for_each(|chain| foreign.new_chain(TABLE, chain));
            foreign.new_rule(TABLE, PRE, rule().jump(OUT));
            foreign.send().map_err(Fault::kernel("a foreign table"))?;
            assert!(is_there(&ours)?);
            add(&ours, true)?;
            assert!(add(&ours, true).is_err(), "rules twice");
            remove(&ours, true)?;
            // Theirs are there, and nothing else: the table goes with them.
            let mut rest = Batch::new(ours.guest);
            rest.delete_rules(TABLE, PRE);
            theirs
                .iter()
                .for_each(|chain| rest.delete_chain(TABLE, chain.name));
            rest.delete_empty_table(TABLE);
            rest.send().map_err(Fault::kernel("the foreign table"))?;

            // What somebody puts into our table stays when we go.
            add(&ours, false)?;
            let mut late = Batch::new(ours.guest);
            late.new_chain(TABLE, &theirs[0]);
            late.send().map_err(Fault::kernel("a late chain"))?;
            remove(&ours, false)?;
            assert!(is_there(&ours)?);
            let mut rest = Batch::new(ours.guest);
            rest.delete_chain(TABLE, theirs[0].name);
            rest.delete_empty_table(TABLE);
            rest.send().map_err(Fault::kernel("the late chain"))?;

            add(&ours, false)?;
            remove(&ours, false)?;
            assert!(!is_there(&ours)?);
            // What has gone need not be removed.
            remove(&ours, false)?;
            remove(&ours, true)
        };
        netns.run(work).unwrap().unwrap();
    }

    #[test]
    fn what_the_kernel_lacks_is_said() {
        let error =
            |number| refused("asking".to_owned(), std::io::Error::from_raw_os_error(number)).to_string();
        assert!(error(libc::EPROTONOSUPPORT).starts_with("asking: the kernel lacks nf_tables"));
        assert!(error(libc::EPERM).contains("Operation not permitted"));
    }

    #[test]
    fn each_port_has_its_three_rules() {
        let chains = |ports| -> Vec<&str> {
            let rules = translation(ports).rules(false);
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
