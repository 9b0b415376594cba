//! Reads topology and caches as guests do: Linux's arch/x86/kernel/cpu/topology*.c and cacheinfo.c, and the
//! procedures of the SDM (volume 3A, section 9.9) and the APM (volume 3, section E.5) they follow.

use super::*;

/// One vCPU's entries, looked up as KVM does.
#[derive(Clone, Copy)]
pub struct Cpu<'a>(pub &'a [kvm_cpuid_entry2]);

impl Cpu<'_> {
    fn find(&self, leaf: u32, subleaf: u32) -> Option<kvm_cpuid_entry2> {
        let significant = |e: &&kvm_cpuid_entry2| e.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX != 0;
        let mut entries = self.0.iter().filter(|e| e.function == leaf);
        entries.find(|e| !significant(e) || e.index == subleaf).copied()
    }

    /// A leaf that is not there reads as zero, but for x2APIC ids (KVM's kvm_cpuid).
    pub fn read(&self, leaf: u32, subleaf: u32) -> kvm_cpuid_entry2 {
        self.find(leaf, subleaf).unwrap_or_else(|| {
            let level1 = if matches!(leaf, 0xb | 0x1f) {
                self.find(leaf, 1)
            } else {
                None
            };
            level1.map_or_else(Default::default, |e| kvm_cpuid_entry2 {
                ecx: subleaf & 0xff,
                edx: e.edx,
                ..Default::default()
            })
        })
    }
}

/// Bits that number `n` things.
fn order(n: u32) -> u32 {
    n.next_power_of_two().trailing_zeros()
}

/// Splits an APIC id into package, core and thread.
fn split(id: u32, core_shift: u32, package_shift: u32) -> (u32, u32, u32) {
    let below = |shift: u32| (1 << shift) - 1;
    (
        id >> package_shift,
        (id & below(package_shift)) >> core_shift,
        id & below(core_shift),
    )
}

/// Leaf 0xB or 0x1F.
fn extended(cpu: Cpu<'_>, leaf: u32) -> (u32, u32, u32) {
    assert!(cpu.read(0, 0).eax >= leaf);
    let mut shifts = BTreeMap::new();
    let mut threads = BTreeMap::new();
    for level in 0.. {
        let entry = cpu.read(leaf, level);
        let kind = entry.ecx >> 8 & 0xff;
        if entry.ebx & 0xffff == 0 || kind == 0 {
            break;
        }
        assert_eq!(entry.ecx & 0xff, level);
        shifts.insert(kind, entry.eax & 0x1f);
        threads.insert(kind, entry.ebx & 0xffff);
    }
    assert_eq!(
        shifts.keys().copied().collect::<Vec<_>>(),
        [1, 2],
        "thread and core levels"
    );
    assert!(threads[&1] <= 1 << shifts[&1] && threads[&2] <= 1 << shifts[&2]);
    split(cpu.read(leaf, 0).edx, shifts[&1], shifts[&2])
}

/// Intel before leaf 0xB: leaves 1 and 4.
fn intel_legacy(cpu: Cpu<'_>) -> (u32, u32, u32) {
    let (leaf1, leaf4) = (cpu.read(1, 0), cpu.read(4, 0));
    let cores = order((leaf4.eax >> 26) + 1);
    let package = if leaf1.edx >> 28 & 1 == 1 {
        order(leaf1.ebx >> 16 & 0xff)
    } else {
        cores
    };
    split(leaf1.ebx >> 24, package - cores, package)
}

fn amd_package_shift(cpu: Cpu<'_>) -> u32 {
    assert!(cpu.read(0x8000_0000, 0).eax >= 0x8000_001e);
    let sizes = cpu.read(0x8000_0008, 0).ecx;
    match sizes >> 12 & 0xf {
        0 => order((sizes & 0xff) + 1),
        size => size,
    }
}

/// AMD with topology extensions, without leaf 0xB.
fn amd(cpu: Cpu<'_>) -> (u32, u32, u32) {
    assert_eq!(cpu.read(0x8000_0001, 0).ecx >> 22 & 1, 1, "topology extensions");
    let leaf = cpu.read(0x8000_001e, 0);
    let place = split(
        leaf.eax,
        order((leaf.ebx >> 8 & 0xff) + 1),
        amd_package_shift(cpu),
    );
    assert_eq!(
        (leaf.ecx & 0xff, leaf.ecx >> 8 & 7),
        (place.0, 0),
        "one node in each package"
    );
    assert_eq!(leaf.ebx & 0xff, place.1, "the core's number in its package");
    place
}

type Reader = for<'a> fn(Cpu<'a>) -> (u32, u32, u32);

/// All vCPUs of a machine.
pub struct Guest {
    amd: bool,
    entries: Vec<Vec<kvm_cpuid_entry2>>,
}

impl Guest {
    pub fn new(host: &Host, topology: Topology) -> Self {
        let entries = |index| for_vcpu(&host.supported, topology, TIMING, index);
        Self {
            amd: host.amd,
            entries: (0..topology.vcpus()).map(entries).collect(),
        }
    }

    pub fn vcpus(&self) -> impl Iterator<Item = Cpu<'_>> {
        self.entries.iter().map(|e| Cpu(e))
    }

    /// All ways in which the topology can be read on this vendor's processors.
    pub fn readers(&self) -> Vec<(&'static str, Reader)> {
        let mut readers: Vec<(_, Reader)> = vec![("leaf 0xB", |cpu| extended(cpu, 0xb))];
        if self.vcpus().all(|cpu| cpu.read(0, 0).eax >= 0x1f) {
            readers.push(("leaf 0x1F", |cpu| extended(cpu, 0x1f)));
        }
        readers.push(if self.amd {
            ("leaf 0x8000001E", amd)
        } else {
            ("leaves 1 and 4", intel_legacy)
        });
        readers
    }

    /// Every cache's level, and the vCPUs that share it: those with equal APIC ids without their low bits.
    pub fn caches(&self) -> Vec<(u32, Vec<Vec<u32>>)> {
        let leaf = if self.amd { 0x8000_001d } else { 4 };
        let first = Cpu(&self.entries[0]);
        let present = (0..)
            .map(|index| first.read(leaf, index))
            .take_while(|e| e.eax & 0x1f != 0);
        let described = |cache: kvm_cpuid_entry2| {
            let mut groups = BTreeMap::<u32, Vec<u32>>::new();
            for (number, cpu) in self.vcpus().enumerate() {
                let mine = cpu.read(leaf, cache.index);
                assert_eq!(mine.eax, cache.eax, "all vCPUs describe one cache alike");
                let ids = (mine.eax >> 14 & 0xfff) + 1;
                assert!(
                    ids.is_power_of_two(),
                    "{ids} ids: older Linux takes a range, not a mask"
                );
                groups
                    .entry((cpu.read(1, 0).ebx >> 24) >> order(ids))
                    .or_default()
                    .push(number as u32);
            }
            (cache.eax >> 5 & 7, groups.into_values().collect())
        };
        present.map(described).collect()
    }
}
