//! The withheld and the added features are the only differences from the host.

use super::*;

/// Differences that are meant, beside [`WITHHELD`] and [`EMPTIED`]: leaf, register, bits.
const WRITTEN: &[(u32, Register, u32)] = &[
    (0x0, Eax, !0),
    (0x1, Ebx, 0xffff_0000),
    (0x1, Ecx, 1 << 31 | 1 << 24),
    (0x1, Edx, 1 << 28),
    (0x4, Eax, 0xffff_c000),
    (KVM_SIGNATURE, Eax, !0),
    (0x8000_0000, Eax, !0),
    (0x8000_0001, Ecx, 1 << 22 | 1 << 1),
    (0x8000_0008, Ecx, 0xf0ff),
    (0x8000_001d, Eax, 0x03ff_c000),
];

fn registers(entry: &kvm_cpuid_entry2) -> [(Register, u32); 4] {
    [
        (Eax, entry.eax),
        (Ebx, entry.ebx),
        (Ecx, entry.ecx),
        (Edx, entry.edx),
    ]
}

#[test]
fn only_withheld_features_are_missing() {
    for host in Host::all() {
        let entries = for_vcpu(
            &host.supported,
            Topology {
                sockets: 1,
                cores: 2,
                threads: 2,
            },
            TIMING,
            3,
        );
        let guest = guest::Cpu(&entries);
        for before in &host.supported {
            let (leaf, index) = (before.function, before.index);
            if EMPTIED.iter().any(|(empty, _)| *empty == leaf) {
                assert!(
                    registers(&guest.read(leaf, index))
                        .iter()
                        .all(|(_, value)| *value == 0),
                    "{leaf:#x}"
                );
                continue;
            }
            if is_rewritten(leaf) {
                continue;
            }
            let after = entries
                .iter()
                .find(|e| (e.function, e.index) == (leaf, index))
                .unwrap();
            assert_eq!(after.flags, before.flags);
            for ((which, before), (_, after)) in registers(before).into_iter().zip(registers(after)) {
                let withheld = WITHHELD
                    .iter()
                    .filter(|w| (w.0, w.1, w.2) == (leaf, index, which))
                    .fold(0, |all, w| all | w.3);
                assert_eq!(after & withheld, 0, "{leaf:#x}.{index} {which:?}");
                let written = WRITTEN
                    .iter()
                    .filter(|w| (w.0, w.1) == (leaf, which))
                    .fold(0, |all, w| all | w.2);
                let kept = !withheld & !written;
                assert_eq!(
                    after & kept,
                    before & kept,
                    "{leaf:#x}.{index} {which:?} on {}",
                    host.name
                );
            }
        }
    }
}

#[test]
fn only_documented_features_are_added() {
    for host in Host::all() {
        let had: BTreeSet<_> = host.supported.iter().map(|e| e.function).collect();
        let entries = for_vcpu(&host.supported, ONE, TIMING, 0);
        let has: BTreeSet<_> = entries.iter().map(|e| e.function).collect();
        let allowed = [0xb, KVM_TIMING, amd::CACHES, amd::TOPOLOGY];
        let added: Vec<_> = has.difference(&had).copied().collect();
        assert!(
            added.iter().all(|leaf| allowed.contains(leaf)),
            "{added:x?} on {}",
            host.name
        );
        assert!(host.amd || !added.iter().any(|leaf| *leaf >= 0x8000_0000));
    }
}

/// A host that has everything: whatever else a processor may yet have, the withheld bits go.
#[test]
fn withheld_bits_are_cleared_on_a_host_with_all_features() {
    let mut host = Host::recorded()[2].clone();
    let leaves = WITHHELD
        .iter()
        .map(|w| (w.0, w.1))
        .chain(EMPTIED.iter().map(|e| (e.0, 0)));
    let all = |(function, index)| kvm_cpuid_entry2 {
        function,
        index,
        eax: !0,
        ebx: !0,
        ecx: !0,
        edx: !0,
        ..Default::default()
    };
    let leaves: BTreeSet<_> = leaves.collect();
    host.supported
        .retain(|e| !leaves.contains(&(e.function, e.index)));
    host.supported.extend(leaves.into_iter().map(all));
    let entries = for_vcpu(&host.supported, ONE, TIMING, 0);
    for (leaf, index, which, mask, reason) in WITHHELD {
        let entry = entries
            .iter()
            .find(|e| (e.function, e.index) == (*leaf, *index))
            .unwrap();
        let value = registers(entry).into_iter().find(|(r, _)| r == which).unwrap().1;
        assert_eq!(value & mask, 0, "{reason}");
    }
    for (leaf, reason) in EMPTIED {
        assert!(!entries.iter().any(|e| e.function == *leaf), "{reason}");
    }
    // MCE and MCA have nothing to do with DS, which lies between and after them.
    let leaf1 = entries.iter().find(|e| e.function == 1).unwrap();
    assert_eq!(
        leaf1.edx & (1 << 7 | 1 << 14),
        1 << 7 | 1 << 14,
        "machine checks stay"
    );
}

#[test]
fn every_withheld_feature_has_one_reason() {
    let bits: BTreeSet<_> = WITHHELD
        .iter()
        .map(|w| (w.0, w.1, format!("{:?}", w.2), w.3))
        .collect();
    assert_eq!(bits.len(), WITHHELD.len());
    assert!(WITHHELD.iter().all(|w| !w.4.is_empty() && w.3 != 0));
    assert!(EMPTIED.iter().all(|e| !e.1.is_empty()));
}

#[test]
fn the_hypervisor_bit_is_set() {
    for host in Host::all() {
        let entries = for_vcpu(&host.supported, ONE, TIMING, 0);
        let guest = guest::Cpu(&entries);
        assert_eq!(guest.read(1, 0).ecx >> 31, 1);
        let kvm = guest.read(KVM_SIGNATURE, 0);
        assert_eq!(
            [kvm.ebx, kvm.ecx, kvm.edx].map(u32::to_le_bytes).concat(),
            b"KVMKVMKVM\0\0\0"
        );
        assert_eq!(guest.read(0x4000_0001, 0).eax, host.find(0x4000_0001, 0).eax);
    }
}

#[test]
fn tsc_deadline_is_set_if_kvm_has_it() {
    for mut host in Host::all() {
        for reported in [false, true] {
            // Newer KVMs report the bit, older ones leave it to the capability.
            let leaf1 = host.supported.iter_mut().find(|e| e.function == 1).unwrap();
            field(&mut leaf1.ecx, 24, 1, reported.into());
            for tsc_deadline in [false, true] {
                let timing = HostTiming {
                    tsc_deadline,
                    ..TIMING
                };
                let entries = for_vcpu(&host.supported, ONE, timing, 0);
                let bit = guest::Cpu(&entries).read(1, 0).ecx >> 24 & 1;
                assert_eq!(bit == 1, tsc_deadline);
            }
        }
    }
}

#[test]
fn a_known_tsc_frequency_is_reported() {
    for host in Host::all() {
        let entries = for_vcpu(&host.supported, ONE, TIMING, 0);
        let guest = guest::Cpu(&entries);
        assert_eq!(guest.read(KVM_SIGNATURE, 0).eax, KVM_TIMING);
        let leaf = guest.read(KVM_TIMING, 0);
        assert_eq!(
            (leaf.eax, leaf.ebx, leaf.ecx, leaf.edx),
            (2_600_000, 1_000_000, 0, 0)
        );
        let entries = for_vcpu(&host.supported, ONE, HostTiming::default(), 0);
        assert!(!entries.iter().any(|e| e.function == KVM_TIMING));
        let highest = guest::Cpu(&entries).read(KVM_SIGNATURE, 0).eax;
        assert_eq!(
            highest,
            host.find(KVM_SIGNATURE, 0).eax,
            "no leaf is announced that is not there"
        );
    }
}

#[test]
fn leaves_that_contradict_the_topology_are_dropped() {
    let mut host = Host::recorded()[0].clone();
    host.supported.push(kvm_cpuid_entry2 {
        function: 0x8000_0026,
        eax: 1,
        ebx: 2,
        ecx: 0x100,
        ..Default::default()
    });
    let entries = for_vcpu(&host.supported, ONE, TIMING, 0);
    assert!(!entries.iter().any(|e| e.function == 0x8000_0026));
}

#[test]
fn caches_of_a_host_without_topology_extensions_keep_their_sizes() {
    let host = &Host::recorded()[1];
    let entries = for_vcpu(&host.supported, ONE, TIMING, 0);
    let size = |index| {
        let cache = guest::Cpu(&entries).read(amd::CACHES, index);
        let (line, ways) = ((cache.ebx & 0xfff) + 1, (cache.ebx >> 22) + 1);
        (
            cache.eax & 0x1f,
            cache.eax >> 5 & 7,
            (line * ways * (cache.ecx + 1)) >> 10,
        )
    };
    assert_eq!(
        [0, 1, 2, 3].map(size),
        [(1, 1, 64), (2, 1, 64), (3, 2, 512), (3, 3, 16384)]
    );
    assert_eq!(guest::Cpu(&entries).read(amd::CACHES, 4).eax, 0, "the list ends");
}
