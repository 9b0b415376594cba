//! Names of images as manifests have them, and the messages between `husk` and its import program. Asserts that a
//! normalised name is itself, and that messages survive being written.
#![no_main]

use arbitrary::Arbitrary;
use husk_fuzz::host::{JsonEdit, edit_json};
use husk_images::{Event, ImageName, ImageStore, Request};
use libfuzzer_sys::fuzz_target;
use serde_json::json;

#[derive(Arbitrary, Debug)]
enum Program {
    Name(Vec<Part>),
    Request(u8, Vec<JsonEdit>),
    Event(u8, Vec<JsonEdit>),
}

#[derive(Arbitrary, Debug)]
enum Part {
    Slash,
    Colon,
    At,
    Dot,
    Host,
    Port(u16),
    Scheme,
    Sha256,
    Any(String),
}

const WORDS: &[&str] = &[
    "request",
    "pull",
    "volume",
    "store",
    "name",
    "policy",
    "Always",
    "Never",
    "IfNotPresent",
    "files",
    "pull_secret",
    "directory",
    "source",
    "size",
    "kind",
    "http",
    "registry",
    "url",
    "checksum",
    "algorithm",
    "sha256",
    "md5",
    "digest",
    "certificates",
    "login",
    "user",
    "password",
    "headers",
    "image",
    "https://u:p@a.example:1/b?c#d",
    "://",
    "",
    "event",
    "layer",
    "done",
    "failed",
    "reason",
    "pulled",
    "2026-01-01T00:00:00Z",
];

fuzz_target!(|program: Program| {
    match program {
        Program::Name(parts) => {
            let parts = parts.iter().take(24).map(|part| match part {
                Part::Slash => "/".to_owned(),
                Part::Colon => ":".to_owned(),
                Part::At => "@".to_owned(),
                Part::Dot => ".".to_owned(),
                Part::Host => "localhost".to_owned(),
                Part::Port(port) => port.to_string(),
                Part::Scheme => "docker://".to_owned(),
                Part::Sha256 => format!("@sha256:{}", "a".repeat(64)),
                Part::Any(text) => text.clone(),
            });
            let text = parts.collect::<String>();
            if let Ok(name) = text.parse::<ImageName>() {
                let normal = name.to_string();
                let again: ImageName = normal
                    .parse()
                    .unwrap_or_else(|error| panic!("{text} is {normal}: {error}"));
                assert_eq!(again.to_string(), normal);
                assert_eq!(
                    (again.registry(), again.reference()),
                    (name.registry(), name.reference())
                );
                assert!(!name.registry().is_empty() && !name.reference().repository().is_empty());
                assert!(matches!(ImageStore::at("/nowhere").find(&name), Ok(None)));
            }
        }
        Program::Request(kind, edits) => {
            let mut request = match kind % 3 {
                0 => {
                    json!({"request": "pull", "store": "/s", "name": "a/b:1", "policy": "Always", "files": [null, "boot/k"],
                    "pull_secret": "{}"})
                }
                1 => json!({"request": "volume", "directory": "/d", "size": 5, "source": {"kind": "http",
                    "url": "https://u:p@a.example:1/b?c#d", "checksum": {"algorithm": "md5", "digest": "0"},
                    "certificates": ["c"], "login": {"user": "u", "password": "p"}, "headers": [["a", "b"]]}}),
                _ => json!({"request": "volume", "directory": "/d", "size": null,
                    "source": {"kind": "registry", "image": "a/b", "pull_secret": "{}"}}),
            };
            edit_json(&mut request, &edits, WORDS);
            if let Ok(request) = serde_json::from_value::<Request>(request) {
                let text = serde_json::to_string(&request).expect("JSON");
                let again: Request = serde_json::from_str(&text).expect("a request");
                assert_eq!(format!("{again:?}"), format!("{request:?}"));
            }
        }
        Program::Event(kind, edits) => {
            let mut event = match kind % 3 {
                0 => json!({"event": "layer", "digest": "sha256:0", "done": 1, "size": 2}),
                1 => {
                    json!({"event": "done", "image": {"name": "a", "digest": "sha256:0", "registry_digest": "sha256:0",
                    "pulled": "2026-01-01T00:00:00Z"}})
                }
                _ => json!({"event": "failed", "reason": "x"}),
            };
            edit_json(&mut event, &edits, WORDS);
            if let Ok(event) = serde_json::from_value::<Event>(event) {
                let text = serde_json::to_string(&event).expect("JSON");
                let again: Event = serde_json::from_str(&text).expect("an event");
                // The size of an image is not sent.
                if !matches!(event, Event::Done { .. }) {
                    assert_eq!(again, event);
                }
            }
        }
    }
});
