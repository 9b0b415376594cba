//! containerDisks.

use std::path::Path;
use std::sync::{Arc, Mutex};

use husk_images::{Login, RegistrySource, VolumeSource};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::server::{Asked, begin, reply, serve};
use crate::{MIB, content, entries, failed, filled, qcow2};

fn digest(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

fn layer(path: &str, content: &[u8]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    tar.append_data(&mut header, path, content).unwrap();
    tar.into_inner().unwrap()
}

/// A registry with one image of one layer, of which the first connection sends `most` bytes.
fn registry(layer: Vec<u8>, most: usize, seen: Arc<Mutex<Vec<Option<usize>>>>) -> String {
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({
        "schemaVersion": 2, "mediaType": kind,
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest(b"{}"), "size": 2},
        "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest(&layer),
            "size": layer.len()}],
    });
    let manifest = manifest.to_string().into_bytes();
    serve(move |asked: &Asked, stream| {
        if asked.path == "/v2/" {
            let headers = "www-authenticate: Basic realm=\"r\"\r\n";
            return reply(stream, "401 Unauthorized", headers, b"");
        }
        if asked.header("authorization") != Some("Basic dXNlcjpwYXNz") {
            return reply(stream, "401 Unauthorized", "", b"");
        }
        if !asked.path.contains("/blobs/") {
            return reply(stream, "200 OK", &format!("content-type: {kind}\r\n"), &manifest);
        }
        let first = {
            let mut seen = seen.lock().unwrap();
            seen.push(asked.offset());
            seen.len() == 1
        };
        let rest = &layer[asked.offset().unwrap_or(0)..];
        begin(stream, "206 Partial Content", rest.len(), "");
        let most = if first { most.min(rest.len()) } else { rest.len() };
        let _ = stream.write_all(&rest[..most]);
    })
}

fn source(name: &str, password: &str) -> VolumeSource {
    VolumeSource::Registry(RegistrySource {
        image: format!("{name}/disks/a:1"),
        pull_secret: None,
        login: Some(Login {
            user: "user".into(),
            password: password.into(),
        }),
        certificates: Vec::new(),
    })
}

#[test]
fn the_disk_of_a_containerdisk_is_converted() {
    let mut disk = content(MIB);
    disk.resize(2 << 20, 0);
    for image in [disk.clone(), qcow2::image(&disk)] {
        let seen = Arc::default();
        let name = registry(layer("disk/a.img", &image), 500_000, Arc::clone(&seen));
        let directory = tempfile::tempdir().unwrap();
        let found = filled(directory.path(), source(&name, "pass"), Some(3 << 20));
        assert!(found[..disk.len()] == disk);
        assert_eq!(*seen.lock().unwrap(), [Some(0), Some(500_000)]);
    }
}

#[test]
fn an_image_that_is_pulled_is_not_pulled_again() {
    let seen = Arc::default();
    let name = registry(
        layer("disk/a.img", &content(2 * MIB)),
        usize::MAX,
        Arc::clone(&seen),
    );
    let directory = tempfile::tempdir().unwrap();
    let reason = failed(directory.path(), source(&name, "pass"), Some(MIB));
    assert!(reason.contains("request at least 2097152 bytes"), "{reason}");
    assert_eq!(entries(directory.path()), ["images"]);
    filled(directory.path(), source(&name, "pass"), None);
    assert_eq!(seen.lock().unwrap().len(), 1);
}

#[test]
fn refusals_leave_nothing() {
    let refused = |directory: &Path, path: &str, content: &[u8], password: &str| {
        let name = registry(layer(path, content), usize::MAX, Arc::default());
        failed(directory, source(&name, password), None)
    };
    let directory = tempfile::tempdir().unwrap();
    let reason = refused(directory.path(), "disk/a.img", b"KDMV", "pass");
    assert!(reason.starts_with("the image is in the format vmdk"), "{reason}");
    assert_eq!(entries(directory.path()), [""; 0]);
    let reason = refused(directory.path(), "etc/hosts", b"a", "pass");
    assert_eq!(
        reason,
        "it has no file in folder /disk: it is not a containerDisk"
    );
    let reason = refused(directory.path(), "disk/a.img", b"a", "other");
    assert!(
        reason.contains("does not let you read it: name a Secret"),
        "{reason}"
    );
}
