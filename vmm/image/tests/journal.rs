//! Journals of a crashed guest, written by debugfs, compared with the result of e2fsck on the same image.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::*;

const OLD: u8 = b'o';
const MAGIC: [u8; 4] = [0xc0, 0x3b, 0x39, 0x98];

/// An image whose /boot/k has three blocks of `o`, and the block numbers of that file.
struct Image {
    dir: tempfile::TempDir,
    blocks: Vec<u64>,
    block_size: usize,
}

impl Image {
    fn new(options: &[&str], block_size: usize) -> Self {
        let size = block_size.to_string();
        let options = [options, &["-b", &size]].concat();
        let kernel = vec![OLD; 3 * block_size];
        let bytes = ext(
            16,
            ROOT_UUID,
            &options,
            &[("/boot/k", &kernel), ("/boot/grub/grub.cfg", b"linux /boot/k")],
        );
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("image"), bytes).unwrap();
        let mut image = Self {
            dir,
            blocks: Vec::new(),
            block_size,
        };
        image.blocks = (0..3)
            .map(|i| {
                image
                    .debugfs(&format!("bmap /boot/k {i}\n"))
                    .trim()
                    .parse()
                    .unwrap()
            })
            .collect();
        image
    }

    fn path(&self) -> String {
        self.dir.path().join("image").to_str().unwrap().to_owned()
    }

    fn debugfs(&self, commands: &str) -> String {
        let script = self.dir.path().join("commands");
        fs::write(&script, commands).unwrap();
        let output = Command::new("/sbin/debugfs")
            .args(["-w", "-f", script.to_str().unwrap(), &self.path()])
            .output();
        let output = output.unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines()
            .filter(|l| !l.starts_with("debugfs"))
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// A file of blocks, each starting with what `heads` says and filled up with `fill`.
    fn data(&self, name: &str, fill: u8, heads: &[&[u8]]) -> String {
        let mut bytes = Vec::new();
        for head in heads {
            let mut block = head.to_vec();
            block.resize(self.block_size, fill);
            bytes.extend(block);
        }
        let path = self.dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// The content that Husk reads, after a check that e2fsck leaves the same.
    fn kernel(&self) -> Vec<u8> {
        let bytes = fs::read(self.dir.path().join("image")).unwrap();
        let entry = find(bytes.clone()).unwrap();
        assert_eq!(entry.notes, [""; 0]);
        let ours = read(entry.kernel());
        let copy = self.dir.path().join("copy");
        fs::write(&copy, &bytes).unwrap();
        recover(&copy);
        let theirs = read(find(fs::read(&copy).unwrap()).unwrap().kernel());
        assert!(ours == theirs, "e2fsck makes something else of the journal");
        ours
    }
}

fn recover(image: &Path) {
    let output = Command::new("/sbin/e2fsck")
        .args(["-fy", "-E", "journal_only", image.to_str().unwrap()])
        .output();
    let output = output.unwrap();
    // 1: something was corrected.
    assert!(
        matches!(output.status.code(), Some(0 | 1)),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
}

/// The first byte of each block after its first four.
fn fills(kernel: &[u8], block_size: usize) -> Vec<u8> {
    kernel.chunks(block_size).map(|b| b[4]).collect()
}

#[test]
fn committed_transactions_count_in_every_format() {
    let formats: [(&[&str], usize, &str); 5] = [
        (&["-t", "ext4", "-O", "^metadata_csum"], 4096, "jo"),
        (&["-t", "ext4", "-O", "^metadata_csum,^64bit"], 1024, "jo"),
        (&["-t", "ext4"], 1024, "jo -c -v 2"),
        (&["-t", "ext4"], 4096, "jo -c"),
        (&["-t", "ext4", "-O", "^64bit"], 2048, "jo -c -v 3"),
    ];
    for (options, block_size, open) in formats {
        let image = Image::new(options, block_size);
        let [a, b, c] = image.blocks[..] else { panic!() };
        let (first, second) = (
            image.data("1", b'1', &[b"", &MAGIC]),
            image.data("2", b'2', &[b""]),
        );
        image.debugfs(&format!(
            "{open}\njw -b {a},{b} {first}\njw -b {c} {second}\njc\n"
        ));
        let kernel = image.kernel();
        assert_eq!(fills(&kernel, block_size), b"112", "{options:?} {open}");
        // A block that begins like a journal block is stored with its first bytes cleared.
        assert_eq!(kernel[block_size..][..4], MAGIC);
    }
}

#[test]
fn a_revocation_holds_for_earlier_transactions_only() {
    let image = Image::new(&["-t", "ext4"], 1024);
    let [a, b, c] = image.blocks[..] else { panic!() };
    let (first, second) = (
        image.data("1", b'1', &[b"", b"", b""]),
        image.data("2", b'2', &[b""]),
    );
    image.debugfs(&format!(
        "jo -c\njw -b {a},{b},{c} {first}\njw -r {a}\njw -r {b}\njw -b {b} {second}\njc\n"
    ));
    assert_eq!(fills(&image.kernel(), 1024), b"o21");
}

#[test]
fn a_torn_transaction_does_not_count() {
    let image = Image::new(&["-t", "ext4"], 1024);
    let [a, b, _] = image.blocks[..] else { panic!() };
    let (first, second) = (image.data("1", b'1', &[b""]), image.data("2", b'2', &[b""]));
    image.debugfs(&format!("jo -c\njw -b {a} {first}\njw -b {b} {second}\njc\n"));
    let mut bytes = fs::read(image.path()).unwrap();
    // The second transaction is blocks 4 to 6 of the journal; its commit block is the last.
    let journal: usize = image.debugfs("bmap <8> 0\n").trim().parse().unwrap();
    bytes[(journal + 6) * 1024 + 700] ^= 1;
    fs::write(image.path(), bytes).unwrap();
    assert_eq!(fills(&image.kernel(), 1024), b"1oo");
}

#[test]
fn a_log_is_read_past_its_wrap() {
    let image = Image::new(&["-t", "ext4", "-O", "^metadata_csum"], 1024);
    let [a, b, c] = image.blocks[..] else { panic!() };
    let (first, second) = (image.data("1", b'1', &[b"", b""]), image.data("2", b'2', &[b""]));
    image.debugfs(&format!("jo\njw -b {a},{b} {first}\njw -b {c} {second}\njc\n"));
    let journal: usize = image.debugfs("bmap <8> 0\n").trim().parse().unwrap();
    let mut bytes = fs::read(image.path()).unwrap();
    let log = &mut bytes[journal * 1024..][..1024 * 1024];
    let start = u32::from_be_bytes(log[0x1c..0x20].try_into().unwrap()) as usize;
    let len = u32::from_be_bytes(log[0x10..0x14].try_into().unwrap()) as usize;
    assert_eq!((start, len), (1, 1024));
    // Block 0 is the journal's superblock. The log now begins two blocks before the end: a descriptor and the first
    // of its two data blocks; the rest follows at the front.
    log[1024..].rotate_left(2 * 1024);
    log[0x1c..0x20].copy_from_slice(&1022u32.to_be_bytes());
    fs::write(image.path(), bytes).unwrap();
    assert_eq!(fills(&image.kernel(), 1024), b"112");
}

#[test]
fn a_journal_that_cannot_be_replayed_is_skipped_with_a_note() {
    let image = Image::new(&["-t", "ext3"], 1024);
    let a = image.blocks[0];
    let first = image.data("1", b'1', &[b""]);
    image.debugfs(&format!("jo\njw -b {a} {first}\njc\n"));
    let entry = find(fs::read(image.path()).unwrap()).unwrap();
    assert_eq!(fills(&read(entry.kernel()), 1024), b"ooo");
    assert_eq!(
        entry.notes,
        [
            "whole disk (ext3): its journal was not replayed (the journal is not stored in extents), so its last changes may be missing"
        ]
    );
}

#[test]
fn a_journal_may_hold_the_growth_of_its_filesystem() {
    let image = Image::new(&["-t", "ext4", "-O", "^metadata_csum"], 1024);
    let blocks = || -> Vec<Vec<u8>> {
        let bytes = fs::read(image.path()).unwrap();
        bytes.chunks(1024).map(<[u8]>::to_vec).collect()
    };
    let mut old = blocks();
    let old_count = old.len();
    run("/sbin/resize2fs", &[&image.path(), "32M"]);
    let grown = blocks();
    old.resize(grown.len(), vec![0; 1024]);
    let changed: Vec<usize> = (0..grown.len())
        .filter(|&block| old[block] != grown[block])
        .collect();
    assert!(changed.contains(&1) && changed.iter().any(|&block| block >= old_count));
    let mut commands = "jo\n".to_owned();
    // debugfs marks no last tag in a descriptor that is full: smaller transactions.
    for (number, part) in changed.chunks(64).enumerate() {
        let list: Vec<String> = part.iter().map(ToString::to_string).collect();
        let heads: Vec<&[u8]> = part.iter().map(|&block| grown[block].as_slice()).collect();
        let data = image.data(&number.to_string(), 0, &heads);
        commands += &format!("jw -b {} {data}\n", list.join(","));
    }
    let after = image.data("after", b'1', &[b""]);
    image.debugfs(&format!("{commands}jw -b {} {after}\njc\n", image.blocks[0]));
    // debugfs journals no block past the filesystem's end, so it shrinks only now to what it was.
    let mut bytes = fs::read(image.path()).unwrap();
    for &block in &changed {
        bytes[block * 1024..][..1024].copy_from_slice(&old[block]);
    }
    // Its superblock says that the journal needs recovery.
    bytes[1024 + 0x60] |= 4;
    fs::write(image.path(), bytes).unwrap();
    assert_eq!(fills(&image.kernel(), 1024), b"1oo");
}

#[test]
fn a_journal_with_a_malformed_descriptor_is_replayed_up_to_it_with_a_note() {
    let image = Image::new(&["-t", "ext4", "-O", "^metadata_csum"], 1024);
    let [a, b, _] = image.blocks[..] else { panic!() };
    let (first, second) = (image.data("1", b'1', &[b""]), image.data("2", b'2', &[b""]));
    image.debugfs(&format!("jo\njw -b {a} {first}\njw -b {b} {second}\njc\n"));
    let mut bytes = fs::read(image.path()).unwrap();
    // The second transaction begins in block 4 of the journal; its only tag now names the first block past the end.
    let journal: usize = image.debugfs("bmap <8> 0\n").trim().parse().unwrap();
    bytes[(journal + 4) * 1024 + 12..][..4].copy_from_slice(&16_384u32.to_be_bytes());
    let entry = find(bytes).unwrap();
    assert_eq!(fills(&read(entry.kernel()), 1024), b"1oo");
    assert_eq!(
        entry.notes,
        [
            "whole disk (ext4): its journal was replayed up to a malformed descriptor only, so its last changes may be missing"
        ]
    );
}

#[test]
fn fast_commits_are_noted() {
    let image = Image::new(&["-t", "ext4", "-O", "^metadata_csum,fast_commit"], 1024);
    let data = image.data("1", b'1', &[b""]);
    image.debugfs(&format!("jo\njw -b {} {data}\njc\n", image.blocks[0]));
    let journal: usize = image.debugfs("bmap <8> 0\n").trim().parse().unwrap();
    let mut bytes = fs::read(image.path()).unwrap();
    let be32 = |at: usize| u32::from_be_bytes(bytes[journal * 1024 + at..][..4].try_into().unwrap());
    let (blocks, sequence, fast) = (be32(0x10), be32(0x18), be32(0x54));
    assert!(fast > 0);
    // The kernel sets JBD2_FEATURE_INCOMPAT_FAST_COMMIT when it mounts the file system.
    bytes[journal * 1024 + 0x2b] |= 0x20;
    let area: usize = image
        .debugfs(&format!("bmap <8> {}\n", blocks - fast + 1))
        .trim()
        .parse()
        .unwrap();
    // The head of a fast commit after the transaction, and of one that is left from an earlier time.
    for (tid, notes) in [(sequence + 1, 1), (sequence, 0)] {
        let head = [&[9, 0, 8, 0, 0, 0, 0, 0][..], &tid.to_le_bytes()].concat();
        bytes[area * 1024..][..12].copy_from_slice(&head);
        let entry = find(bytes.clone()).unwrap();
        assert_eq!(fills(&read(entry.kernel()), 1024), b"1oo");
        assert_eq!(entry.notes.len(), notes, "{:?}", entry.notes);
        assert!(
            entry
                .notes
                .iter()
                .all(|note| note.contains("up to fast commits only"))
        );
    }
}
