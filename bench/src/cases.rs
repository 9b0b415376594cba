//! The cases of a benchmark, and the choice of those that are measured.

use crate::peers::{Peer, Peers};
use crate::record::Record;
use anyhow::{Result, ensure};
use clap::ValueEnum;

/// A case of a benchmark: a VMM in one configuration.
pub trait BenchCase: Copy + PartialEq {
    /// Name of the case.
    fn name(self) -> &'static str;

    /// The other VMM of the case, if it is not Husk or QEMU. The case's name begins with that of the VMM.
    fn peer(self) -> Option<Peer> {
        let mut all = [Peer::Firecracker, Peer::CloudHypervisor].into_iter();
        all.find(|peer| self.name().starts_with(peer.name()))
    }

    /// True unless the program of the case's peer is missing.
    fn is_given(self, peers: &Peers) -> bool {
        self.peer().is_none_or(|peer| peers.has(peer))
    }
}

/// Defines the cases of a benchmark with their names, which are also those on the command line.
macro_rules! named_cases {
    (
        $(#[$about:meta])*
        pub enum $all:ident { $($(#[$doc:meta])* $case:ident = $name:literal,)+ }
    ) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, clap::ValueEnum)]
        pub enum $all { $($(#[$doc])* #[value(name = $name)] $case,)+ }

        impl crate::cases::BenchCase for $all {
            fn name(self) -> &'static str {
                match self { $(Self::$case => $name,)+ }
            }
        }
    };
}
pub(crate) use named_cases;

/// The cases to measure, in their own order: those of `only`, or, if it is empty, all but those of peers without a
/// program.
///
/// # Errors
/// A case of `only` needs a program that is not given.
pub fn chosen<C: BenchCase + ValueEnum>(only: &[C], peers: &Peers) -> Result<Vec<C>> {
    for case in only {
        let name = case.name();
        ensure!(
            case.is_given(peers),
            "case {name} needs the program of its VMM: see --help"
        );
    }
    let all = C::value_variants().iter().copied();
    let wanted = all.filter(|case| only.is_empty() || only.contains(case));
    Ok(wanted.filter(|case| case.is_given(peers)).collect())
}

/// Names of all cases, in their own order.
pub fn names<C: BenchCase + ValueEnum>() -> Vec<&'static str> {
    C::value_variants().iter().map(|case| case.name()).collect()
}

/// Names of the cases that have values.
pub fn measured<C: BenchCase + ValueEnum>(record: &Record) -> Vec<&'static str> {
    let mut cases = names::<C>();
    cases.retain(|case| record.has(case));
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{disk, net};

    #[test]
    fn cases_are_measured_in_their_own_order() {
        let none = Peers::default();
        let net = chosen::<net::Case>(&[], &none).unwrap();
        assert!(net.iter().all(|case| case.peer().is_none()));
        let net = chosen(&[net::Case::Q35, net::Case::Husk], &none).unwrap();
        assert_eq!(net, [net::Case::Husk, net::Case::Q35]);
        let disk = chosen::<disk::Case>(&[], &none).unwrap();
        assert!(disk.iter().all(|case| case.peer().is_none()));
        let disk = chosen(&[disk::Case::Q35, disk::Case::Husk], &none).unwrap();
        assert_eq!(disk, [disk::Case::Husk, disk::Case::Q35]);
        let all = Peers {
            firecracker: Some("/fc".into()),
            cloud_hypervisor: Some("/ch".into()),
        };
        let disk = chosen::<disk::Case>(&[], &all).unwrap();
        assert_eq!(disk, disk::Case::value_variants());
        let error = chosen(&[disk::Case::Firecracker], &none).unwrap_err().to_string();
        assert!(error.starts_with("case firecracker needs "), "{error}");
    }
}
