//! From an index to the layers of its one image.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use oci_spec::image::{
    Arch, Descriptor, Digest, DigestAlgorithm, ImageConfiguration, ImageIndex, ImageManifest, MediaType, Os,
};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::digest::DynDigest;

use super::super::error::Reason;
use super::blob_store::{BlobStore, FileSection};
use super::tarball::plain;

/// Limit for an index, manifest or configuration, in bytes.
const MAX_JSON: u64 = 4 << 20;
/// Limit for layers of an image; Docker allows 127.
const MAX_LAYERS: usize = 512;
/// Limit for images and nested indexes.
const MAX_IMAGES: usize = 1024;
/// Limit for nested indexes.
const MAX_DEPTH: usize = 3;
/// Docker's media types of index and manifest.
const DOCKER_INDEX: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";

#[derive(Debug)]
pub(super) struct Layer {
    pub(super) part: PathBuf,
    /// Name in errors.
    pub(super) name: String,
    /// Compressed size in bytes.
    pub(super) size: u64,
    pub(super) digest: LayerDigest,
}

/// Digest of a layer: of the compressed blob, or of the decompressed archive (diffID).
#[derive(Debug)]
pub(super) enum LayerDigest {
    Blob(Digest),
    DiffId(Digest),
}

/// Layers of the image, the lowest first.
pub(super) fn layers(store: &BlobStore) -> Result<Vec<Layer>, Reason> {
    let layers = if store.is_oci() {
        of_oci(store)?
    } else {
        of_docker(store)?
    };
    if layers.len() > MAX_LAYERS {
        return Err(format!(
            "it has {} layers; the maximum is {MAX_LAYERS}",
            layers.len()
        ));
    }
    Ok(layers)
}

fn of_oci(store: &BlobStore) -> Result<Vec<Layer>, Reason> {
    let index: ImageIndex = json(store.open(Path::new("index.json"))?, "index.json", None)?;
    let mut images = BTreeMap::new();
    collect(store, &index, MAX_DEPTH, &mut BTreeSet::new(), &mut images)?;
    let count = images.len();
    let Some((_, image)) = images.pop_first().filter(|_| count == 1) else {
        return Err(match count {
            0 => "it holds no image for linux/amd64".into(),
            _ => format!("it holds {count} images for linux/amd64: export a single one"),
        });
    };
    let manifest: ImageManifest = blob(store, &image)?;
    let layers = manifest.layers().iter().map(|layer| {
        let part = part(layer.digest());
        let size = store.open(&part)?.left();
        if size != layer.size() {
            return Err(format!(
                "layer {} has {size} bytes instead of {}",
                layer.digest(),
                layer.size()
            ));
        }
        Ok(Layer {
            part,
            name: layer.digest().to_string(),
            size,
            digest: LayerDigest::Blob(layer.digest().clone()),
        })
    });
    layers.collect()
}

/// Collects the manifests for linux/amd64 that are present, by digest. An export may list others that it does not
/// contain.
fn collect(
    store: &BlobStore,
    index: &ImageIndex,
    depth: usize,
    seen: &mut BTreeSet<String>,
    into: &mut BTreeMap<String, Descriptor>,
) -> Result<(), Reason> {
    let Some(depth) = depth.checked_sub(1) else {
        return Err("its indexes are nested too deeply".into());
    };
    for descriptor in index.manifests() {
        let digest = descriptor.digest().to_string();
        if seen.contains(&digest) || !store.has(&part(descriptor.digest())) {
            continue;
        }
        if seen.len() >= MAX_IMAGES {
            return Err("it holds too many images".into());
        }
        seen.insert(digest.clone());
        let fits = descriptor
            .platform()
            .as_ref()
            .is_none_or(|platform| *platform.os() == Os::Linux && *platform.architecture() == Arch::Amd64);
        match descriptor.media_type() {
            MediaType::ImageIndex => collect(store, &blob(store, descriptor)?, depth, seen, into)?,
            MediaType::Other(kind) if kind == DOCKER_INDEX => {
                collect(store, &blob(store, descriptor)?, depth, seen, into)?;
            }
            MediaType::ImageManifest if fits => {
                into.insert(digest, descriptor.clone());
            }
            MediaType::Other(kind) if fits && kind == DOCKER_MANIFEST => {
                into.insert(digest, descriptor.clone());
            }
            _ => {}
        }
    }
    Ok(())
}

/// `manifest.json` of `docker save`.
#[derive(Deserialize)]
struct DockerManifest {
    #[serde(rename = "Config")]
    config: String,
    #[serde(rename = "Layers")]
    layers: Vec<String>,
}

fn of_docker(store: &BlobStore) -> Result<Vec<Layer>, Reason> {
    let manifest = Path::new("manifest.json");
    if !store.has(manifest) {
        return Err("neither index.json nor manifest.json is in it".into());
    }
    let mut saved: Vec<DockerManifest> = json(store.open(manifest)?, "manifest.json", None)?;
    let count = saved.len();
    let Some(saved) = saved.pop().filter(|_| count == 1) else {
        return Err(format!("it holds {count} images: save a single one"));
    };
    let config = plain(saved.config.as_bytes())?;
    // The configuration's file name is its digest, in every version of the format.
    let stem = config
        .file_stem()
        .and_then(|stem| stem.to_str())
        .unwrap_or_default();
    let digest = Digest::from_str(&format!("sha256:{stem}")).ok();
    let config: ImageConfiguration = json(store.open(&config)?, &saved.config, digest.as_ref())?;
    let diff_ids = config.rootfs().diff_ids();
    if diff_ids.len() != saved.layers.len() {
        return Err("its configuration has a different number of layers".into());
    }
    let layers = saved.layers.into_iter().zip(diff_ids).map(|(name, diff_id)| {
        let part = plain(name.as_bytes())?;
        let digest = Digest::from_str(diff_id).map_err(|error| error.to_string())?;
        Ok(Layer {
            size: store.open(&part)?.left(),
            part,
            name,
            digest: LayerDigest::DiffId(digest),
        })
    });
    layers.collect()
}

/// Path of a blob in a layout. Neither part of a digest contains a slash or is `..`.
fn part(digest: &Digest) -> PathBuf {
    ["blobs", digest.algorithm().as_ref(), digest.digest()]
        .iter()
        .collect()
}

fn blob<T: DeserializeOwned>(store: &BlobStore, descriptor: &Descriptor) -> Result<T, Reason> {
    let digest = descriptor.digest();
    json(store.open(&part(digest))?, digest.as_ref(), Some(digest))
}

/// Reads a JSON document and checks its digest.
fn json<T: DeserializeOwned>(section: FileSection, name: &str, digest: Option<&Digest>) -> Result<T, Reason> {
    if section.left() > MAX_JSON {
        return Err(format!("{name} has {} bytes", section.left()));
    }
    let mut text = Vec::new();
    section
        .take(MAX_JSON)
        .read_to_end(&mut text)
        .map_err(|error| format!("{name}: {error}"))?;
    if let Some(digest) = digest {
        let mut hasher = hasher(digest)?;
        hasher.update(&text);
        check(digest, hasher).map_err(|reason| format!("{name}: {reason}"))?;
    }
    serde_json::from_slice(&text).map_err(|error| format!("{name}: {error}"))
}

/// Hasher for a digest's algorithm.
pub(super) fn hasher(digest: &Digest) -> Result<Box<dyn DynDigest>, Reason> {
    match digest.algorithm() {
        DigestAlgorithm::Sha256 => Ok(Box::new(sha2::Sha256::default())),
        DigestAlgorithm::Sha384 => Ok(Box::new(sha2::Sha384::default())),
        DigestAlgorithm::Sha512 => Ok(Box::new(sha2::Sha512::default())),
        other => Err(format!("{other} digests are not supported")),
    }
}

/// Compares a digest with the computed one.
pub(super) fn check(digest: &Digest, hasher: Box<dyn DynDigest>) -> Result<(), Reason> {
    let computed: String = hasher
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    if computed == digest.digest() {
        Ok(())
    } else {
        Err(format!(
            "digest mismatch, computed {}:{computed}",
            digest.algorithm()
        ))
    }
}
