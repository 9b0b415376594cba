use proptest::prelude::*;

use super::super::testing::{self, Segment, elf_headers};
use super::super::unpack::tests::pack;
use super::*;

const BASE: u64 = 0x100_0000;
const ALIGN: u64 = 0x20_0000;
const INIT: u64 = 0x40_0000;
const LOAD: u64 = 0x10_0000;
const MEMORY: usize = 64 << 20;
/// Offset of the payload from the load address.
const OFFSET: u32 = 0x100;

/// An ELF file of one segment of `text` at [`BASE`], followed by `lists` of relocations, each after a zero.
fn elf(text: &[u8], lists: &[&[u32]]) -> Vec<u8> {
    let segment = Segment {
        kind: testing::LOAD,
        offset: FIRST_SEGMENT,
        address: BASE,
        in_file: text.len() as u64,
        in_memory: text.len() as u64 + 100,
    };
    let sections = FIRST_SEGMENT + text.len() as u64;
    let mut image = elf_headers(BASE + 4, sections, START_KERNEL_MAP, &[segment]);
    image.resize(FIRST_SEGMENT as usize, 0xee);
    image.extend(text);
    for list in lists {
        image.extend([0; 4]);
        image.extend(list.iter().flat_map(|w| w.to_le_bytes()));
    }
    image
}

fn virtual_address(offset: u64) -> u32 {
    (START_KERNEL_MAP + BASE + offset) as u32
}

/// 64-bit at 8, inverse 32-bit at 16, 32-bit at 24.
fn relocatable() -> Vec<u8> {
    let mut text = vec![0x90; 64];
    text[8..16].copy_from_slice(&(START_KERNEL_MAP + BASE).to_le_bytes());
    text[16..20].copy_from_slice(&0x1000u32.to_le_bytes());
    text[24..28].copy_from_slice(&virtual_address(0).to_le_bytes());
    elf(
        &text,
        &[
            &[virtual_address(8)],
            &[virtual_address(16)],
            &[virtual_address(24)],
        ],
    )
}

/// Guest memory with `vmlinux` packed in a bzImage loaded at [`LOAD`].
fn memory(vmlinux: &[u8]) -> (Vec<u8>, setup_header) {
    let packed = pack(vmlinux);
    let header = setup_header {
        pref_address: BASE,
        init_size: INIT as u32,
        kernel_alignment: ALIGN as u32,
        relocatable_kernel: 1,
        payload_offset: OFFSET,
        payload_length: packed.len() as u32,
        ..Default::default()
    };
    let mut low = vec![0; MEMORY];
    let at = (LOAD + u64::from(OFFSET)) as usize;
    low[at..at + packed.len()].copy_from_slice(&packed);
    (low, header)
}

fn u64_at(low: &[u8], at: u64) -> u64 {
    u64::from_le_bytes(low[at as usize..at as usize + 8].try_into().unwrap())
}

fn u32_at(low: &[u8], at: u64) -> u32 {
    u32::from_le_bytes(low[at as usize..at as usize + 4].try_into().unwrap())
}

#[test]
fn relocations_follow_the_virtual_base_and_segments_the_physical_one() {
    let (mut low, mut header) = memory(&relocatable());
    let entry = unpack(
        &mut low,
        LOAD,
        MEMORY as u64,
        KaslrMode::Full,
        [3, 5],
        &mut header,
    )
    .unwrap();
    let (physical, offset) = (BASE + 3 * ALIGN, 5 * ALIGN);
    assert_eq!(entry, physical + 4);
    assert_eq!(low[physical as usize..physical as usize + 8], [0x90; 8]);
    assert_eq!(u64_at(&low, physical + 8), START_KERNEL_MAP + BASE + offset);
    assert_eq!(u32_at(&low, physical + 16), 0x1000u32.wrapping_sub(offset as u32));
    assert_eq!(u32_at(&low, physical + 24), virtual_address(offset));
    assert_eq!(
        low[physical as usize + 64..physical as usize + 164],
        [0; 100],
        "bss"
    );
    assert_eq!(header.loadflags & KASLR_FLAG, KASLR_FLAG);
}

#[test]
fn without_randomisation_or_relocations_it_keeps_its_virtual_addresses() {
    for (image, kaslr) in [
        (relocatable(), KaslrMode::Off),
        (elf(&[0x90; 64], &[]), KaslrMode::VirtualOnly),
    ] {
        let (mut low, mut header) = memory(&image);
        let entry = unpack(&mut low, LOAD, MEMORY as u64, kaslr, [7, 7], &mut header).unwrap();
        assert_eq!((entry, header.loadflags & KASLR_FLAG), (BASE + 4, 0));
        assert_eq!(
            low[BASE as usize..BASE as usize + 64],
            image[FIRST_SEGMENT as usize..][..64]
        );
    }
}

#[test]
fn random_bases_stay_within_memory() {
    let image = relocatable();
    for limit in [BASE + INIT, BASE + INIT + ALIGN, MEMORY as u64] {
        for number in [0, 1, 17, u64::MAX] {
            let (mut low, mut header) = memory(&image);
            let before = low.clone();
            let entry = unpack(&mut low, LOAD, limit, KaslrMode::Full, [number; 2], &mut header).unwrap();
            let base = entry - 4;
            assert!(
                base >= BASE && base + INIT <= limit && base.is_multiple_of(ALIGN),
                "{base:#x}"
            );
            let moved = u64_at(&low, base + 8) - START_KERNEL_MAP;
            assert!(moved + INIT <= KERNEL_IMAGE_SIZE, "{moved:#x}");
            assert!(low[..(base - FIRST_SEGMENT) as usize] == before[..(base - FIRST_SEGMENT) as usize]);
            assert!(
                low[limit as usize..] == before[limit as usize..],
                "an initrd is left alone"
            );
        }
    }
}

#[test]
fn a_packed_kernel_just_below_the_base_is_not_overwritten() {
    // Incompressible, so that it reaches into the two megabytes below the base.
    let mut state = 1u64;
    let noise: Vec<u8> = (0..29 << 19)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .collect();
    let image = elf(&noise, &[]);
    let (mut low, mut header) = memory(&image);
    header.init_size = 20 << 20;
    let end = LOAD as usize + OFFSET as usize + header.payload_length as usize;
    assert!(
        end > (BASE - FIRST_SEGMENT) as usize && end <= BASE as usize,
        "{end:#x}"
    );
    let before = low[..end].to_vec();
    unpack(&mut low, LOAD, MEMORY as u64, KaslrMode::Off, [0; 2], &mut header).unwrap();
    assert!(low[..end] == before && low[BASE as usize..][..noise.len()] == noise);
}

#[test]
fn kernels_since_6_15_have_two_lists() {
    let linked = BASE..BASE + INIT;
    let image = elf(
        &[0; 64],
        &[&[virtual_address(8)], &[virtual_address(24), virtual_address(32)]],
    );
    let relocations = Vmlinux::parse(&image, &linked).unwrap().relocations.unwrap();
    assert_eq!(
        relocations,
        Relocations {
            add64: vec![8],
            subtract32: vec![],
            add32: vec![24, 32]
        }
    );
}

#[test]
fn unknown_forms_are_left_to_the_decompressor() {
    let outside = virtual_address(INIT);
    let bad = [
        elf(&[0; 64], &[&[outside], &[], &[]]),
        elf(&[0; 64], &[&[], &[], &[], &[]]),
        elf(&[0; 64], &[&[]]),
        [elf(&[0; 64], &[]), vec![1, 2, 3, 4]].concat(),
        elf(&vec![0; INIT as usize + 1], &[]),
        b"\x7fELF\x02\x01".to_vec(),
        Vec::new(),
    ];
    for (i, image) in bad.iter().enumerate() {
        let (mut low, mut header) = memory(image);
        let end = LOAD as usize + OFFSET as usize + header.payload_length as usize;
        let before = low[..end].to_vec();
        assert!(
            unpack(
                &mut low,
                LOAD,
                MEMORY as u64,
                KaslrMode::Full,
                [1; 2],
                &mut header
            )
            .is_none(),
            "{i}"
        );
        assert!(low[..end] == before, "the bzImage is as it was");
    }
    for spoil in [
        |h: &mut setup_header| h.relocatable_kernel = 0,
        |h: &mut setup_header| h.kernel_alignment = 0,
        |h: &mut setup_header| h.init_size = u32::MAX,
        |h: &mut setup_header| h.pref_address = u64::MAX,
    ] {
        let (mut low, mut header) = memory(&relocatable());
        spoil(&mut header);
        assert!(
            unpack(
                &mut low,
                LOAD,
                MEMORY as u64,
                KaslrMode::Full,
                [1; 2],
                &mut header
            )
            .is_none()
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn damaged_kernels_stay_in_bounds(
        flips in prop::collection::vec((0usize..260, any::<u8>()), 1..6),
        seed: [u64; 2],
    ) {
        let mut image = relocatable();
        for (at, value) in flips {
            let at = if at < 120 { at } else { FIRST_SEGMENT as usize + at - 120 };
            let at = at % image.len();
            image[at] = value;
        }
        let (mut low, mut header) = memory(&image);
        if let Some(entry) = unpack(&mut low, LOAD, MEMORY as u64, KaslrMode::Full, seed, &mut header) {
            prop_assert!((BASE..MEMORY as u64).contains(&entry));
        }
    }
}
