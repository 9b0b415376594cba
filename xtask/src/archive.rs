//! Files for an initramfs, in cpio's "newc" format, which the kernel also accepts after another archive.

/// An archive of `files`, by name and content, all executable.
pub fn newc(files: &[(&str, &[u8])]) -> Vec<u8> {
    const FILE: u32 = 0o100_755;
    let mut archive = Vec::new();
    for (inode, (name, content)) in (1..).zip(files) {
        entry(&mut archive, inode, FILE, name, content);
    }
    entry(&mut archive, 0, 0, "TRAILER!!!", &[]);
    archive
}

fn entry(archive: &mut Vec<u8>, inode: u32, mode: u32, name: &str, content: &[u8]) {
    // Inode, mode, owner, group, links, time, size, four device numbers, length of the name, checksum.
    let (size, name_size) = (content.len() as u32, name.len() as u32 + 1);
    let fields = [inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
    archive.extend(b"070701");
    for field in fields {
        archive.extend(format!("{field:08x}").bytes());
    }
    archive.extend(name.bytes());
    archive.push(0);
    pad(archive);
    archive.extend(content);
    pad(archive);
}

/// Pads to the next multiple of four bytes.
pub fn pad(archive: &mut Vec<u8>) {
    archive.resize(archive.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names, modes and contents in an archive, parsed independently of the writer.
    fn read(mut archive: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut found = Vec::new();
        loop {
            assert_eq!(&archive[..6], b"070701");
            let field = |index: usize| {
                let digits = std::str::from_utf8(&archive[6 + index * 8..][..8]).expect("digits");
                u32::from_str_radix(digits, 16).expect("hexadecimal")
            };
            let (mode, size, name_size) = (field(1), field(6) as usize, field(11) as usize);
            let name = String::from_utf8(archive[110..110 + name_size - 1].to_vec()).expect("text");
            let data = (110 + name_size).next_multiple_of(4);
            if name == "TRAILER!!!" {
                assert_eq!(archive.len(), data);
                return found;
            }
            found.push((name, mode, archive[data..data + size].to_vec()));
            archive = &archive[(data + size).next_multiple_of(4)..];
        }
    }

    #[test]
    fn files_of_an_archive_are_read() {
        let archive = newc(&[("script", b"echo a\n"), ("b", b""), ("jobs", b"12345678")]);
        let found = read(&archive);
        let names: Vec<&str> = found.iter().map(|(name, ..)| name.as_str()).collect();
        assert_eq!(names, ["script", "b", "jobs"]);
        assert_eq!(found[0].1, 0o100_755);
        assert_eq!(found[0].2, b"echo a\n");
        assert_eq!(found[2].2, b"12345678");
    }
}
