//! Files for an initramfs, in cpio's "newc" format, which the kernel also accepts after another archive.

use std::collections::BTreeSet;
use std::path::Path;

const FILE: u32 = 0o100_755;
const FOLDER: u32 = 0o040_755;

/// An archive of `files`, by path and content, all executable, with the folders that they are in.
pub fn newc(files: &[(&str, &[u8])]) -> Vec<u8> {
    let paths = files.iter().map(|(path, _)| Path::new(path));
    let folders: BTreeSet<&Path> = paths.flat_map(|path| path.ancestors().skip(1)).collect();
    let folders = folders.iter().filter_map(|folder| folder.to_str());
    let folders = folders.filter(|folder| !folder.is_empty());
    let folders = folders.map(|folder| (FOLDER, folder, &[][..]));
    let files = files.iter().map(|(path, content)| (FILE, *path, *content));
    let mut archive = Vec::new();
    for (inode, (mode, path, content)) in (1..).zip(folders.chain(files)) {
        entry(&mut archive, inode, mode, path, content);
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
        assert_eq!(found[0].1, FILE);
        assert_eq!(found[0].2, b"echo a\n");
        assert_eq!(found[2].2, b"12345678");
    }

    #[test]
    fn folders_come_before_what_is_in_them() {
        let found = read(&newc(&[("bin/sh", b""), ("lib/a/b", b""), ("lib/c", b"")]));
        let names: Vec<_> = found
            .iter()
            .map(|(name, mode, _)| (name.as_str(), *mode))
            .collect();
        let folders = [("bin", FOLDER), ("lib", FOLDER), ("lib/a", FOLDER)];
        let files = [("bin/sh", FILE), ("lib/a/b", FILE), ("lib/c", FILE)];
        assert_eq!(names, [folders, files].concat());
    }
}
