//! Alone in its process: other tests would need the program's pages at the same moment.

/// Resident KiB of what is mapped from the program's file and may be executed.
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
fn the_text_goes_and_comes_back() {
    let before = text();
    husk_vmm::memory_trim::drop_text_pages();
    let after = text();
    assert!(after < before, "{after} KiB of {before}");
    // What this needs has to come back.
    assert_eq!(format!("{:?}", Some(1.5)), "Some(1.5)");
}
