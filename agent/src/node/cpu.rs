//! The processor of the node, from `/proc/cpuinfo`.

use std::collections::BTreeSet;

/// Features that Husk's guests do not have, although the processor does.
const WITHHELD: [&str; 8] = [
    "amx_bf16", "amx_int8", "amx_tile", "monitor", "sgx", "svm", "vmx", "waitpkg",
];
/// Features whose name in libvirt, and so in KubeVirt, is not Linux's.
const RENAMED: [(&str, &str); 6] = [
    ("avx512_vbmi2", "avx512vbmi2"),
    ("avx512_vnni", "avx512vnni"),
    ("avx512_bitalg", "avx512bitalg"),
    ("sse4_1", "sse4.1"),
    ("sse4_2", "sse4.2"),
    ("fxsr_opt", "fxsr_opt"),
];

/// Vendor and features of a processor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Cpu {
    /// `Intel` or `AMD`.
    pub(super) vendor: Option<&'static str>,
    /// Features that guests can have, by libvirt's names.
    pub(super) features: BTreeSet<String>,
}

impl Cpu {
    /// The processor of this machine; nothing if it is unknown.
    pub(super) fn of_node() -> Cpu {
        Cpu::parse(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
    }

    fn parse(cpuinfo: &str) -> Cpu {
        let value = |key: &str| {
            cpuinfo.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                (name.trim() == key).then(|| value.trim())
            })
        };
        let vendor = match value("vendor_id") {
            Some("GenuineIntel") => Some("Intel"),
            Some("AuthenticAMD") => Some("AMD"),
            _ => None,
        };
        let features = value("flags").unwrap_or_default().split_whitespace();
        let features = features
            .filter(|feature| !WITHHELD.contains(feature))
            .map(|feature| {
                let renamed = RENAMED.iter().find(|(linux, _)| *linux == feature);
                renamed.map_or(feature, |(_, libvirt)| libvirt).to_owned()
            });
        Cpu {
            vendor,
            features: features.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_have_libvirts_names() {
        let text =
            "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu sse4_1 svm avx2\n\nprocessor\t: 1\n";
        let cpu = Cpu::parse(text);
        assert_eq!(cpu.vendor, Some("AMD"));
        let features: Vec<_> = cpu.features.iter().map(String::as_str).collect();
        assert_eq!(features, ["avx2", "fpu", "sse4.1"]);
        assert_eq!(Cpu::parse("model : 1\n:\n"), Cpu::default());
    }
}
