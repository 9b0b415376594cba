//! The policy on recorded hosts, read back the way guests read it.

use std::collections::{BTreeMap, BTreeSet};

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use proptest::prelude::*;

use super::*;

mod check;
mod guest;
mod host;
mod policy;

use guest::Guest;
use host::{Host, hosts};

const TIMING: HostTiming = HostTiming {
    tsc_khz: 2_600_000,
    tsc_deadline: true,
};
const ONE: Topology = Topology {
    sockets: 1,
    cores: 1,
    threads: 1,
};

fn topologies() -> impl Strategy<Value = Topology> {
    let factors = (1u32..=5, 1u32..=20, 1u32..=4);
    factors
        .prop_map(|(sockets, cores, threads)| Topology {
            sockets,
            cores,
            threads,
        })
        .prop_filter("APIC ids end at 254", |t| t.check().is_ok())
}

/// Counts packages, cores and threads. Every package must have equal numbers.
fn count(places: &[(u32, u32, u32)]) -> Topology {
    let mut cores = BTreeMap::<_, BTreeSet<_>>::new();
    for &(package, core, thread) in places {
        assert!(
            cores.entry((package, core)).or_default().insert(thread),
            "two vCPUs in one place: {places:?}"
        );
    }
    let mut packages = BTreeMap::<_, BTreeSet<_>>::new();
    for &(package, core) in cores.keys() {
        packages.entry(package).or_default().insert(core);
    }
    let same = |sizes: BTreeSet<usize>| {
        assert_eq!(sizes.len(), 1, "uneven: {places:?}");
        sizes.into_iter().next().unwrap() as u32
    };
    Topology {
        sockets: packages.len() as u32,
        cores: same(packages.values().map(BTreeSet::len).collect()),
        threads: same(cores.values().map(BTreeSet::len).collect()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_reader_finds_the_topology(topology in topologies(), host in hosts()) {
        let guest = Guest::new(&host, topology);
        for (reader, places) in guest.readers() {
            let places: Vec<_> = guest.vcpus().map(places).collect();
            prop_assert_eq!(count(&places), topology, "{} on {}", reader, host.name);
            for (index, &(package, core, thread)) in places.iter().enumerate() {
                let index = index as u32;
                let expected = (
                    index / topology.threads / topology.cores,
                    index / topology.threads % topology.cores,
                    index % topology.threads,
                );
                prop_assert_eq!((package, core, thread), expected, "{} on {}", reader, host.name);
            }
        }
    }

    #[test]
    fn apic_ids_are_unique_and_the_same_in_every_leaf(topology in topologies(), host in hosts()) {
        let guest = Guest::new(&host, topology);
        let mut seen = BTreeSet::new();
        for cpu in guest.vcpus() {
            let id = cpu.read(1, 0).ebx >> 24;
            prop_assert!(seen.insert(id));
            let mut leaves = vec![0xb];
            leaves.extend((cpu.read(0, 0).eax >= 0x1f).then_some(0x1f));
            for (leaf, level) in leaves.into_iter().flat_map(|l| [(l, 0), (l, 1), (l, 2), (l, 7)]) {
                prop_assert_eq!(cpu.read(leaf, level).edx, id);
            }
            if host.amd {
                prop_assert_eq!(cpu.read(0x8000_001e, 0).eax, id);
            }
        }
    }

    #[test]
    fn first_caches_are_a_cores_own_and_the_last_a_packages(topology in topologies(), host in hosts()) {
        let guest = Guest::new(&host, topology);
        let caches = guest.caches();
        let levels: Vec<_> = caches.iter().map(|(level, _)| *level).collect();
        prop_assert_eq!(levels, [1, 1, 2, 3], "{}", host.name);
        for (level, groups) in caches {
            let per_core = topology.threads;
            let members = if level == 3 { topology.cores * per_core } else { per_core };
            let expected: Vec<Vec<u32>> =
                (0..topology.vcpus()).collect::<Vec<_>>().chunks(members as usize).map(<[u32]>::to_vec).collect();
            prop_assert_eq!(groups, expected, "level {} on {}", level, host.name);
        }
    }

    #[test]
    fn every_entry_is_unique(topology in topologies(), host in hosts()) {
        for cpu in Guest::new(&host, topology).vcpus() {
            let mut seen = BTreeSet::new();
            for entry in cpu.0 {
                let significant = entry.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX != 0;
                prop_assert!(significant || entry.index == 0);
                prop_assert!(seen.insert((entry.function, entry.index)), "{:#x}", entry.function);
            }
            for &(function, index) in &seen {
                let all_or_none = cpu.0.iter().filter(|e| e.function == function);
                let flags: BTreeSet<_> = all_or_none.map(|e| e.flags).collect();
                prop_assert_eq!(flags.len(), 1, "{:#x}.{}", function, index);
            }
        }
    }
}

#[test]
fn topologies_without_apic_ids_are_refused() {
    let check = |sockets, cores, threads| {
        Topology {
            sockets,
            cores,
            threads,
        }
        .check()
    };
    assert_eq!(check(0, 1, 1), Err(TopologyError::Invalid(0, 1, 1)));
    assert_eq!(check(1, 256, 1), Err(TopologyError::Invalid(1, 256, 1)));
    assert_eq!(
        check(u32::MAX, u32::MAX, u32::MAX),
        Err(TopologyError::Invalid(u32::MAX, u32::MAX, u32::MAX))
    );
    // 127 x 2 = 254 vCPUs, numbered without holes.
    assert!(check(1, 127, 2).is_ok());
    assert!(check(255, 1, 1).is_ok());
    assert_eq!(
        check(128, 1, 2),
        Err(TopologyError::TooMany {
            vcpus: 256,
            apic_id: 255
        })
    );
    // Few vCPUs, but every socket leaves a hole of 3 x 64 ids.
    assert_eq!(
        check(5, 33, 1),
        Err(TopologyError::TooMany {
            vcpus: 165,
            apic_id: 288
        })
    );
}

#[test]
fn the_largest_lists_fit() {
    for mut host in Host::recorded() {
        // A host that reports as many entries as possible, with room for those that are added.
        for function in 0x4100_0000.. {
            if host.supported.len() == KVM_MAX_CPUID_ENTRIES - 12 {
                break;
            }
            host.supported.push(kvm_cpuid_entry2 {
                function,
                ..Default::default()
            });
        }
        let entries = for_vcpu(&host.supported, ONE, TIMING, 0);
        assert!(
            CpuId::from_entries(&entries).is_ok(),
            "{}: {}",
            host.name,
            entries.len()
        );
    }
}

#[test]
fn guest_physical_addresses_fit_second_stage_translation() {
    let bits = |eax| {
        let entry = kvm_cpuid_entry2 {
            function: 0x8000_0008,
            eax,
            ..Default::default()
        };
        physical_address_bits(&CpuId::from_entries(&[entry]).unwrap())
    };
    assert_eq!(bits(0x3028), 40);
    assert_eq!(bits(0x392e), 46);
    assert_eq!(bits(0x3934), 48, "52 bits, not known how many reach");
    assert_eq!(bits(0x30_3934), 48, "52 bits, 48 reach");
    assert_eq!(bits(0x34_3934), 52, "five levels");
    assert_eq!(bits(0x28_3928), 40);
    assert_eq!(physical_address_bits(&CpuId::new(0).unwrap()), 36);
}
