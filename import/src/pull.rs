//! Pulls an image: its manifest for this platform, its layers, and the wanted files in them.

use husk_images::{Event, ImageFile, ImageName, ImageStore, PullPolicy, PullRequest, StoredImage};
use oci_spec::image::{
    Arch, Descriptor, DescriptorBuilder, DigestAlgorithm, ImageIndex, ImageManifest, MediaType, Os,
};
use serde_json::Value;

use crate::error::PullError;
use crate::layer;
use crate::registry::{Access, Document, Registry};

/// Limit for a manifest or index, in bytes.
const MAX_DOCUMENT: usize = 4 << 20;
/// Limit for layers of an image; Docker allows 127.
const MAX_LAYERS: usize = 512;

/// Brings the store to what the request asks for.
///
/// # Errors
/// See [`PullError`]. Layers that were fetched completely or in part stay in staging only if another attempt may
/// succeed.
pub async fn pull(
    request: &PullRequest,
    access: Access<'_>,
    emit: &dyn Fn(&Event),
) -> Result<StoredImage, PullError> {
    let name: ImageName = request.name.parse()?;
    let store = ImageStore::at(&request.store);
    let wanted: Vec<ImageFile> = request
        .files
        .iter()
        .map(|file| file.clone().map_or(ImageFile::Disk, ImageFile::At))
        .collect();
    let stored = store.find(&name)?;
    let complete = |image: &StoredImage| wanted.iter().all(|file| store.has(&image.digest, file));
    match (request.policy, stored) {
        (PullPolicy::Never | PullPolicy::IfNotPresent, Some(image)) if complete(&image) => return Ok(image),
        (PullPolicy::Never, _) => return Err(PullError::NotPresent),
        (PullPolicy::Always, Some(image)) if complete(&image) => {
            let registry = Registry::new(&name, access, emit)?;
            if registry.digest().await? == image.registry_digest {
                return Ok(image);
            }
        }
        _ => {}
    }
    let registry = Registry::new(&name, access, emit)?;
    let named = registry.document(None).await?;
    let manifest = for_this_platform(&registry, &named).await?;
    let image = StoredImage {
        name: name.to_string(),
        digest: manifest.digest.clone(),
        registry_digest: named.digest,
        pulled: jiff::Timestamp::now(),
        size: 0,
    };
    let staging = store.stage(&image.digest)?;
    // Another process may have pulled it meanwhile, or another name refers to it.
    if staging.reuse(&image, &wanted)? {
        staging.abandon();
        return Ok(image);
    }
    let descriptor = describe(&registry, &manifest)?;
    match fetch(&registry, &staging, &manifest, emit).await {
        Ok(()) => {}
        // What is there is of use to the next attempt. The registry has given access to the manifest: perhaps only its
        // token server fails.
        Err(error) if error.is_temporary() || error.is_of_access() => return Err(error),
        Err(error) => {
            staging.abandon();
            return Err(error);
        }
    }
    staging.finish(&descriptor, &image, &wanted, &|done, size| {
        emit(&Event::Unpacking { done, size })
    })?;
    Ok(image)
}

/// The manifest for linux/amd64: the document itself, or the first one for it in an index.
async fn for_this_platform(registry: &Registry<'_>, named: &Document) -> Result<Document, PullError> {
    let value: Value = parse(registry, &named.content)?;
    if value.get("manifests").is_none() {
        return Ok(Document {
            content: named.content.clone(),
            digest: named.digest.clone(),
        });
    }
    let index: ImageIndex = parse(registry, &named.content)?;
    let found = index.manifests().iter().find(|manifest| {
        manifest
            .platform()
            .as_ref()
            .is_some_and(|platform| *platform.os() == Os::Linux && *platform.architecture() == Arch::Amd64)
    });
    let digest = found.ok_or(PullError::Platform)?.digest().to_string();
    registry.document(Some(&digest)).await
}

/// Fetches the layers that staging does not have, and writes the manifest.
async fn fetch(
    registry: &Registry<'_>,
    staging: &husk_images::Staging,
    document: &Document,
    emit: &dyn Fn(&Event),
) -> Result<(), PullError> {
    let manifest: ImageManifest = parse(registry, &document.content)?;
    let layers = manifest.layers();
    if layers.len() > MAX_LAYERS {
        let reason = format!(
            "the image has {} layers; the maximum is {MAX_LAYERS}",
            layers.len()
        );
        return Err(unusual(registry, reason));
    }
    if let Some(layer) = layers
        .iter()
        .find(|layer| *layer.digest().algorithm() != DigestAlgorithm::Sha256)
    {
        return Err(unusual(
            registry,
            format!("the digest {} is not SHA-256", layer.digest()),
        ));
    }
    let missing = layers.iter().fold(0_u64, |sum, layer| {
        let have = staging.fetched(layer.digest().digest());
        sum.saturating_add(layer.size().saturating_sub(have))
    });
    staging.require_space(missing)?;
    for layer in layers {
        let event = |done| Event::Layer {
            digest: layer.digest().to_string(),
            done,
            size: layer.size(),
        };
        emit(&event(0));
        layer::fetch(registry, staging, layer, emit).await?;
        emit(&event(layer.size()));
    }
    let hex = hex(registry, &document.digest)?;
    Ok(staging.write_blob(&hex, &document.content)?)
}

/// The descriptor of a manifest that was fetched.
fn describe(registry: &Registry<'_>, document: &Document) -> Result<Descriptor, PullError> {
    hex(registry, &document.digest)?;
    let size = document.content.len() as u64;
    let descriptor = DescriptorBuilder::default()
        .media_type(MediaType::ImageManifest)
        .digest(
            document
                .digest
                .parse::<oci_spec::image::Digest>()
                .map_err(|error| unusual(registry, error.to_string()))?,
        )
        .size(size)
        .build();
    descriptor.map_err(|error| unusual(registry, error.to_string()))
}

/// The digits of a SHA-256 digest.
fn hex(registry: &Registry<'_>, digest: &str) -> Result<String, PullError> {
    digest
        .strip_prefix("sha256:")
        .filter(|hex| hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()))
        .map(str::to_owned)
        .ok_or_else(|| unusual(registry, format!("the digest {digest} is not SHA-256")))
}

fn parse<T: serde::de::DeserializeOwned>(registry: &Registry<'_>, content: &[u8]) -> Result<T, PullError> {
    if content.len() > MAX_DOCUMENT {
        return Err(unusual(
            registry,
            format!("a manifest has {} bytes", content.len()),
        ));
    }
    serde_json::from_slice(content).map_err(|error| unusual(registry, error.to_string()))
}

fn unusual(registry: &Registry<'_>, reason: String) -> PullError {
    PullError::Registry {
        registry: registry.name().to_owned(),
        reason,
    }
}
