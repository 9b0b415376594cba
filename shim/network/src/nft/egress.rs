//! The translation that guests of this machine leave it by.

use std::io;
use std::net::IpAddr;

use ipnet::Ipv4Net;

use super::batch::{Batch, Chain};
use super::expression::rule;
use crate::error::NetworkFault;

/// The table, which nobody else has.
const TABLE: &str = "husk";
const POSTROUTING: Chain = Chain::base("postrouting", libc::NF_INET_POST_ROUTING, 100);

/// Whose the table is that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EgressTable {
    /// Husk's, which is replaced in one go.
    Own,
    /// None is there.
    New,
}

/// Lets what comes from `net` leave by other devices than `bridge` with the address of those.
///
/// There is no chain that lets packets pass: whoever keeps them from it does so in a table of their own, over which
/// this one has no say.
pub(crate) fn masquerade(net: Ipv4Net, bridge: &str, table: EgressTable) -> Result<(), NetworkFault> {
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
    let rule = rule().saddr_in(net).oifname_not(bridge).masquerade();
    batch.new_rule(TABLE, POSTROUTING.name, rule);
    batch.send().map_err(|error| match error.raw_os_error() {
        Some(libc::EEXIST) => foreign_table(),
        _ => refused(error),
    })
}

/// Whether there is such a table, whoever's it is.
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

/// It is there, and not Husk's.
pub(crate) fn foreign_table() -> NetworkFault {
    NetworkFault::Host(format!(
        "nftables has a table ip {TABLE} that Husk did not make: give it another name, or remove it by \
         `nft delete table ip {TABLE}`"
    ))
}

/// Undoes [`masquerade`], if it was done.
pub(crate) fn remove() -> Result<(), NetworkFault> {
    let mut batch = Batch::new(IpAddr::from([0; 4]));
    batch.new_table(TABLE);
    batch.delete_table(TABLE);
    batch.commit(format!("removing nftables' table ip {TABLE}"))
}

/// Says what the kernel lacks, where that is it.
fn refused(error: io::Error) -> NetworkFault {
    let lacks = match error.raw_os_error() {
        Some(libc::EPROTONOSUPPORT | libc::EOPNOTSUPP) => "nf_tables",
        Some(libc::ENOENT) => "nf_tables' masquerading (nft_chain_nat, nft_masq)",
        _ => return NetworkFault::kernel(format!("adding nftables' table ip {TABLE}"))(error),
    };
    NetworkFault::Host(format!(
        "the kernel lacks {lacks}, by which guests on husk0 reach others: load its modules, or run the VM with --netns"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_replaced_and_goes() {
        if !husk_shim_testing::root::is_root() {
            return;
        }
        let work = || {
            remove().unwrap();
            for (net, table) in [
                ("10.77.0.0/20", EgressTable::New),
                ("192.168.0.0/30", EgressTable::Own),
            ] {
                masquerade(net.parse().unwrap(), "husk0", table).unwrap();
                assert!(table_exists().unwrap());
            }
            let again = masquerade("10.77.0.0/20".parse().unwrap(), "husk0", EgressTable::New);
            assert_eq!(again.unwrap_err().to_string(), foreign_table().to_string());
            remove().unwrap();
            assert!(!table_exists().unwrap());
        };
        crate::Netns::create().unwrap().run(work).unwrap();
    }

    #[test]
    fn a_kernel_that_lacks_it_is_told_of() {
        let told = |number| refused(io::Error::from_raw_os_error(number)).to_string();
        assert_eq!(
            told(libc::EPROTONOSUPPORT),
            "the kernel lacks nf_tables, by which guests on husk0 reach others: load its modules, or run the VM with --netns"
        );
        assert!(told(libc::EPERM).starts_with("adding nftables' table ip husk: "));
    }
}
