//! Container images: tar members, compressed layers, and the files of an image.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::host::hex;

pub const BLOCK: usize = 512;
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// A header of a tar archive in GNU format, with a right checksum after `patches`.
pub fn tar_header(name: &[u8], kind: u8, size: u64, patches: &[(u16, u8)]) -> [u8; BLOCK] {
    let mut header = [0; BLOCK];
    let name = &name[..name.len().min(100)];
    header[..name.len()].copy_from_slice(name);
    header[100..108].copy_from_slice(b"0000644\0");
    header[108..116].copy_from_slice(b"0000000\0");
    header[116..124].copy_from_slice(b"0000000\0");
    header[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    header[136..148].copy_from_slice(b"00000000000\0");
    header[156] = kind;
    header[257..265].copy_from_slice(b"ustar  \0");
    for (at, byte) in patches.iter().take(8) {
        header[usize::from(*at) % BLOCK] = *byte;
    }
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

/// Appends a member with its content.
pub fn append(archive: &mut Vec<u8>, header: &[u8; BLOCK], content: &[u8]) {
    archive.extend(header);
    archive.extend(content);
    archive.resize(archive.len().next_multiple_of(BLOCK), 0);
}

/// An archive of regular files. Longer names get an extended header.
pub fn archive(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut archive = Vec::new();
    for (name, content) in files {
        if name.len() > 100 {
            append(
                &mut archive,
                &tar_header(b"././@LongLink", b'L', name.len() as u64, &[]),
                name.as_bytes(),
            );
        }
        let header = tar_header(name.as_bytes(), b'0', content.len() as u64, &[]);
        append(&mut archive, &header, content);
    }
    archive.extend([0; 2 * BLOCK]);
    archive
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).expect("compressed");
    encoder.finish().expect("compressed")
}

pub fn zstd(bytes: &[u8]) -> Vec<u8> {
    compress_to_vec(bytes, CompressionLevel::Fastest)
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Files of an image by path.
#[derive(Debug, Default)]
pub struct Layout {
    pub files: Vec<(String, Vec<u8>)>,
}

impl Layout {
    /// Adds a blob and describes it.
    pub fn blob(&mut self, media_type: &str, content: &[u8]) -> Value {
        let digest = sha256(content);
        self.files
            .push((format!("blobs/sha256/{digest}"), content.to_vec()));
        json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": content.len()})
    }

    /// An OCI image layout with one image.
    pub fn of_layers(layers: &[Vec<u8>]) -> Layout {
        let mut layout = Layout::default();
        let config = layout.blob(CONFIG, b"{}");
        let layers: Vec<Value> = layers.iter().map(|layer| layout.blob(LAYER, layer)).collect();
        let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers});
        let image = layout.blob(MANIFEST, manifest.to_string().as_bytes());
        let index = json!({"schemaVersion": 2, "manifests": [image]});
        layout
            .files
            .push(("index.json".to_owned(), index.to_string().into_bytes()));
        layout
    }

    /// Writes the image into a directory: as files, or as one archive.
    pub fn write(&self, directory: &Path, as_archive: bool) -> PathBuf {
        let path = directory.join("image");
        if as_archive {
            fs::write(&path, archive(&self.files)).expect("written");
            return path;
        }
        for (name, content) in &self.files {
            let file = path.join(name);
            fs::create_dir_all(file.parent().expect("a parent")).expect("made");
            fs::write(file, content).expect("written");
        }
        path
    }
}
