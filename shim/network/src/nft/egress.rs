//! NAT for guests that leave the host, and what else the host does not forward.

use std::io;
use std::net::IpAddr;

use ipnet::Ipv4Net;

use super::batch::{Batch, Chain};
use super::expression::rule;
use crate::error::NetworkFault;

/// Name of the table, which only Husk uses.
const TABLE: &str = "husk";
const POSTROUTING: Chain = Chain::base("postrouting", libc::NF_INET_POST_ROUTING, 100);
const FORWARD: Chain = Chain::filter("forward", libc::NF_INET_FORWARD, 0);

/// Owner of the existing table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EgressTable {
    /// Husk's table, which is replaced atomically.
    Own,
    /// No table exists.
    New,
}

/// Masquerades packets from `net` that leave by devices other than `bridge`. Drops packets between the other networks of
/// `switched`, the devices on which Husk enables forwarding: the host did not forward them before. What comes from or
/// goes to other devices, which may be made later, is the matter of those who make them.
///
/// There is no chain that accepts packets: a firewall drops them in its own table, and this one cannot override that.
pub(crate) fn masquerade(
    net: Ipv4Net,
    bridge: &str,
    switched: &[&str],
    table: EgressTable,
) -> Result<(), NetworkFault> {
    let mut batch = Batch::new(net.addr().into());
    match table {
        EgressTable::Own => {
            batch.new_table(TABLE);
            batch.delete_table(TABLE);
            batch.new_table(TABLE);
        }
        EgressTable::New => batch.new_table_exclusively(TABLE),
    }
    batch.new_chain(TABLE, &POSTROUTING);
    batch.new_chain(TABLE, &FORWARD);
    let leaving = rule().saddr_in(net).oifname_not(bridge).masquerade();
    batch.new_rule(TABLE, POSTROUTING.name, leaving);
    let others = || switched.iter().filter(|device| **device != bridge);
    for from in others() {
        for to in others().filter(|to| *to != from) {
            batch.new_rule(TABLE, FORWARD.name, rule().iifname(from).oifname(to).drop());
        }
    }
    batch.send().map_err(|error| match error.raw_os_error() {
        Some(libc::EEXIST) => foreign_table(),
        _ => refused(error),
    })
}

/// True if the table exists, even if another program created it.
pub(crate) fn table_exists() -> Result<bool, NetworkFault> {
    let mut batch = Batch::new(IpAddr::from([0; 4]));
    batch.new_table_exclusively(TABLE);
    batch.delete_table(TABLE);
    match batch.send() {
        Ok(()) => Ok(false),
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(true),
        Err(error) => Err(refused(error)),
    }
}

/// Error: the table exists and is not Husk's.
pub(crate) fn foreign_table() -> NetworkFault {
    NetworkFault::Host(format!(
        "nftables has a table ip {TABLE} that Husk did not make: give it another name, or remove it by \
         `nft delete table ip {TABLE}`"
    ))
}

/// Removes the table, if it exists.
pub(crate) fn remove() -> Result<(), NetworkFault> {
    let mut batch = Batch::new(IpAddr::from([0; 4]));
    batch.new_table(TABLE);
    batch.delete_table(TABLE);
    batch.commit(format!("removing nftables' table ip {TABLE}"))
}

/// Names the missing kernel feature, if that is the cause.
fn refused(error: io::Error) -> NetworkFault {
    let lacks = match error.raw_os_error() {
        Some(libc::EPROTONOSUPPORT | libc::EOPNOTSUPP) => "nf_tables",
        Some(libc::ENOENT) => "nf_tables' masquerading (nft_chain_nat, nft_masq)",
        _ => return NetworkFault::kernel(format!("adding nftables' table ip {TABLE}"))(error),
    };
    NetworkFault::Host(format!(
        "the kernel lacks {lacks}, needed for NAT on husk0: load its modules, or run the VM with --netns"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs root"]
    fn the_table_is_replaced_and_removed() {
        let work = || {
            remove().unwrap();
            for (net, table) in [
                ("10.77.0.0/20", EgressTable::New),
                ("192.168.0.0/30", EgressTable::Own),
            ] {
                masquerade(net.parse().unwrap(), "husk0", &["husk0", "eth0", "eth1"], table).unwrap();
                assert!(table_exists().unwrap());
            }
            let again = masquerade("10.77.0.0/20".parse().unwrap(), "husk0", &[], EgressTable::New);
            assert_eq!(again.unwrap_err().to_string(), foreign_table().to_string());
            remove().unwrap();
            assert!(!table_exists().unwrap());
        };
        crate::Netns::create().unwrap().run(work).unwrap();
    }

    #[test]
    fn a_missing_kernel_feature_is_named() {
        let told = |number| refused(io::Error::from_raw_os_error(number)).to_string();
        assert_eq!(
            told(libc::EPROTONOSUPPORT),
            "the kernel lacks nf_tables, needed for NAT on husk0: load its modules, or run the VM with --netns"
        );
        assert!(told(libc::EPERM).starts_with("adding nftables' table ip husk: "));
    }
}
