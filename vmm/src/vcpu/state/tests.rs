use kvm_bindings::{kvm_cpuid_entry2, kvm_sregs, kvm_xcrs};
use proptest::prelude::*;

use super::tsc::{SavedTsc, TscTarget};
use super::*;
use crate::cpuid::{CpuidBit, Register};

fn parse(text: &str) -> Vec<u32> {
    let texts: Vec<String> = serde_json::from_str(text).unwrap();
    let number = |text: &String| u32::from_str_radix(text.strip_prefix("0x").unwrap(), 16).unwrap();
    texts.iter().map(number).collect()
}

/// Answers to KVM_GET_MSR_INDEX_LIST.
fn lists() -> [Vec<u32>; 3] {
    [
        // Recorded: an AMD EPYC under a paravirtual hypervisor, Linux 6.18.
        parse(include_str!("fixtures/msrs-amd-paravirtual-6.18.json")),
        // Recorded: kvm-amd of Linux 6.12 on a processor that QEMU emulates.
        parse(include_str!("fixtures/msrs-amd-emulated-6.12.json")),
        // Not recorded on a host: the numbers of msrs_to_save_base, msrs_to_save_pmu and emulated_msrs_all of a current
        // Linux, not compared with its source.
        parse(include_str!("fixtures/msrs-intel.json")),
    ]
}

#[test]
fn every_listed_msr_is_saved_but_those_with_a_reason() {
    for listed in lists() {
        let saved = msrs::to_save(&listed);
        let left_out: Vec<u32> = listed
            .iter()
            .copied()
            .filter(|index| !saved.contains(index))
            .collect();
        for index in &left_out {
            let hyper_v = (0x4000_0000..0x4000_0200).contains(index);
            let vmx = (0x480..=0x491).contains(index);
            assert!(hyper_v || vmx || [0x10, 0x6e0].contains(index), "{index:#x}");
        }
        // The TSC and the deadline are saved in another way.
        assert!(left_out.contains(&0x10) && left_out.contains(&0x6e0));
        // MTRRs and machine check banks, which no list has.
        for index in [0x200, 0x250, 0x26f, 0x2ff, 0x400, 0x47f] {
            assert!(!listed.contains(&index) && saved.contains(&index), "{index:#x}");
        }
        assert!(saved.is_sorted_by(|a, b| a < b));
    }
}

#[test]
fn only_msrs_of_hidden_features_may_be_unreadable() {
    // A guest with SPEC_CTRL, RDTSCP, ARCH_CAPABILITIES, XSAVES, IBT, MCA and MTRR.
    let cpuid: Vec<_> = [
        CpuidBit(0x7, 0, Register::Edx, 26),
        CpuidBit(0x7, 0, Register::Edx, 29),
        CpuidBit(0x7, 0, Register::Edx, 20),
        CpuidBit(0x8000_0001, 0, Register::Edx, 27),
        CpuidBit(0xd, 1, Register::Eax, 3),
        CpuidBit(0x1, 0, Register::Edx, 12),
        CpuidBit(0x1, 0, Register::Edx, 14),
    ]
    .map(|CpuidBit(function, index, register, bit)| {
        let value = |which| if register == which { 1 << bit } else { 0 };
        kvm_cpuid_entry2 {
            function,
            index,
            eax: value(Register::Eax),
            ebx: value(Register::Ebx),
            ecx: value(Register::Ecx),
            edx: value(Register::Edx),
            ..Default::default()
        }
    })
    .into();
    let [_, _, intel] = lists();
    let excused: Vec<u32> = msrs::to_save(&intel)
        .into_iter()
        .filter(|&index| hidden::from_guest(index, &cpuid))
        .collect();
    let expected: Vec<u32> = [
        0x3a..=0x3a,
        0xc1..=0xc8,
        0xe1..=0xe1,
        0x186..=0x18d,
        0x1c4..=0x1c5,
        0x309..=0x30c,
    ]
    .into_iter()
    .chain([
        0x345..=0x345,
        0x38d..=0x390,
        0x3f1..=0x3f2,
        0x560..=0x561,
        0x570..=0x572,
    ])
    .chain([0x580..=0x587, 0x600..=0x600, 0x6a4..=0x6a8, 0xd90..=0xd90])
    .flatten()
    .collect();
    assert_eq!(excused, expected);
}

#[test]
fn nested_virtualisation_and_amx_are_refused_by_name() {
    let check = |cr4, efer, xcr0| {
        let sregs = kvm_sregs {
            cr4,
            efer,
            ..Default::default()
        };
        let mut xcrs = kvm_xcrs::default();
        xcrs.xcrs[1].value = xcr0;
        refused::check(&sregs, &xcrs).map_err(|error| error.to_string())
    };
    // A common 64-bit guest with AVX-512 and PKRU.
    assert_eq!(check(0x7506f0, 0xd01, 0x2e7), Ok(()));
    for (cr4, efer, xcr0, name) in [
        (1 << 13, 0xd01, 7, "VMX"),
        (0, 0x1d01, 7, "SVM"),
        (0, 0xd01, 7 | 1 << 17, "AMX"),
        (0, 0xd01, 7 | 1 << 18, "AMX"),
    ] {
        let error = check(cr4, efer, xcr0).unwrap_err();
        assert!(error.contains(&format!("uses {name},")), "{error}");
    }
}

fn saved_tsc(value: u64, offset: Option<u64>) -> SavedTsc {
    let khz = 1_000_000;
    SavedTsc {
        khz,
        value,
        offset,
        scaled: false,
    }
}

#[test]
fn tscs_go_on_from_the_latest_and_keep_their_differences() {
    // The guest has set the second vCPU's TSC 5000 ahead; both were read at nearly the same time.
    let tscs = [saved_tsc(100, Some(0)), saved_tsc(5107, Some(5000))];
    assert_eq!(tsc::latest(&tscs), Some(107));
    let restore_target = |offset| tsc::restore_target(tscs[0], (107, offset), tscs[1]);
    assert_eq!(restore_target(Some(70)), TscTarget::Offset(5070));
    assert_eq!(restore_target(None), TscTarget::Value(107));
    // Offsets are negative as a rule.
    let tscs = [
        saved_tsc(100, Some(0u64.wrapping_sub(900))),
        saved_tsc(90, Some(0u64.wrapping_sub(910))),
    ];
    assert_eq!(tsc::latest(&tscs), Some(100));
    let target = tsc::restore_target(tscs[0], (100, Some(3)), tscs[1]);
    assert_eq!(target, TscTarget::Offset(3u64.wrapping_sub(10)));
    // Kernels without offsets.
    assert_eq!(tsc::latest(&[saved_tsc(1, None), saved_tsc(3, None)]), Some(3));
    assert_eq!(tsc::latest(&[]), None);
}

#[test]
fn a_tsc_is_read_at_the_moment_of_another_clock_unless_kvm_scales_it() {
    let read = SavedTsc {
        khz: 1000,
        value: 150,
        offset: Some(100),
        scaled: false,
    };
    assert_eq!(read.at(57), SavedTsc { value: 157, ..read });
    // A host's TSC that the value and the offset cannot come from.
    assert_eq!(read.at(1 << 40), read);
    assert_eq!(read.at(49), read);
    let unknown = SavedTsc { offset: None, ..read };
    assert_eq!(unknown.at(57), unknown);
    // The scaled TSC is near the host's for some time after the host's start.
    let scaled = SavedTsc { scaled: true, ..read };
    assert_eq!(scaled.at(57), scaled);
    assert_eq!(read.cycles_in(3_000_500), 3000);
    assert_eq!(read.cycles_in(u64::MAX), u64::MAX / 1000);
}

proptest! {
    #[test]
    fn foreign_tscs_never_panic(tscs in prop::collection::vec(any::<(u64, Option<u64>)>(), 0..5), now: Option<u64>) {
        let tscs: Vec<_> = tscs.into_iter().map(|(value, offset)| saved_tsc(value, offset)).collect();
        if let (Some(latest), [first, others @ ..]) = (tsc::latest(&tscs), &tscs[..]) {
            for other in others {
                tsc::restore_target(*first, (latest, now), *other);
            }
        }
    }
}
