//! Index, manifest, configuration and `manifest.json` of a container image with changed values and right digests, as
//! directory and as archive. Asserts that a disk which is unpacked is the one of the only layer.
#![no_main]

use std::fs;

use arbitrary::Arbitrary;
use husk_fuzz::host::{JsonEdit, Splice, directory, edit_json, splice};
use husk_fuzz::oci::{CONFIG, INDEX, LAYER, Layout, MANIFEST, archive, sha256};
use husk_volumes::{ImageFile, unpack_image};
use libfuzzer_sys::fuzz_target;
use serde_json::json;

const DISK: &[u8] = &[7; 600];

#[derive(Arbitrary, Debug)]
struct Program {
    docker: bool,
    as_archive: bool,
    nested: u8,
    config: Vec<JsonEdit>,
    manifest: Vec<JsonEdit>,
    index: Vec<JsonEdit>,
    /// Changes of the text of the last document.
    text: Vec<Splice>,
}

fuzz_target!(|program: Program| {
    let layer = archive(&[("disk/a".to_owned(), DISK.to_vec())]);
    let own = format!("sha256:{}", sha256(&layer));
    let name = format!("{}.tar", sha256(&layer));
    let mut words = vec![
        "schemaVersion",
        "mediaType",
        "config",
        "layers",
        "manifests",
        "digest",
        "size",
        "platform",
        "os",
        "architecture",
        "variant",
        "annotations",
        "urls",
        "data",
        "subject",
        "artifactType",
        "rootfs",
        "diff_ids",
        "type",
        "history",
        "Config",
        "Layers",
        "RepoTags",
        "linux",
        "windows",
        "amd64",
        "arm64",
        INDEX,
        MANIFEST,
        CONFIG,
        LAYER,
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.oci.image.layer.v1.tar+zstd",
        "sha256:",
        "sha512:0",
        "sha256:../../../etc/passwd",
        "../a.json",
        "/etc/passwd",
        "index.json",
        "",
    ];
    words.extend([own.as_str(), name.as_str()]);
    let mut layout = Layout::default();
    let mut config = json!({
        "architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [own]}, "history": [],
    });
    edit_json(&mut config, &program.config, &words);
    let config = config.to_string();
    if program.docker {
        let config_name = format!("{}.json", sha256(config.as_bytes()));
        let mut manifest = json!([{"Config": config_name, "RepoTags": ["a:b"], "Layers": [name]}]);
        edit_json(&mut manifest, &program.manifest, &words);
        let mut text = manifest.to_string().into_bytes();
        splice(&mut text, &program.text);
        layout.files.extend([
            (name.clone(), layer),
            (config_name, config.into_bytes()),
            ("manifest.json".to_owned(), text),
        ]);
    } else {
        let layer = layout.blob(LAYER, &layer);
        let config = layout.blob(CONFIG, config.as_bytes());
        let mut manifest =
            json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer]});
        edit_json(&mut manifest, &program.manifest, &words);
        let mut image = layout.blob(MANIFEST, manifest.to_string().as_bytes());
        for _ in 0..program.nested % 5 {
            let index = json!({"schemaVersion": 2, "manifests": [image]});
            image = layout.blob(INDEX, index.to_string().as_bytes());
        }
        let mut index = json!({
            "schemaVersion": 2, "mediaType": INDEX,
            "manifests": [image, {"mediaType": MANIFEST, "digest": format!("sha256:{}", "0".repeat(64)), "size": 3,
                "platform": {"os": "linux", "architecture": "arm64"}}],
        });
        edit_json(&mut index, &program.index, &words);
        let mut text = index.to_string().into_bytes();
        splice(&mut text, &program.text);
        layout.files.push(("index.json".to_owned(), text));
    }
    let home = directory();
    let image = layout.write(home.path(), program.as_archive || program.docker);
    let target = home.path().join("target");
    if unpack_image(&image, &[ImageFile::Disk], &target, &|_, _| {}).is_ok() {
        assert_eq!(fs::read(target.join("disk/a")).expect("the disk"), DISK);
    }
});
