//! Images as common tools write them.

mod hostile;

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, GnuExtSparseHeader, Header};

use super::super::error::VolumeFault;
use super::super::path_handle::PathHandle;
use super::super::scratch::ScratchDir;
use super::ContainerImage;

const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// A layer of regular files.
pub(super) fn layer(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    for (path, content) in files {
        let mut header = Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, path, *content).unwrap();
    }
    tar.into_inner().unwrap()
}

/// A layer with one member that is not a file.
pub(super) fn special(path: &str, kind: EntryType, target: &str) -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(0);
    tar.append_link(&mut header, path, target).unwrap();
    tar.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// As zstd:chunked: concatenated frames, one of them skippable.
fn zstd(bytes: &[u8]) -> Vec<u8> {
    let (first, second) = bytes.split_at(bytes.len() / 2);
    let mut packed = compress_to_vec(first, CompressionLevel::Fastest);
    packed.extend([0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3]);
    packed.extend(compress_to_vec(second, CompressionLevel::Fastest));
    packed
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Files of an image by path.
pub(super) type Parts = Vec<(String, Vec<u8>)>;

struct Layout {
    parts: Parts,
}

impl Layout {
    /// Adds a blob and describes it.
    fn blob(&mut self, media_type: &str, content: &[u8]) -> Value {
        let digest = hex(content);
        self.parts
            .push((format!("blobs/sha256/{digest}"), content.to_vec()));
        json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": content.len()})
    }

    fn image(&mut self, layers: &[Vec<u8>]) -> Value {
        let config = self.blob("application/vnd.oci.image.config.v1+json", b"{}");
        let layers: Vec<Value> = layers.iter().map(|layer| self.blob(GZIP, layer)).collect();
        let manifest = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config, "layers": layers,
        });
        self.blob(
            "application/vnd.oci.image.manifest.v1+json",
            manifest.to_string().as_bytes(),
        )
    }

    fn index(mut self, manifests: &[Value]) -> Parts {
        let index = json!({"schemaVersion": 2, "manifests": manifests}).to_string();
        let version = br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec();
        self.parts.push(("oci-layout".into(), version));
        self.parts.push(("index.json".into(), index.into_bytes()));
        self.parts
    }
}

/// An OCI image layout with one image.
pub(super) fn oci(layers: &[Vec<u8>]) -> Parts {
    let mut layout = Layout { parts: Vec::new() };
    let image = layout.image(layers);
    layout.index(&[image])
}

/// Output of `docker save`, with uncompressed layers.
fn docker(layers: &[Vec<u8>]) -> Parts {
    let diff_ids: Vec<String> = layers
        .iter()
        .map(|layer| format!("sha256:{}", hex(layer)))
        .collect();
    let config = json!({
        "architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids}, "history": [],
    })
    .to_string();
    let name = format!("{}.json", hex(config.as_bytes()));
    let mut parts: Parts = layers
        .iter()
        .map(|layer| (format!("{}.tar", hex(layer)), layer.clone()))
        .collect();
    let names: Vec<&String> = parts.iter().map(|(name, _)| name).collect();
    let manifest = json!([{"Config": name, "RepoTags": ["a:b"], "Layers": names}]).to_string();
    parts.push((name, config.into_bytes()));
    parts.push(("manifest.json".into(), manifest.into_bytes()));
    parts
}

/// An archive of an image with these files.
pub(in super::super) fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let parts = docker(&[layer(files)]);
    let parts: Vec<(&str, &[u8])> = parts
        .iter()
        .map(|(path, content)| (path.as_str(), content.as_slice()))
        .collect();
    layer(&parts)
}

pub(super) struct Home(tempfile::TempDir);

impl Home {
    pub(super) fn new() -> Home {
        let home = Home(tempfile::tempdir().unwrap());
        fs::create_dir(home.0.path().join("scratch")).unwrap();
        home
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(super) fn directory(&self, parts: &Parts) -> PathBuf {
        let root = self.0.path().join("layout");
        let _ = fs::remove_dir_all(&root);
        fs::create_dir(&root).unwrap();
        for (path, content) in parts {
            fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
            fs::write(root.join(path), content).unwrap();
        }
        root
    }

    fn archive(&self, parts: &Parts) -> PathBuf {
        let parts: Vec<(&str, &[u8])> = parts
            .iter()
            .map(|(path, content)| (path.as_str(), content.as_slice()))
            .collect();
        self.file(&layer(&parts))
    }

    fn file(&self, content: &[u8]) -> PathBuf {
        let path = self.0.path().join("image.tar");
        fs::write(&path, content).unwrap();
        path
    }

    fn extract(&self, path: &Path, image_path: Option<&str>) -> Result<Vec<u8>, String> {
        let scratch = ScratchDir::at(self.0.path().join("scratch"));
        let text = |fault: VolumeFault| fault.to_string();
        let found = PathHandle::on_host(path).unwrap();
        let image = ContainerImage::find(&found).map_err(text)?.ok_or("no image")?;
        let file = image
            .extract(image_path.map(Path::new), &scratch, &|_, _| {})
            .map_err(text)?;
        assert_eq!(file.metadata().unwrap().nlink(), 0);
        let mut content = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut content, 0).unwrap();
        Ok(content)
    }

    /// The disk of an image, which must be the same for all ways to store the image.
    fn disk(&self, layers: &[Vec<u8>], image_path: Option<&str>) -> Result<Vec<u8>, String> {
        let found = self.extract(&self.directory(&oci(layers)), image_path);
        if let Ok(content) = &found {
            assert_eq!(
                self.extract(&self.archive(&oci(layers)), image_path).as_ref(),
                Ok(content)
            );
            let saved = self.archive(&docker(layers));
            assert_eq!(self.extract(&saved, image_path).as_ref(), Ok(content));
        }
        found
    }
}

#[test]
fn every_way_to_keep_an_image_gives_its_disk() {
    let home = Home::new();
    let disk: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
    let plain = layer(&[("etc/hosts", b"h"), ("disk/any.img", &disk), ("disk.txt", b"t")]);
    for packed in [plain.clone(), gzip(&plain), zstd(&plain)] {
        assert!(home.extract(&home.directory(&oci(std::slice::from_ref(&packed))), None) == Ok(disk.clone()));
        assert!(home.extract(&home.archive(&oci(&[packed])), None) == Ok(disk.clone()));
    }
    assert!(home.extract(&home.archive(&docker(std::slice::from_ref(&plain))), None) == Ok(disk.clone()));
    assert_eq!(
        home.disk(std::slice::from_ref(&plain), Some("etc/hosts")),
        Ok(b"h".to_vec())
    );
    let error = home.disk(&[plain], Some("disk/none")).unwrap_err();
    assert!(error.ends_with("it has no file disk/none"), "{error}");
    assert_eq!(fs::read_dir(home.0.path().join("scratch")).unwrap().count(), 0);
}

#[test]
fn progress_covers_all_layers() {
    let home = Home::new();
    let big = layer(&[("disk/a", &vec![7; 20 << 20])]);
    let small = layer(&[("etc/hosts", &vec![8; 17 << 20])]);
    let path = home.directory(&oci(&[small, big]));
    let image = ContainerImage::find(&PathHandle::on_host(&path).unwrap())
        .unwrap()
        .unwrap();
    let told = std::cell::RefCell::new(Vec::new());
    let scratch = ScratchDir::at(home.0.path());
    image
        .extract(None, &scratch, &|done, size| {
            told.borrow_mut().push((done >> 20, size >> 20))
        })
        .unwrap();
    let told = told.into_inner();
    assert!(told.len() >= 2 && told.is_sorted(), "{told:?}");
    assert!(
        told.iter().all(|(done, size)| done <= size && *size == 37),
        "{told:?}"
    );
}

#[test]
fn upper_layers_replace_and_remove() {
    let home = Home::new();
    let old = layer(&[("disk/a", b"old")]);
    for (upper, wanted) in [
        (vec![layer(&[("disk/a", b"new")])], &b"new"[..]),
        (vec![layer(&[("disk/.wh.a", b""), ("disk/b", b"b")])], b"b"),
        (vec![layer(&[("disk/b", b"b"), ("disk/.wh.a", b"")])], b"b"),
        (vec![layer(&[("disk/b", b"b"), ("disk/.wh..wh..opq", b"")])], b"b"),
        (vec![layer(&[(".wh.disk", b""), ("disk/b", b"b")])], b"b"),
        (
            vec![layer(&[(".wh..wh..opq", b"")]), layer(&[("disk/c", b"c")])],
            b"c",
        ),
        (
            vec![
                special("disk", EntryType::Symlink, "/"),
                layer(&[("disk/c", b"c")]),
            ],
            b"c",
        ),
        (
            vec![layer(&[("disk/.wh.other", b""), ("other/.wh.a", b"")])],
            b"old",
        ),
        // A whiteout only removes files of lower layers.
        (
            vec![layer(&[("disk/.wh.a", b""), ("disk/a", b"again")])],
            b"again",
        ),
    ] {
        let layers: Vec<Vec<u8>> = std::iter::once(old.clone()).chain(upper).collect();
        assert_eq!(home.disk(&layers, None).as_deref(), Ok(wanted));
    }
    let gone = [old.clone(), layer(&[(".wh.disk", b"")])];
    let error = home.disk(&gone, None).unwrap_err();
    assert!(
        error.starts_with("no file found in folder") && error.ends_with("no disk present"),
        "{error}"
    );
    let two = [old, layer(&[("disk/b", b"b")])];
    let error = home.disk(&two, None).unwrap_err();
    assert!(error.starts_with("more than one file found in folder"), "{error}");
}

#[test]
fn names_may_be_long_and_sizes_in_extended_headers() {
    let home = Home::new();
    let name = format!("disk/{}.img", "x".repeat(200));
    assert_eq!(
        home.disk(&[layer(&[(&name, b"long")])], None),
        Ok(b"long".to_vec())
    );
    let mut tar = Builder::new(Vec::new());
    let records = [
        ("path", format!("./{name}").into_bytes()),
        ("size", b"3".to_vec()),
    ];
    tar.append_pax_extensions(records.iter().map(|(key, value)| (*key, value.as_slice())))
        .unwrap();
    let mut header = Header::new_ustar();
    header.set_path("short").unwrap();
    header.set_size(0);
    header.set_cksum();
    let mut layer = tar.into_inner().unwrap();
    layer.truncate(layer.len() - 1024);
    layer.extend(header.as_bytes());
    layer.extend(b"pax");
    layer.resize(layer.len().next_multiple_of(512) + 1024, 0);
    assert_eq!(home.disk(&[layer], None), Ok(b"pax".to_vec()));
}

#[test]
fn headers_with_extents_of_other_files_are_skipped() {
    let home = Home::new();
    let mut sparse = Header::new_gnu();
    sparse.set_path("var/log/lastlog").unwrap();
    sparse.set_entry_type(EntryType::GNUSparse);
    sparse.set_size(3);
    sparse.as_gnu_mut().unwrap().set_is_extended(true);
    sparse.set_cksum();
    let mut more = GnuExtSparseHeader::new();
    more.set_is_extended(true);
    let last = GnuExtSparseHeader::new();
    let mut tar = [*sparse.as_bytes(), *more.as_bytes(), *last.as_bytes()].concat();
    assert!(
        home.disk(&[tar.clone()], None)
            .is_err_and(|error| error.contains("cut short"))
    );
    tar.extend(b"log");
    tar.resize(tar.len().next_multiple_of(512), 0);
    tar.extend(layer(&[("disk/a", b"a")]));
    assert_eq!(home.disk(&[tar], None), Ok(b"a".to_vec()));
}

#[test]
fn the_image_for_this_machine_is_taken() {
    let home = Home::new();
    let mut layout = Layout { parts: Vec::new() };
    let mut amd64 = layout.image(&[layer(&[("disk/a", b"amd64")])]);
    let mut arm64 = layout.image(&[layer(&[("disk/a", b"arm64")])]);
    let mut attestation = layout.image(&[]);
    amd64["platform"] = json!({"architecture": "amd64", "os": "linux"});
    arm64["platform"] = json!({"architecture": "arm64", "os": "linux"});
    attestation["platform"] = json!({"architecture": "unknown", "os": "unknown"});
    // A registry's index of which only a part was exported.
    let mut absent = amd64.clone();
    absent["digest"] = json!(format!("sha256:{}", "0".repeat(64)));
    let nested =
        json!({"schemaVersion": 2, "manifests": [amd64.clone(), arm64, attestation, absent]}).to_string();
    let nested = layout.blob("application/vnd.oci.image.index.v1+json", nested.as_bytes());
    let again = nested.clone();
    let other = layout.image(&[layer(&[("disk/a", b"other")])]);
    let both = Layout {
        parts: layout.parts.clone(),
    };
    let parts = layout.index(&[nested.clone(), again]);
    assert_eq!(home.extract(&home.directory(&parts), None), Ok(b"amd64".to_vec()));
    let error = home
        .extract(&home.directory(&both.index(&[nested, other])), None)
        .unwrap_err();
    assert!(error.contains("it holds 2 images for linux/amd64"), "{error}");
    let error = home
        .extract(&home.directory(&Layout { parts: Vec::new() }.index(&[])), None)
        .unwrap_err();
    // Without blobs it is not an image layout.
    assert_eq!(error, "no image");
}

#[test]
fn other_files_are_not_images() {
    let home = Home::new();
    let none = |path: &Path| {
        ContainerImage::find(&PathHandle::on_host(path).unwrap())
            .unwrap()
            .is_none()
    };
    assert!(none(&home.file(&[0xeb; 4096])));
    assert!(none(&home.file(b"")));
    let mut boot = vec![0; 512];
    boot[257..263].copy_from_slice(b"ustar\0");
    assert!(none(&home.file(&boot)), "without a checksum it is no header");
    let root = home.directory(&vec![("disk/index.json".into(), b"{}".to_vec())]);
    assert!(none(&root) && none(Path::new("/dev/null")));
}
