//! Leaves of processors of AMD and its licensees.

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use super::register::field;
use super::topology::Topology;

/// Cache topology.
pub(super) const CACHES: u32 = 0x8000_001d;
/// Extended APIC id, core and node.
pub(super) const TOPOLOGY: u32 = 0x8000_001e;

/// AuthenticAMD and HygonGenuine.
pub(super) fn is_vendor(entries: &[kvm_cpuid_entry2]) -> bool {
    let vendors = [*b"Auth", *b"Hygo"].map(u32::from_le_bytes);
    entries
        .iter()
        .any(|e| e.function == 0 && vendors.contains(&e.ebx))
}

/// Leaf 0x8000001E, with one node for each package.
pub(super) fn topology(topology: Topology, apic_id: u32) -> kvm_cpuid_entry2 {
    let package = apic_id >> topology.package_shift();
    let core = (apic_id & ((1 << topology.package_shift()) - 1)) >> topology.core_shift();
    let (mut ebx, mut ecx) = (0, 0);
    field(&mut ebx, 0, 8, core);
    field(&mut ebx, 8, 8, topology.threads - 1);
    field(&mut ecx, 0, 8, package);
    kvm_cpuid_entry2 {
        function: TOPOLOGY,
        eax: apic_id,
        ebx,
        ecx,
        ..Default::default()
    }
}

/// Ways that an associativity code of leaf 0x80000006 stands for.
fn ways(code: u32) -> u32 {
    match code {
        1..=4 => code,
        5 => 6,
        6 => 8,
        8 => 16,
        0xa => 32,
        0xb => 48,
        0xc => 64,
        0xd => 96,
        0xe => 128,
        _ => 0,
    }
}

/// Adds leaf 0x8000001D, derived from leaves 0x80000005 and 0x80000006, in which a host without topology extensions
/// (before family 15h, or itself a guest) describes its caches. The guest needs the extensions to tell threads from
/// cores, and then reads its caches from leaf 0x8000001D.
pub(super) fn add_caches(entries: &mut Vec<kvm_cpuid_entry2>) {
    if entries.iter().any(|e| e.function == CACHES && e.eax & 0x1f != 0) {
        return;
    }
    entries.retain(|e| e.function != CACHES);
    let leaf = |function| {
        entries
            .iter()
            .find(|e| e.function == function)
            .copied()
            .unwrap_or_default()
    };
    let (level1, above) = (leaf(0x8000_0005), leaf(0x8000_0006));
    let (data, code, level2, level3) = (level1.ecx, level1.edx, above.ecx, above.edx);
    // Type, level, bytes, ways, bytes in a line.
    let caches = [
        (1, 1, u64::from(data >> 24) << 10, data >> 16 & 0xff, data & 0xff),
        (2, 1, u64::from(code >> 24) << 10, code >> 16 & 0xff, code & 0xff),
        (
            3,
            2,
            u64::from(level2 >> 16) << 10,
            ways(level2 >> 12 & 0xf),
            level2 & 0xff,
        ),
        (
            3,
            3,
            u64::from(level3 >> 18) << 19,
            ways(level3 >> 12 & 0xf),
            level3 & 0xff,
        ),
    ];
    let entry = |index| kvm_cpuid_entry2 {
        function: CACHES,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        ..Default::default()
    };
    let mut index = 0;
    for (kind, level, size, ways, line) in caches {
        let sets = size.checked_div(u64::from(ways * line)).unwrap_or(0) as u32;
        if sets > 0 {
            let (eax, ebx) = (kind | level << 5 | 1 << 8, (ways - 1) << 22 | (line - 1));
            entries.push(kvm_cpuid_entry2 {
                eax,
                ebx,
                ecx: sets - 1,
                ..entry(index)
            });
            index += 1;
        }
    }
    entries.push(entry(index));
}
