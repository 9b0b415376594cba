use std::os::unix::fs::FileExt;

use vm_memory::Bytes;

use super::*;

fn layout() -> Layout {
    Layout::new(64 << 20, 40).unwrap()
}

/// A layout with memory above 4 GiB, without a guest of that size.
fn two_regions() -> Layout {
    let ram = vec![0..32 << 20, 4 << 30..(4 << 30) + (16 << 20)];
    let pci_mmio64 = 1 << 39..1 << 40;
    Layout { ram, pci_mmio64 }
}

fn read(ram: &GuestRam, at: u64) -> u32 {
    ram.memory().memory().read_obj(GuestAddress(at)).unwrap()
}

fn write(ram: &GuestRam, at: u64, value: u32) {
    ram.memory().memory().write_obj(value, GuestAddress(at)).unwrap();
}

fn addresses(ram: &GuestRam) -> Vec<usize> {
    ram.memory()
        .memory()
        .iter()
        .map(|region| region.as_ptr() as usize)
        .collect()
}

fn memory_file(file: &Arc<File>) -> MemoryBacking {
    let (name, file) = ("the snapshot's memory".into(), file.clone());
    MemoryBacking::File(MemoryFile { name, file })
}

fn clear(ram: &mut GuestRam) {
    // SAFETY: nothing else uses the memory of these tests.
    unsafe { ram.clear() }.unwrap();
}

#[test]
fn memory_is_aligned_for_huge_pages_and_cleared() {
    for backing in [MemoryBacking::Anonymous, MemoryBacking::Shared] {
        let mut ram = GuestRam::new(&layout(), backing).unwrap();
        if matches!(ram.backing, MemoryBacking::Anonymous) {
            assert_eq!(addresses(&ram)[0] % mapping::THP, 0);
        }
        write(&ram, 0x1000, 0xdead_beef);
        clear(&mut ram);
        assert_eq!(read(&ram, 0x1000), 0);
    }
}

#[test]
fn missing_huge_pages_are_an_error_at_start() {
    let layout = Layout::new(1 << 40, 46).unwrap();
    let error = GuestRam::new(&layout, MemoryBacking::Hugetlb(2 << 20)).unwrap_err();
    assert!(error.to_string().contains("2097152-byte huge pages"), "{error}");
}

#[test]
fn shared_memory_is_a_file_that_others_map() {
    let ram = GuestRam::new(&layout(), MemoryBacking::Shared).unwrap();
    write(&ram, 0x3000, 7);
    let memory = ram.memory().memory();
    let file = memory.iter().next().unwrap().file_offset().unwrap();
    let mut bytes = [0; 4];
    file.file().read_exact_at(&mut bytes, 0x3000).unwrap();
    assert_eq!(u32::from_le_bytes(bytes), 7);
}

#[test]
fn a_memory_file_is_mapped_privately_and_left_by_a_reset() {
    let file = Arc::new(tempfile::tempfile().unwrap());
    let high = 4 << 30;
    file.set_len(48 << 20).unwrap();
    file.write_all_at(&5u32.to_le_bytes(), 0x2000).unwrap();
    file.write_all_at(&6u32.to_le_bytes(), (32 << 20) + 0x2000)
        .unwrap();
    let mut ram = GuestRam::new(&two_regions(), memory_file(&file)).unwrap();
    assert_eq!((read(&ram, 0x2000), read(&ram, high + 0x2000)), (5, 6));
    write(&ram, 0x2000, 9);
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, 0x2000).unwrap();
    assert_eq!(u32::from_le_bytes(bytes), 5, "the file was written");

    let before = addresses(&ram);
    assert!(ram.reports_free_pages());
    clear(&mut ram);
    assert_eq!((read(&ram, 0x2000), read(&ram, high + 0x2000)), (0, 0));
    assert_eq!(addresses(&ram), before);
    assert!(ram.reports_free_pages());
    assert_eq!(Arc::strong_count(&file), 1, "the file is still held");
}

#[test]
fn clearing_marks_all_memory_dirty() {
    let file = Arc::new(tempfile::tempfile().unwrap());
    file.set_len(48 << 20).unwrap();
    for backing in [
        MemoryBacking::Anonymous,
        MemoryBacking::Shared,
        memory_file(&file),
    ] {
        let mut ram = GuestRam::new(&two_regions(), backing).unwrap();
        clear(&mut ram);
        for region in ram.memory().memory().iter() {
            let size = region.size();
            assert!((0..size).step_by(4096).all(|at| region.bitmap().dirty_at(at)));
        }
    }
}

#[test]
fn a_memory_file_of_another_size_or_type_is_refused_by_name() {
    for size in [0, (64 << 20) - 4096, (64 << 20) + 1] {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        let error = GuestRam::new(&layout(), memory_file(&Arc::new(file))).unwrap_err();
        let expected = format!("the snapshot's memory: has {size} bytes");
        assert!(error.to_string().starts_with(&expected), "{error}");
    }
    let device = Arc::new(File::open("/dev/zero").unwrap());
    let error = GuestRam::new(&layout(), memory_file(&device)).unwrap_err();
    assert!(matches!(error, MemoryError::FileType(_)), "{error}");
}
