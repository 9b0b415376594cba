//! The only test in its process: other tests would use the program's pages at the same time.

/// Resident KiB of the executable mappings of the program's file.
fn text() -> u64 {
    let program = std::env::current_exe().unwrap();
    let program = program.to_str().unwrap();
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines();
    let mut resident = 0;
    while let Some(line) = lines.next() {
        if line.ends_with(program) && line.contains(" r-xp ") {
            let rss = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
            resident += rss.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
        }
    }
    resident
}

#[test]
fn text_pages_are_dropped_and_read_again() {
    let before = text();
    husk_vmm::memory_trim::drop_text_pages();
    let after = text();
    assert!(after < before, "{after} KiB of {before}");
    // The code used here is read again.
    assert_eq!(format!("{:?}", Some(1.5)), "Some(1.5)");
}
