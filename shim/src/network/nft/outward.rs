//! The translation that guests of this machine leave it by.

use std::net::IpAddr;

use ipnet::Ipv4Net;

use super::batch::{Batch, Chain};
use super::expression::rule;
use crate::network::error::Fault;

/// The table, which nobody else has.
const TABLE: &str = "husk";
const LEAVING: Chain = Chain::hooked("postrouting", libc::NF_INET_POST_ROUTING, 100);

/// Lets what comes from `net` leave by other devices than `bridge` with the address of those. What this set up before
/// is replaced, in one go.
///
/// There is no chain that lets packets pass: whoever keeps them from it does so in a table of their own, over which
/// this one has no say.
pub(in crate::network) fn masquerade(net: Ipv4Net, bridge: &str) -> Result<(), Fault> {
    let mut batch = Batch::new(net.addr().into());
    batch.new_table(TABLE);
    batch.delete_table(TABLE);
    batch.new_table(TABLE);
    batch.new_chain(TABLE, &LEAVING);
    let rule = rule().within(net).not_sent_by(bridge).masquerade();
    batch.new_rule(TABLE, LEAVING.name, rule);
    batch.carry_out(format!("adding nftables' table ip {TABLE}"))
}

/// Undoes it, if it was done.
pub(in crate::network) fn stay() -> Result<(), Fault> {
    let mut batch = Batch::new(IpAddr::from([0; 4]));
    batch.new_table(TABLE);
    batch.delete_table(TABLE);
    batch.carry_out(format!("removing nftables' table ip {TABLE}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_replaced_and_goes() {
        if !crate::network::root::is_root() {
            return;
        }
        let is_there = || {
            let mut batch = Batch::new(IpAddr::from([0; 4]));
            batch.new_table_exclusively(TABLE);
            batch.delete_table(TABLE);
            batch.send().is_err()
        };
        let work = || {
            stay().unwrap();
            for net in ["10.77.0.0/20", "192.168.0.0/30"] {
                masquerade(net.parse().unwrap(), "husk0").unwrap();
                assert!(is_there());
            }
            stay().unwrap();
            assert!(!is_there());
        };
        crate::network::Netns::create().unwrap().run(work).unwrap();
    }
}
