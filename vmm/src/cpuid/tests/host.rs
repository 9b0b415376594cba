//! Recorded answers to KVM_GET_SUPPORTED_CPUID.

use super::*;

/// A host's name and the CPUID entries that its KVM supports.
#[derive(Clone, Debug)]
pub struct Host {
    pub name: &'static str,
    pub amd: bool,
    pub supported: Vec<kvm_cpuid_entry2>,
}

fn parse(text: &str) -> Vec<kvm_cpuid_entry2> {
    let lines: Vec<serde_json::Value> = serde_json::from_str(text).unwrap();
    let entry = |line: &serde_json::Value| {
        let number = |name: &str| line[name].as_u64().unwrap() as u32;
        let hex = |name: &str| {
            let digits = line[name].as_str().unwrap().strip_prefix("0x").unwrap();
            u32::from_str_radix(digits, 16).unwrap()
        };
        kvm_cpuid_entry2 {
            function: hex("function"),
            index: number("index"),
            flags: number("flags"),
            eax: hex("eax"),
            ebx: hex("ebx"),
            ecx: hex("ecx"),
            edx: hex("edx"),
            ..Default::default()
        }
    };
    lines.iter().map(entry).collect()
}

impl Host {
    pub fn recorded() -> [Self; 3] {
        [
            // AMD EPYC of family 1Ah, itself under a hypervisor.
            Self {
                name: "amd-epyc-zen5",
                amd: true,
                supported: parse(include_str!("../fixtures/amd-epyc-zen5.json")),
            },
            // An emulated AMD processor of family 6 with SVM, but without topology extensions.
            Self {
                name: "amd-without-topoext",
                amd: true,
                supported: parse(include_str!("../fixtures/amd-without-topoext.json")),
            },
            // Intel Xeon (Sapphire Rapids), Linux 6.1, from a published CPUID dump that another VMM had shaped. What
            // that VMM had set is put back to what KVM reports: leaves 4, 0xA, 0xB, 0x1F, the APIC id, TSC-deadline,
            // PDCM, DS, DTES64 and WAITPKG bits, and leaf 0xD as it is without the permission to use AMX.
            Self {
                name: "intel-xeon-sapphire-rapids",
                amd: false,
                supported: parse(include_str!("../fixtures/intel-xeon-sapphire-rapids.json")),
            },
        ]
    }

    pub fn find(&self, function: u32, index: u32) -> kvm_cpuid_entry2 {
        let entry = self
            .supported
            .iter()
            .find(|e| e.function == function && e.index == index);
        entry.copied().unwrap_or_default()
    }

    fn change(mut self, name: &'static str, change: impl Fn(&mut kvm_cpuid_entry2)) -> Self {
        self.name = name;
        self.supported.iter_mut().for_each(change);
        self
    }

    /// The recorded hosts, and variants with another vendor's name or a lower highest leaf.
    pub fn all() -> Vec<Self> {
        let [zen5, old, intel] = Self::recorded();
        let hygon = zen5.clone().change("hygon", |e| {
            if e.function == 0 {
                (e.ebx, e.edx, e.ecx) = (0x6f67_7948, 0x656e_6975, 0x656e_6947);
            }
        });
        let short = intel.clone().change("intel-without-leaf-0xb", |e| {
            if e.function == 0 {
                e.eax = 0x7;
            }
        });
        vec![zen5, old, intel, hygon, short]
    }
}

pub fn hosts() -> impl Strategy<Value = Host> {
    prop::sample::select(Host::all())
}
