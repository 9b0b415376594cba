//! CPUID of saved vCPUs against recorded hosts.

use super::super::names::WORDS;
use super::*;

fn offered(host: &Host) -> Vec<kvm_cpuid_entry2> {
    for_vcpu(&host.supported, ONE, TIMING, 0)
}

fn set(entries: &mut [kvm_cpuid_entry2], bit: CpuidBit) {
    let CpuidBit(leaf, subleaf, which, number) = bit;
    let entry = entries
        .iter_mut()
        .find(|e| (e.function, e.index) == (leaf, subleaf));
    *register(entry.unwrap(), which) |= 1 << number;
}

fn missing(saved: &[kvm_cpuid_entry2], host: &Host) -> Vec<String> {
    match check_saved(saved, &offered(host)) {
        Err(CpuMismatch::Features(names)) => names,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_host_runs_what_it_saved_whatever_the_topology() {
    for host in Host::all() {
        let topology = Topology {
            sockets: 2,
            cores: 2,
            threads: 2,
        };
        for index in 0..8 {
            let mut saved = for_vcpu(&host.supported, topology, TIMING, index);
            // KVM sets these while the guest runs.
            set(&mut saved, CpuidBit(0x1, 0, Ecx, 27));
            set(&mut saved, CpuidBit(0x7, 0, Ecx, 4));
            assert_eq!(check_saved(&saved, &offered(&host)), Ok(()), "{}", host.name);
        }
    }
}

#[test]
fn what_the_host_lacks_is_named() {
    let [zen5, old, _] = Host::recorded();
    let names = missing(&offered(&zen5), &old);
    for name in ["GFNI", "ZMM_Hi256", "CLZERO"] {
        assert!(names.iter().any(|n| n == name), "{name} in {names:?}");
    }
    let mut saved = offered(&zen5);
    set(&mut saved, CpuidBit(0x7, 0, Ebx, 4));
    assert_eq!(missing(&saved, &zen5), ["HLE"]);
    set(&mut saved, CpuidBit(0x1, 0, Ecx, 16));
    assert_eq!(missing(&saved, &zen5), ["CPUID leaf 0x1.0 Ecx bit 16", "HLE"]);
}

#[test]
fn withheld_features_are_named_although_the_host_has_them() {
    let [_, svm, vmx] = Host::recorded();
    for (host, bit, name) in [
        (&svm, CpuidBit(0x8000_0001, 0, Ecx, 2), "SVM"),
        (&vmx, CpuidBit(0x1, 0, Ecx, 5), "VMX"),
        (&vmx, CpuidBit(0x7, 0, Edx, 24), "AMX-TILE"),
        (&vmx, CpuidBit(0x7, 0, Ecx, 7), "CET_SS"),
        (&vmx, CpuidBit(0xd, 0, Eax, 18), "XTILEDATA"),
    ] {
        let mut saved = offered(host);
        set(&mut saved, bit);
        assert_eq!(missing(&saved, host), [name]);
        // Nor by a second entry, which KVM does not show the guest.
        let mut twice = offered(host);
        let mut second = kvm_cpuid_entry2 {
            function: bit.0,
            index: bit.1,
            ..Default::default()
        };
        *register(&mut second, bit.2) = 1 << bit.3;
        twice.push(second);
        assert_eq!(missing(&twice, host), [name]);
    }
}

#[test]
fn leaves_that_guests_read_as_zero_are_named() {
    let [.., host] = Host::recorded();
    for (leaf, ecx) in [(0xa, 0), (0x1d, 1), (0x8000_0022, 0)] {
        let mut saved = offered(&host);
        saved.push(kvm_cpuid_entry2 {
            function: leaf,
            index: ecx,
            ..Default::default()
        });
        assert_eq!(check_saved(&saved, &offered(&host)), Ok(()));
        saved.last_mut().unwrap().ebx = 1;
        assert_eq!(missing(&saved, &host), [format!("CPUID leaf {leaf:#x}")]);
    }
}

#[test]
fn other_differences_have_their_own_reasons() {
    let [amd, _, intel] = Host::recorded();
    let error = check_saved(&offered(&amd), &offered(&intel)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the guest's processor is from AuthenticAMD, the host's from GenuineIntel"
    );
    let mut saved = offered(&intel);
    let leaf = saved.iter_mut().find(|e| e.function == 0x8000_0008).unwrap();
    let host = leaf.eax & 0xff;
    leaf.eax = leaf.eax & !0xff | (host + 1);
    assert_eq!(
        check_saved(&saved, &offered(&intel)),
        Err(CpuMismatch::PhysicalBits {
            saved: host + 1,
            host
        })
    );
    let mut saved = offered(&intel);
    let zmm = saved
        .iter_mut()
        .find(|e| (e.function, e.index) == (0xd, 6))
        .unwrap();
    zmm.ebx += 64;
    assert_eq!(
        check_saved(&saved, &offered(&intel)),
        Err(CpuMismatch::XsaveLayout(6))
    );
}

#[test]
fn words_are_listed_once_and_have_no_more_than_32_names() {
    let places: BTreeSet<_> = WORDS
        .iter()
        .map(|w| (w.leaf, w.subleaf, format!("{:?}", w.register)))
        .collect();
    assert_eq!(places.len(), WORDS.len());
    for word in WORDS {
        assert!(
            word.name(32).contains("bit 32"),
            "{:#x} {:?}",
            word.leaf,
            word.register
        );
    }
    // A name in the wrong place would name another feature.
    let name = |leaf, which, bit| {
        let word = WORDS.iter().find(|w| (w.leaf, w.register) == (leaf, which));
        word.unwrap().name(bit)
    };
    assert_eq!(name(0x1, Ecx, 31), "hypervisor");
    assert_eq!(name(0x1, Edx, 28), "HTT");
    assert_eq!(name(0x7, Ebx, 31), "AVX512VL");
    assert_eq!(name(0x7, Ecx, 30), "SGX_LC");
    assert_eq!(name(0x7, Edx, 31), "SSBD");
    assert_eq!(name(0x8000_0001, Edx, 29), "LM");
    assert_eq!(name(0x8000_0001, Ecx, 22), "TopologyExtensions");
    assert_eq!(name(0x8000_0008, Ebx, 12), "IBPB");
    assert_eq!(name(0x4000_0001, Eax, 24), "KVM_CLOCKSOURCE_STABLE");
    assert_eq!(name(0xd, Eax, 17), "XTILECFG");
}

/// A saved entry, often of a leaf that is compared.
fn entry() -> impl Strategy<Value = kvm_cpuid_entry2> {
    let leaves = prop::sample::select(WORDS.iter().map(|w| (w.leaf, w.subleaf)).collect::<Vec<_>>());
    (prop_oneof![leaves, any::<(u32, u32)>()], any::<[u32; 4]>()).prop_map(|((function, index), r)| {
        kvm_cpuid_entry2 {
            function,
            index,
            eax: r[0],
            ebx: r[1],
            ecx: r[2],
            edx: r[3],
            ..Default::default()
        }
    })
}

proptest! {
    #[test]
    fn nothing_that_the_host_lacks_gets_through(
        host in hosts(),
        foreign in prop::collection::vec(entry(), 0..8),
        word in prop::sample::select((0..WORDS.len()).collect::<Vec<_>>()),
        bit in 0u32..32,
    ) {
        let offered = offered(&host);
        let word = &WORDS[word];
        let bit = CpuidBit(word.leaf, word.subleaf, word.register, bit);
        let mut saved = offered.clone();
        saved.extend(foreign);
        let result = check_saved(&saved, &offered);
        let changing = [CpuidBit(1, 0, Ecx, 27), CpuidBit(7, 0, Ecx, 4), CpuidBit(1, 0, Edx, 28),
            CpuidBit(0x8000_0001, 0, Ecx, 1)];
        if bit.is_set(&saved) && !bit.is_set(&offered) && !changing.contains(&bit) {
            prop_assert!(result.is_err());
        }
    }
}
