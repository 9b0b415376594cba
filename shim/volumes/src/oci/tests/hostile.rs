//! Malformed and malicious images.

use std::fs::{self, File};
use std::io::Cursor;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use serde_json::{Value, json};
use tar::{Builder, EntryType, Header};

use super::super::ContainerImage;
use super::{Home, Layout, Parts, PathHandle, ScratchDir, docker, gzip, hex, layer, oci, special, zstd};

#[test]
fn only_regular_files_are_disks() {
    let home = Home::new();
    for (kind, what) in [
        (EntryType::Symlink, "a symbolic link"),
        (EntryType::Link, "a hard link"),
        (EntryType::Fifo, "a FIFO"),
        (EntryType::Block, "a device"),
        (EntryType::Char, "a device"),
        (EntryType::Directory, "a directory"),
        (EntryType::GNUSparse, "stored as a sparse file"),
    ] {
        let error = home
            .disk(&[special("disk/a", kind, "/etc/passwd")], None)
            .unwrap_err();
        assert!(
            error.ends_with(&format!("disk/a in it is {what}, not a regular file")),
            "{error}"
        );
    }
}

/// Asserts that an image is refused with one line that names it.
#[track_caller]
fn refuse(home: &Home, path: &Path, reason: &str) {
    let error = home.extract(path, None).unwrap_err();
    assert!(
        error.contains(path.to_str().unwrap()) && error.contains(reason),
        "{error}\nnot {reason}"
    );
}

#[test]
fn content_with_another_digest_is_refused() {
    let home = Home::new();
    let disk = layer(&[("disk/a", &[1; 4096])]);
    let flip = |parts: &mut Parts, name: &str, at: usize| {
        let part = parts.iter_mut().find(|(path, _)| path.ends_with(name)).unwrap();
        part.1[at] ^= 2;
    };
    // Within the file, and after the end of the archive.
    for at in [600, disk.len() - 1] {
        let mut parts = oci(std::slice::from_ref(&disk));
        flip(&mut parts, &hex(&disk), at);
        refuse(
            &home,
            &home.directory(&parts),
            "digest mismatch, computed sha256:",
        );
        let mut parts = docker(std::slice::from_ref(&disk));
        flip(&mut parts, &format!("{}.tar", hex(&disk)), at);
        refuse(&home, &home.archive(&parts), "digest mismatch, computed sha256:");
    }
    let mut parts = oci(std::slice::from_ref(&disk));
    let manifest = parts.len() - 3;
    parts[manifest].1[0] = b' ';
    refuse(&home, &home.directory(&parts), "digest mismatch");
    let mut parts = docker(std::slice::from_ref(&disk));
    let config = parts.len() - 2;
    parts[config].1.push(b' ');
    refuse(&home, &home.archive(&parts), "digest mismatch");
    let mut parts = oci(std::slice::from_ref(&disk));
    parts
        .iter_mut()
        .find(|(path, _)| path.ends_with(&hex(&disk)))
        .unwrap()
        .1
        .push(0);
    refuse(&home, &home.directory(&parts), "bytes instead of");
}

#[test]
fn hostile_layouts_are_refused() {
    let home = Home::new();
    let disk = layer(&[("disk/a", b"a")]);
    let blob = format!("blobs/sha256/{}", hex(&disk));
    let path = home.directory(&oci(std::slice::from_ref(&disk)));
    fs::remove_file(path.join(&blob)).unwrap();
    refuse(&home, &path, "No such file");
    symlink("/etc/passwd", path.join(&blob)).unwrap();
    refuse(&home, &path, "symbolic links");
    fs::remove_file(path.join(&blob)).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, path.join(&blob), mode).unwrap();
    refuse(&home, &path, "is a FIFO, not a regular file");
    File::create(path.join("index.json"))
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    refuse(&home, &path, "index.json has 1099511627776 bytes");

    let mut layout = Layout { parts: Vec::new() };
    let mut nested = layout.image(&[disk]);
    for _ in 0..5 {
        let index = json!({"schemaVersion": 2, "manifests": [nested]}).to_string();
        nested = layout.blob("application/vnd.oci.image.index.v1+json", index.as_bytes());
    }
    refuse(
        &home,
        &home.directory(&layout.index(&[nested])),
        "nested too deeply",
    );
    let mut layout = Layout { parts: Vec::new() };
    let indexes: Vec<_> = (0..1100)
        .map(|number| {
            let index =
                json!({"schemaVersion": 2, "manifests": [], "annotations": {"a": number.to_string()}});
            layout.blob(
                "application/vnd.oci.image.index.v1+json",
                index.to_string().as_bytes(),
            )
        })
        .collect();
    refuse(
        &home,
        &home.directory(&layout.index(&indexes)),
        "it holds too many images",
    );
    let bad = |digest: &str| {
        let mut layout = Layout { parts: Vec::new() };
        layout.blob("x", b"x");
        let manifest =
            json!({"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": 1});
        layout.index(&[manifest])
    };
    refuse(
        &home,
        &home.directory(&bad("sha256:../../../../etc/passwd")),
        "Invalid encoded value",
    );
    refuse(&home, &home.directory(&bad("..:x")), "Empty algorithm");
}

#[test]
fn hostile_archives_are_refused() {
    let home = Home::new();
    let good = home.archive(&oci(&[layer(&[("disk/a", b"a")])]));
    let bytes = fs::read(&good).unwrap();

    refuse(
        &home,
        &home.file(&layer(&[("a", b"a")])),
        "neither index.json nor manifest.json",
    );
    let mut damaged = bytes.clone();
    damaged[1024 + 3] ^= 1;
    assert!(home.extract(&home.file(&damaged), None).is_err());
    refuse(&home, &home.file(&bytes[..700]), "");
    let mut huge = Header::new_gnu();
    huge.set_path("index.json").unwrap();
    huge.set_size(1 << 60);
    huge.set_cksum();
    refuse(
        &home,
        &home.file(huge.as_bytes()),
        "the archive ends within index.json",
    );

    // A long name that would fill the memory. The file is sparse.
    let mut long = Header::new_gnu();
    long.set_entry_type(EntryType::GNULongName);
    long.set_path("././@LongLink").unwrap();
    long.set_size(1 << 40);
    long.set_cksum();
    let path = home.file(long.as_bytes());
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(2 << 40)
        .unwrap();
    refuse(&home, &path, "an extended header has 1099511627776 bytes");

    let mut escaping = Header::new_gnu();
    escaping.as_mut_bytes()[..9].copy_from_slice(b"../../etc");
    escaping.set_size(0);
    escaping.set_cksum();
    refuse(&home, &home.file(escaping.as_bytes()), "leads out of the archive");

    let many: Vec<Value> = vec![json!({"Config": "a", "Layers": []}); 2];
    let saved = layer(&[("manifest.json", json!(many).to_string().as_bytes())]);
    refuse(&home, &home.file(&saved), "it holds 2 images");
    let outside = json!([{"Config": "../a.json", "Layers": []}]).to_string();
    refuse(
        &home,
        &home.file(&layer(&[("manifest.json", outside.as_bytes())])),
        "leads out",
    );
}

#[test]
fn hostile_layers_are_refused() {
    let home = Home::new();
    let refused = |packed: Vec<u8>, reason: &str| {
        refuse(&home, &home.directory(&oci(&[packed])), reason);
    };
    let mut tar = Builder::new(Vec::new());
    let mut header = Header::new_gnu();
    header.set_path("disk/a").unwrap();
    header.set_size(1 << 50);
    header.set_cksum();
    tar.append(&header, Cursor::new([])).unwrap();
    refused(tar.into_inner().unwrap(), "ends within");
    let mut header = Header::new_gnu();
    header.set_path("etc/passwd").unwrap();
    header.set_size(1 << 50);
    header.set_cksum();
    refused(header.as_bytes().to_vec(), "cut short");
    refused(gzip(&layer(&[("disk/a", &[7; 100_000])]))[..200].to_vec(), "");
    refused(zstd(&layer(&[("disk/a", &[7; 100_000])]))[..40].to_vec(), "");
    refused(vec![b'x'; 5000], "damaged");
    let names: Vec<String> = (0..20).map(|n| format!("disk/{n}")).collect();
    let files: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &b""[..])).collect();
    refused(layer(&files), "only one disk is allowed");
    let mut escaping = layer(&[("disk/aaaaaa", b"a")]);
    escaping[..11].copy_from_slice(b"disk/../../");
    let mut header = Header::new_gnu();
    header.as_mut_bytes().copy_from_slice(&escaping[..512]);
    header.set_cksum();
    escaping[..512].copy_from_slice(header.as_bytes());
    refused(escaping, "leads out of the archive");
}

#[test]
fn a_bomb_costs_no_room() {
    let home = Home::new();
    // Many zeros in a few bytes: the disk is a hole.
    let mut tar = Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    let mut header = Header::new_gnu();
    header.set_size(64 << 20);
    tar.append_data(
        &mut header,
        "disk/a",
        std::io::Read::take(std::io::repeat(0), 64 << 20),
    )
    .unwrap();
    let packed = tar.into_inner().unwrap().finish().unwrap();
    let path = home.directory(&oci(&[packed]));
    let image = ContainerImage::find(&PathHandle::on_host(&path).unwrap())
        .unwrap()
        .unwrap();
    let file = image
        .extract(None, &ScratchDir::at(home.0.path()), &|_, _| {})
        .unwrap();
    let metadata = file.metadata().unwrap();
    assert_eq!(metadata.len(), 64 << 20);
    assert!(metadata.blocks() * 512 < 1 << 20);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_damage_gives_an_answer(
        saved in any::<bool>(),
        pack in 0..3,
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        whole in any::<bool>(),
    ) {
        let home = Home::new();
        let plain = layer(&[("disk/a", &[5; 3000]), ("disk/.wh.b", b"")]);
        let packed = match pack { 0 => plain.clone(), 1 => gzip(&plain), _ => zstd(&plain) };
        let parts = if saved { docker(&[plain]) } else { oci(&[packed]) };
        let path = home.archive(&parts);
        let mut bytes = fs::read(&path).unwrap();
        for (index, byte) in &edits {
            let at = index.index(bytes.len());
            bytes[at] = *byte;
        }
        if !whole {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(content) = home.extract(&home.file(&bytes), None) {
            prop_assert_eq!(content, vec![5; 3000]);
        }
    }

    #[test]
    fn any_layer_gives_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..3000), magic in 0..4) {
        let home = Home::new();
        let mut layer = match magic {
            0 => vec![0x1f, 0x8b, 8],
            1 => vec![0x28, 0xb5, 0x2f, 0xfd],
            2 => vec![0x50, 0x2a, 0x4d, 0x18],
            _ => Vec::new(),
        };
        layer.extend(bytes);
        let _ = home.extract(&home.directory(&oci(&[layer])), None);
    }
}
