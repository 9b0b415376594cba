//! Fetches a layer, and goes on where a broken connection or an earlier process ended.

use std::io::Write;
use std::time::Duration;

use futures_util::StreamExt;
use husk_images::{Blob, Event, Staging, StoreError};
use oci_client::client::BlobResponse;
use oci_spec::image::Descriptor;
use sha2::{Digest, Sha256};

use crate::error::{PullError, innermost};
use crate::registry::Registry;

/// Connections that may break while a layer is fetched.
const MAX_BROKEN: u32 = 8;
/// Delay before the first further connection, which grows by itself with each one.
const DELAY: Duration = Duration::from_millis(500);
/// Bytes between two progress events.
const STEP: u64 = 1 << 20;

/// Fetches a layer into staging, and checks its size and digest.
///
/// # Errors
/// The registry does not have the layer, or sends other data; a part of it is left in staging.
pub async fn fetch(
    registry: &Registry<'_>,
    staging: &Staging,
    layer: &Descriptor,
    emit: &dyn Fn(&Event),
) -> Result<(), PullError> {
    let hex = layer.digest().digest();
    let mut broken = 0;
    loop {
        let Some(mut blob) = staging.blob(hex)? else {
            return Ok(());
        };
        let reason = match blob.have {
            have if have >= layer.size() => None,
            _ => receive(registry, layer, &mut blob, emit).await?,
        };
        let Some(reason) = reason else {
            return check(registry, staging, layer, blob);
        };
        broken += 1;
        if broken > MAX_BROKEN {
            let registry = registry.name().to_owned();
            return Err(PullError::ConnectionLost { registry, reason });
        }
        emit(&Event::Retrying { reason });
        tokio::time::sleep(DELAY * broken).await;
    }
}

/// Appends what the registry sends. Returns why the connection ended early.
async fn receive(
    registry: &Registry<'_>,
    layer: &Descriptor,
    blob: &mut Blob,
    emit: &dyn Fn(&Event),
) -> Result<Option<String>, PullError> {
    let digest = layer.digest().to_string();
    let write = |error| PullError::Store(StoreError::Image(format!("writing a layer: {error}")));
    let mut stream = match registry.blob(&digest, blob.have).await? {
        BlobResponse::Partial(stream) => stream,
        BlobResponse::Full(stream) => {
            blob.file.set_len(0).map_err(write)?;
            (blob.have, blob.hash) = (0, Sha256::new());
            stream
        }
    };
    let mut reported = blob.have;
    while let Some(piece) = stream.next().await {
        let piece = match piece {
            Ok(piece) => piece,
            Err(error) => return Ok(Some(innermost(&error))),
        };
        blob.have += piece.len() as u64;
        if blob.have > layer.size() {
            return Ok(None);
        }
        blob.file.write_all(&piece).map_err(write)?;
        blob.hash.update(&piece);
        if blob.have - reported >= STEP {
            reported = blob.have;
            let (done, size) = (blob.have, layer.size());
            emit(&Event::Layer {
                digest: digest.clone(),
                done,
                size,
            });
        }
    }
    Ok((blob.have < layer.size()).then(|| "the registry closed the connection".to_owned()))
}

fn check(
    registry: &Registry<'_>,
    staging: &Staging,
    layer: &Descriptor,
    blob: Blob,
) -> Result<(), PullError> {
    let hex: String = blob
        .hash
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    if blob.have != layer.size() || hex != layer.digest().digest() {
        return Err(PullError::Digest {
            registry: registry.name().to_owned(),
            digest: layer.digest().to_string(),
        });
    }
    Ok(staging.blob_complete(&hex)?)
}
