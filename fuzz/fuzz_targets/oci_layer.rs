//! Layers of a container image, from a program of tar members: files, links, whiteouts, long names, PAX records and
//! headers with any bytes. Asserts that only wanted files appear below the target, with content that the image has for
//! their paths.
#![no_main]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use arbitrary::Arbitrary;
use husk_fuzz::host::{Splice, directory, splice};
use husk_fuzz::oci::{BLOCK, Layout, append, gzip, tar_header, zstd};
use husk_volumes::{ImageFile, unpack_image};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Program {
    layers: Vec<Layer>,
    wanted: u8,
    as_archive: bool,
}

#[derive(Arbitrary, Debug)]
struct Layer {
    packing: Packing,
    members: Vec<Member>,
    no_end: bool,
    damage: Vec<Splice>,
}

#[derive(Arbitrary, Debug)]
enum Packing {
    Plain,
    Gzip,
    Zstd,
}

#[derive(Arbitrary, Debug)]
enum Member {
    File(Name, Vec<u8>),
    Directory(Name),
    Other(Name, Kind),
    Whiteout(Name),
    Opaque(Name),
    LongName(Name, Vec<u8>),
    Pax(Vec<Record>),
    Global(Vec<Record>),
    /// A header with any bytes, and content.
    Patched(Name, Vec<(u16, u8)>, Vec<u8>),
}

#[derive(Arbitrary, Debug)]
enum Kind {
    HardLink,
    Symlink,
    Device,
    Fifo,
    Sparse,
    LongLink,
    Any(u8),
}

#[derive(Arbitrary, Debug)]
enum Record {
    Path(Name),
    Size(u16),
    HugeSize(u64),
    SparseName(Name),
    Sparse,
    Any(Vec<u8>),
}

/// A path of few parts, so that members meet.
#[derive(Arbitrary, Debug)]
struct Name {
    absolute: bool,
    parts: Vec<Part>,
}

#[derive(Arbitrary, Debug)]
enum Part {
    Disk,
    A,
    B,
    Boot,
    Kernel,
    Dot,
    Empty,
    DotDot,
    Unpacking,
    Bytes(Vec<u8>),
}

impl Name {
    fn bytes(&self) -> Vec<u8> {
        let parts = self.parts.iter().take(12).map(|part| match part {
            Part::Disk => b"disk".to_vec(),
            Part::A => b"a".to_vec(),
            Part::B => b"b".to_vec(),
            Part::Boot => b"boot".to_vec(),
            Part::Kernel => b"kernel".to_vec(),
            Part::Dot => b".".to_vec(),
            Part::Empty => Vec::new(),
            Part::DotDot => b"..".to_vec(),
            Part::Unpacking => b".unpacking".to_vec(),
            // A name ends at the first zero.
            Part::Bytes(bytes) => bytes
                .iter()
                .copied()
                .filter(|byte| *byte != 0)
                .take(300)
                .collect(),
        });
        let mut bytes = parts.collect::<Vec<_>>().join(&b'/');
        if self.absolute {
            bytes.insert(0, b'/');
        }
        bytes
    }

    /// A name in the same directory.
    fn beside(&self, prefix: &[u8], whole: bool) -> Vec<u8> {
        let bytes = self.bytes();
        let at = bytes
            .iter()
            .rposition(|byte| *byte == b'/')
            .map_or(0, |at| at + 1);
        match whole {
            true => [&bytes[..], b"/", prefix].concat(),
            false => [&bytes[..at], prefix, &bytes[at..]].concat(),
        }
    }
}

impl Record {
    fn bytes(&self) -> Vec<u8> {
        let pair = match self {
            Record::Path(name) => [&b"path="[..], &name.bytes()].concat(),
            Record::Size(size) => format!("size={size}").into_bytes(),
            Record::HugeSize(size) => format!("size={size}").into_bytes(),
            Record::SparseName(name) => [&b"GNU.sparse.name="[..], &name.bytes()].concat(),
            Record::Sparse => b"GNU.sparse.major=1".to_vec(),
            Record::Any(bytes) => return bytes.clone(),
        };
        // The length counts its own digits.
        let mut length = pair.len() + 3;
        while format!("{length} ").len() + pair.len() + 1 != length {
            length += 1;
        }
        [format!("{length} ").as_bytes(), &pair, b"\n"].concat()
    }
}

/// Appends a member whose name may need an extended header.
fn named(archive: &mut Vec<u8>, name: &[u8], kind: u8, content: &[u8]) {
    if name.len() > 100 {
        append(
            archive,
            &tar_header(b"././@LongLink", b'L', name.len() as u64, &[]),
            name,
        );
    }
    append(
        archive,
        &tar_header(name, kind, content.len() as u64, &[]),
        content,
    );
}

impl Member {
    fn append(&self, archive: &mut Vec<u8>) {
        match self {
            Member::File(name, content) => named(archive, &name.bytes(), b'0', content),
            Member::Directory(name) => named(archive, &name.bytes(), b'5', &[]),
            Member::Other(name, kind) => {
                let kind = match kind {
                    Kind::HardLink => b'1',
                    Kind::Symlink => b'2',
                    Kind::Device => b'4',
                    Kind::Fifo => b'6',
                    Kind::Sparse => b'S',
                    Kind::LongLink => b'K',
                    Kind::Any(kind) => *kind,
                };
                let target = (157u16..).zip(*b"/etc/x");
                let header = tar_header(&name.bytes(), kind, 0, &target.collect::<Vec<_>>());
                append(archive, &header, &[]);
            }
            Member::Whiteout(name) => named(archive, &name.beside(b".wh.", false), b'0', &[]),
            Member::Opaque(name) => named(archive, &name.beside(b".wh..wh..opq", true), b'0', &[]),
            Member::LongName(name, more) => {
                let content = [&name.bytes()[..], more].concat();
                append(
                    archive,
                    &tar_header(b"././@LongLink", b'L', content.len() as u64, &[]),
                    &content,
                );
            }
            Member::Pax(records) | Member::Global(records) => {
                let content: Vec<u8> = records.iter().take(8).flat_map(Record::bytes).collect();
                let kind = if matches!(self, Member::Pax(_)) {
                    b'x'
                } else {
                    b'g'
                };
                append(
                    archive,
                    &tar_header(b"pax", kind, content.len() as u64, &[]),
                    &content,
                );
            }
            Member::Patched(name, patches, content) => {
                append(
                    archive,
                    &tar_header(&name.bytes(), b'0', content.len() as u64, patches),
                    content,
                );
            }
        }
    }

    /// True if the member has the name and the content that its variant says.
    fn is_simple(&self) -> bool {
        match self {
            Member::File(..) | Member::Directory(_) | Member::Whiteout(_) | Member::Opaque(_) => true,
            Member::Other(_, kind) => !matches!(kind, Kind::Any(_)),
            _ => false,
        }
    }
}

impl Layer {
    fn bytes(&self) -> Vec<u8> {
        let mut archive = Vec::new();
        self.members
            .iter()
            .take(24)
            .for_each(|member| member.append(&mut archive));
        if !self.no_end {
            archive.extend([0; 2 * BLOCK]);
        }
        let mut packed = match self.packing {
            Packing::Plain => archive,
            Packing::Gzip => gzip(&archive),
            Packing::Zstd => zstd(&archive),
        };
        splice(&mut packed, &self.damage);
        packed
    }
}

/// The contents that the layers have for a path; none if they may have others.
fn contents(layers: &[Layer], path: &Path) -> Option<BTreeSet<Vec<u8>>> {
    let mut found = BTreeSet::new();
    for layer in layers.iter().take(3) {
        if !layer.damage.is_empty() || !layer.members.iter().all(Member::is_simple) {
            return None;
        }
        for member in layer.members.iter().take(24) {
            if let Member::File(name, content) = member {
                let bytes = name.bytes();
                let parts = bytes
                    .split(|byte| *byte == b'/')
                    .filter(|part| !matches!(*part, b"" | b"."));
                if parts.eq(path.as_os_str().as_encoded_bytes().split(|byte| *byte == b'/')) {
                    found.insert(content.clone());
                }
            }
        }
    }
    Some(found)
}

/// The files below a directory, which has only files and directories.
fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("read") {
        let path = entry.expect("an entry").path();
        let kind = fs::symlink_metadata(&path).expect("there").file_type();
        if kind.is_dir() {
            files(&path, found);
        } else {
            assert!(kind.is_file(), "{} is no file", path.display());
            found.push(path);
        }
    }
}

fuzz_target!(|program: Program| {
    let layers: Vec<Vec<u8>> = program.layers.iter().take(3).map(Layer::bytes).collect();
    let home = directory();
    let image = Layout::of_layers(&layers).write(home.path(), program.as_archive);
    let all = [
        ImageFile::Disk,
        ImageFile::At("boot/kernel".into()),
        ImageFile::At("disk/a".into()),
    ];
    let chosen = (0..all.len()).filter(|n| program.wanted >> n & 1 == 1);
    let wanted: Vec<ImageFile> = chosen.map(|n| all[n].clone()).collect();
    let target = home.path().join("target");
    let done = unpack_image(&image, &wanted, &target, &|_, _| {});
    let mut names: Vec<_> = fs::read_dir(home.path())
        .expect("read")
        .map(|entry| entry.expect("an entry").file_name())
        .collect();
    names.sort();
    assert!(names == ["image", "target"] || names == ["image"], "{names:?}");
    let mut unpacked = Vec::new();
    if target.exists() {
        files(&target, &mut unpacked);
    }
    if done.is_err() {
        return;
    }
    for file in unpacked {
        let path = file.strip_prefix(&target).expect("below").to_owned();
        let is_wanted = wanted.iter().any(|wanted| match wanted {
            ImageFile::Disk => path.parent() == Some(Path::new("disk")),
            ImageFile::At(wanted) => *wanted == path,
        });
        assert!(is_wanted, "{} was not wanted", path.display());
        if let Some(contents) = contents(&program.layers, &path) {
            assert!(
                contents.contains(&fs::read(&file).expect("read")),
                "{} has other content",
                path.display()
            );
        }
    }
});
