//! Names of CPUID's feature bits, as in Intel's SDM, AMD's APM and KVM's cpuid.rst.

use super::Register::{self, Eax, Ebx, Ecx, Edx};

/// Names of the bits of one register from bit 0 on. `-`: no name, or no feature.
pub(super) struct FeatureWord {
    pub(super) leaf: u32,
    pub(super) subleaf: u32,
    pub(super) register: Register,
    names: &'static str,
}

impl FeatureWord {
    /// The name of a bit, or its place.
    pub(super) fn name(&self, bit: u32) -> String {
        match self.names.split_whitespace().nth(bit as usize) {
            Some(name) if name != "-" => name.to_owned(),
            _ => format!(
                "CPUID leaf {:#x}.{} {:?} bit {bit}",
                self.leaf, self.subleaf, self.register
            ),
        }
    }
}

const fn word(leaf: u32, subleaf: u32, register: Register, names: &'static str) -> FeatureWord {
    FeatureWord {
        leaf,
        subleaf,
        register,
        names,
    }
}

/// The registers whose bits are features.
pub(super) const WORDS: &[FeatureWord] = &[
    word(
        0x1,
        0,
        Ecx,
        "SSE3 PCLMULQDQ DTES64 MONITOR DS-CPL VMX SMX EIST TM2 SSSE3 CNXT-ID SDBG FMA CMPXCHG16B xTPR PDCM - PCID DCA
         SSE4.1 SSE4.2 x2APIC MOVBE POPCNT TSC-deadline AES XSAVE OSXSAVE AVX F16C RDRAND hypervisor",
    ),
    word(
        0x1,
        0,
        Edx,
        "FPU VME DE PSE TSC MSR PAE MCE CX8 APIC - SEP MTRR PGE MCA CMOV PAT PSE-36 PSN CLFSH - DS ACPI MMX FXSR SSE
         SSE2 SS HTT TM - PBE",
    ),
    word(0x6, 0, Eax, "- - ARAT"),
    word(
        0x7,
        0,
        Ebx,
        "FSGSBASE TSC_ADJUST SGX BMI1 HLE AVX2 FDP_EXCPTN_ONLY SMEP BMI2 ERMS INVPCID RTM RDT-M ZERO_FCS_FDS MPX RDT-A
         AVX512F AVX512DQ RDSEED ADX SMAP AVX512_IFMA - CLFLUSHOPT CLWB PT AVX512PF AVX512ER AVX512CD SHA AVX512BW
         AVX512VL",
    ),
    word(
        0x7,
        0,
        Ecx,
        "PREFETCHWT1 AVX512_VBMI UMIP PKU OSPKE WAITPKG AVX512_VBMI2 CET_SS GFNI VAES VPCLMULQDQ AVX512_VNNI
         AVX512_BITALG TME AVX512_VPOPCNTDQ - LA57 - - - - - RDPID KL BUS_LOCK_DETECT CLDEMOTE - MOVDIRI MOVDIR64B
         ENQCMD SGX_LC PKS",
    ),
    word(
        0x7,
        0,
        Edx,
        "- SGX-KEYS AVX512_4VNNIW AVX512_4FMAPS FSRM UINTR - - AVX512_VP2INTERSECT SRBDS_CTRL MD_CLEAR RTM_ALWAYS_ABORT
         - RTM_FORCE_ABORT SERIALIZE HYBRID TSXLDTRK - PCONFIG ARCH_LBR CET_IBT - AMX-BF16 AVX512_FP16 AMX-TILE AMX-INT8
         IBRS STIBP L1D_FLUSH ARCH_CAPABILITIES CORE_CAPABILITIES SSBD",
    ),
    word(
        0x7,
        1,
        Eax,
        "SHA512 SM3 SM4 RAO-INT AVX-VNNI AVX512_BF16 LASS CMPCCXADD ARCHPERFMONEXT - FZRM FSRS FSRC - - - - FRED LKGS
         WRMSRNS NMI_SRC AMX-FP16 HRESET AVX-IFMA - - LAM MSRLIST - - INVD_DISABLE_POST_BIOS_DONE MOVRS",
    ),
    word(
        0x7,
        1,
        Edx,
        "- - - - AVX-VNNI-INT8 AVX-NE-CONVERT - - AMX-COMPLEX - AVX-VNNI-INT16 - - UTMR PREFETCHI USER_MSR - - CET_SSS
         AVX10 - APX_F",
    ),
    word(0x7, 2, Edx, "PSFD IPRED_CTRL RRSBA_CTRL DDPD_U BHI_CTRL MCDT_NO"),
    word(0x7, 1, Ebx, ""),
    word(0x7, 1, Ecx, ""),
    // The components of XCR0.
    word(
        0xd,
        0,
        Eax,
        "x87 SSE-state AVX-state BNDREGS BNDCSR opmask ZMM_Hi256 Hi16_ZMM - PKRU - - - - - - - XTILECFG XTILEDATA APX",
    ),
    word(0xd, 0, Edx, ""),
    word(0xd, 1, Eax, "XSAVEOPT XSAVEC XGETBV1 XSAVES XFD"),
    // The components of XSS.
    word(0xd, 1, Ecx, "- - - - - - - - PT-state - PASID CET_U CET_S HDC UINTR-state LBR HWP"),
    word(0xd, 1, Edx, ""),
    word(
        0x4000_0001,
        0,
        Eax,
        "KVM_CLOCKSOURCE KVM_NOP_IO_DELAY KVM_MMU_OP KVM_CLOCKSOURCE2 KVM_ASYNC_PF KVM_STEAL_TIME KVM_PV_EOI
         KVM_PV_UNHALT - KVM_PV_TLB_FLUSH KVM_ASYNC_PF_VMEXIT KVM_PV_SEND_IPI KVM_POLL_CONTROL KVM_PV_SCHED_YIELD
         KVM_ASYNC_PF_INT KVM_MSI_EXT_DEST_ID KVM_HC_MAP_GPA_RANGE KVM_MIGRATION_CONTROL - - - - - -
         KVM_CLOCKSOURCE_STABLE",
    ),
    word(
        0x8000_0001,
        0,
        Ecx,
        "LAHF CmpLegacy SVM ExtApicSpace AltMovCr8 ABM SSE4A MisAlignSse 3DNowPrefetch OSVW IBS XOP SKINIT WDT - LWP
         FMA4 TCE - NodeId - TBM TopologyExtensions PerfCtrExtCore PerfCtrExtNB - DataBkptExt PerfTsc PerfCtrExtLLC
         MwaitExtended AdMskExtn",
    ),
    word(
        0x8000_0001,
        0,
        Edx,
        "FPU VME DE PSE TSC MSR PAE MCE CX8 APIC - SYSCALL MTRR PGE MCA CMOV PAT PSE-36 - - NX - MmxExt MMX FXSR FFXSR
         Page1GB RDTSCP - LM 3DNowExt 3DNow",
    ),
    word(0x8000_0007, 0, Ebx, "McaOverflowRecov SUCCOR"),
    word(0x8000_0007, 0, Edx, "TS FID VID TTP TM - 100MHzSteps HwPstate InvariantTSC CPB"),
    word(
        0x8000_0008,
        0,
        Ebx,
        "CLZERO InstRetCntMsr RstrFpErrPtrs INVLPGB RDPRU - BE MCOMMIT - WBNOINVD - - IBPB INT_WBINVD IBRS STIBP
         IbrsAlwaysOn StibpAlwaysOn IbrsPreferred IbrsSameMode EferLmsleUnsupported INVLPGBnestedPages - PPIN SSBD
         SsbdVirtSpecCtrl SsbdNotRequired CPPC PSFD BTC_NO IBPB_RET BranchSampling",
    ),
    word(
        0x8000_0021,
        0,
        Eax,
        "NoNestedDataBp FsGsKernelGsBaseNonSerializing LFenceAlwaysSerializing SmmPgCfgLock - - NullSelectorClearsBase
         UpperAddressIgnore AutomaticIBRS NoSmmCtlMSR FSRS FSRC - PrefetchCtlMsr - - - CpuidUserDis EPSF - - -
         WL_CLASS - ERAPS - - SBPB IBPB_BRTYPE SRSO_NO SRSO_USER_KERNEL_NO SRSO_MSR_FIX",
    ),
];
