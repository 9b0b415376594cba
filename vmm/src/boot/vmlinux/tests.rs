use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::*;
use crate::layout::Layout;
use crate::memory::{Backing, allocate};

const BASE: u64 = 0x100_0000;
const ALIGN: u64 = 0x20_0000;

fn header() -> setup_header {
    setup_header {
        pref_address: BASE,
        init_size: 0x40_0000,
        kernel_alignment: ALIGN as u32,
        ..Default::default()
    }
}

/// An ELF file of one segment of `text` at [`BASE`], followed by `lists` of relocations, each after a zero.
fn elf(text: &[u8], lists: &[&[u32]]) -> Vec<u8> {
    let mut image = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    let end = 64 + 56 + text.len() as u64;
    image.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [BASE + 4, 64, end] {
        image.extend(word.to_le_bytes());
    }
    image.extend([0; 4]);
    for half in [64u16, 56, 1, 64, 0, 0] {
        image.extend(half.to_le_bytes());
    }
    image.extend([1, 0, 0, 0, 7, 0, 0, 0]);
    for word in [
        120,
        START_KERNEL_MAP + BASE,
        BASE,
        text.len() as u64,
        text.len() as u64,
        ALIGN,
    ] {
        image.extend(word.to_le_bytes());
    }
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

fn memory() -> husk_devices::GuestMem {
    allocate(&Layout::new(64 << 20, 40).unwrap(), Backing::Anonymous).unwrap()
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

#[test]
fn relocations_follow_the_virtual_base_and_segments_the_physical_one() {
    let image = relocatable();
    let mut header = header();
    let vmlinux = Vmlinux::parse(&image, &header).unwrap();
    let mem = memory();
    let mem = mem.memory();
    let entry = vmlinux
        .place(&mem, 64 << 20, Randomise::Both, [3, 5], &mut header)
        .unwrap();
    let (physical, virtual_) = (BASE + 3 * ALIGN, 5 * ALIGN);
    assert_eq!(entry, physical + 4);
    assert_eq!(
        mem.read_obj::<u64>(GuestAddress(physical + 8)).unwrap(),
        START_KERNEL_MAP + BASE + virtual_
    );
    assert_eq!(
        mem.read_obj::<u32>(GuestAddress(physical + 16)).unwrap(),
        0x1000u32.wrapping_sub(virtual_ as u32)
    );
    assert_eq!(
        mem.read_obj::<u32>(GuestAddress(physical + 24)).unwrap(),
        virtual_address(virtual_)
    );
    assert_eq!(header.loadflags & KASLR_FLAG, KASLR_FLAG);
}

#[test]
fn without_randomisation_it_lies_as_linked() {
    for image in [relocatable(), elf(&[0x90; 64], &[])] {
        let mut header = header();
        let mem = memory();
        let mem = mem.memory();
        let vmlinux = Vmlinux::parse(&image, &header).unwrap();
        let entry = vmlinux
            .place(&mem, 64 << 20, Randomise::Nothing, [7, 7], &mut header)
            .unwrap();
        assert_eq!((entry, header.loadflags & KASLR_FLAG), (BASE + 4, 0));
        let mut text = [0; 64];
        mem.read_slice(&mut text, GuestAddress(BASE)).unwrap();
        assert_eq!(text, image[120..184]);
    }
}

#[test]
fn the_bases_stay_where_there_is_room() {
    let image = relocatable();
    for limit in [BASE + 0x40_0000, BASE + 0x60_0000, 64 << 20] {
        for number in [0, 1, 17, u64::MAX] {
            let mut header = header();
            let mem = memory();
            let mem = mem.memory();
            let vmlinux = Vmlinux::parse(&image, &header).unwrap();
            let entry = vmlinux
                .place(&mem, limit, Randomise::Both, [number, number], &mut header)
                .unwrap();
            let base = entry - 4;
            assert!(
                base >= BASE && base + 0x40_0000 <= limit && base.is_multiple_of(ALIGN),
                "{base:#x}"
            );
            let moved = mem.read_obj::<u64>(GuestAddress(base + 8)).unwrap() - START_KERNEL_MAP;
            assert!(moved + 0x40_0000 <= KERNEL_IMAGE_SIZE, "{moved:#x}");
        }
    }
}

#[test]
fn kernels_since_6_15_have_two_lists() {
    let image = elf(
        &[0; 64],
        &[&[virtual_address(8)], &[virtual_address(24), virtual_address(32)]],
    );
    let vmlinux = Vmlinux::parse(&image, &header()).unwrap();
    let relocations = vmlinux.relocations.unwrap();
    assert_eq!(
        [
            relocations.add64.len(),
            relocations.subtract32.len(),
            relocations.add32.len()
        ],
        [4, 0, 8]
    );
}

#[test]
fn what_linux_does_not_make_is_left_to_the_decompressor() {
    let outside = (START_KERNEL_MAP + BASE + 0x40_0000) as u32;
    let bad = [
        elf(&[0; 64], &[&[outside], &[], &[]]),
        elf(&[0; 64], &[&[], &[], &[], &[]]),
        elf(&[0; 64], &[&[]]),
        [elf(&[0; 64], &[]), vec![1, 2, 3, 4]].concat(),
        elf(&vec![0; 0x40_0001], &[]),
        b"\x7fELF\x02\x01".to_vec(),
        Vec::new(),
    ];
    for (i, image) in bad.iter().enumerate() {
        assert!(Vmlinux::parse(image, &header()).is_none(), "{i}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn damaged_kernels_stay_in_bounds(flips in prop::collection::vec((0usize..260, any::<u8>()), 1..6)) {
        let mut image = relocatable();
        for (at, value) in flips {
            let at = at % image.len();
            image[at] = value;
        }
        let mut header = header();
        if let Some(vmlinux) = Vmlinux::parse(&image, &header) {
            let mem = memory();
            let entry = vmlinux.place(&mem.memory(), 64 << 20, Randomise::Both, [1, 1], &mut header).unwrap();
            prop_assert!((BASE..64 << 20).contains(&entry));
        }
    }
}
