//! Downloads that are cut off, and checksums.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use husk_images::{Checksum, ChecksumAlgorithm, HttpSource, VolumeSource};
use sha2::Digest;

use crate::server::{Asked, begin, send, serve, serve_file};
use crate::{MIB, content, entries, failed, filled, http, request, start};

pub const TAG: (&str, &str) = ("etag: \"1\"\r\n", "\"1\"");

fn checksum(algorithm: ChecksumAlgorithm, content: &[u8]) -> Checksum {
    let bytes = match algorithm {
        ChecksumAlgorithm::Md5 => md5::Md5::digest(content).to_vec(),
        ChecksumAlgorithm::Sha1 => sha1::Sha1::digest(content).to_vec(),
        ChecksumAlgorithm::Sha256 => sha2::Sha256::digest(content).to_vec(),
        ChecksumAlgorithm::Sha512 => sha2::Sha512::digest(content).to_vec(),
    };
    let digest = bytes.iter().map(|byte| format!("{byte:02X}")).collect();
    Checksum { algorithm, digest }
}

fn with_checksum(url: &str, checksum: Checksum) -> VolumeSource {
    VolumeSource::Http(HttpSource {
        checksum: Some(checksum),
        ..http(url)
    })
}

/// The requests for a file that is cut off twice by a server.
fn cut_twice(
    source: impl FnOnce(&str) -> VolumeSource,
    answer: impl Fn(usize, &Asked, &mut dyn std::io::Write) + Send + Sync + 'static,
) -> (Vec<Option<usize>>, Vec<u8>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let requests = seen.clone();
    let name = serve(move |asked, stream| {
        let number = {
            let mut requests = requests.lock().unwrap();
            requests.push(asked.offset());
            requests.len()
        };
        answer(number, asked, stream);
    });
    let directory = tempfile::tempdir().unwrap();
    let disk = filled(directory.path(), source(&format!("http://{name}/a")), None);
    let seen = seen.lock().unwrap().clone();
    (seen, disk)
}

#[test]
fn checksums_are_those_of_the_file_as_it_is_sent() {
    use ChecksumAlgorithm::{Md5, Sha1, Sha256, Sha512};
    let file = crate::formats::gz(&content(MIB));
    let url = serve_file(file.clone());
    for algorithm in [Md5, Sha1, Sha256, Sha512] {
        let directory = tempfile::tempdir().unwrap();
        let right = checksum(algorithm, &file);
        filled(directory.path(), with_checksum(&url, right.clone()), None);
        let directory = tempfile::tempdir().unwrap();
        let wrong = checksum(algorithm, b"other");
        let reason = failed(directory.path(), with_checksum(&url, wrong.clone()), None);
        let text = format!(
            "the file has the {algorithm} checksum {}, not {}",
            right.digest.to_lowercase(),
            wrong.digest
        );
        assert!(reason.starts_with(&text), "{reason}");
        assert_eq!(entries(directory.path()), [""; 0]);
    }
}

#[test]
fn a_download_goes_on_where_the_connection_broke() {
    let file = content(3 * MIB);
    let sum = checksum(ChecksumAlgorithm::Sha256, &file);
    let sent = file.clone();
    let (seen, disk) = cut_twice(
        |url| with_checksum(url, sum),
        move |number, asked, stream| {
            assert_eq!(asked.header("accept-encoding"), Some("identity"));
            let most = if number < 3 { 1_200_000 } else { usize::MAX };
            send(asked, stream, &sent, TAG, most);
        },
    );
    assert_eq!(seen, [None, Some(1_200_000), Some(2_400_000)]);
    assert!(disk == file);
}

#[test]
fn a_file_that_changed_is_fetched_from_its_start() {
    let (old, new) = (content(3 * MIB), vec![7; 2 << 20]);
    let sent = new.clone();
    let (seen, disk) = cut_twice(
        |url| VolumeSource::Http(http(url)),
        move |number, asked, stream| match number {
            1 => send(asked, stream, &old, TAG, 1_200_000),
            _ => send(asked, stream, &sent, ("etag: \"2\"\r\n", "\"2\""), usize::MAX),
        },
    );
    assert_eq!(seen, [None, Some(1_200_000)]);
    assert!(disk == new);
}

#[test]
fn a_server_without_ranges_sends_the_file_again() {
    let file = content(3 * MIB);
    let sent = file.clone();
    let (seen, disk) = cut_twice(
        |url| VolumeSource::Http(http(url)),
        move |number, _, stream| {
            begin(
                stream,
                "200 OK",
                sent.len(),
                "last-modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n",
            );
            let most = if number < 2 { 1_200_000 } else { sent.len() };
            let _ = stream.write_all(&sent[..most]);
        },
    );
    assert_eq!(seen, [None, Some(1_200_000)]);
    assert!(disk == file);
}

#[test]
fn a_server_that_always_begins_anew_is_given_up() {
    let attempts = Arc::new(AtomicUsize::new(0));
    let counted = attempts.clone();
    let file = content(3 * MIB);
    let name = serve(move |_, stream| {
        let sent = match counted.fetch_add(1, Ordering::Relaxed) % 2 {
            0 => 1_200_000,
            _ => 2_400_000,
        };
        begin(stream, "200 OK", file.len(), "");
        let _ = stream.write_all(&file[..sent]);
    });
    let directory = tempfile::tempdir().unwrap();
    let reason = failed(
        directory.path(),
        VolumeSource::Http(http(&format!("http://{name}/a"))),
        None,
    );
    assert!(reason.contains("failed repeatedly"), "{reason}");
    assert_eq!(attempts.load(Ordering::Relaxed), 6);
}

#[test]
fn a_file_without_validators_is_continued_only_if_a_checksum_shows_it() {
    let (old, new) = (content(3 * MIB), vec![7; 3 << 20]);
    let (cut, sent) = (old.clone(), old.clone());
    let (seen, disk) = cut_twice(
        |url| VolumeSource::Http(http(url)),
        move |number, asked, stream| {
            let most = if number < 2 { 1_200_000 } else { usize::MAX };
            send(asked, stream, &sent, ("", ""), most);
        },
    );
    assert_eq!(seen, [None, None]);
    assert!(disk == old);
    // The rest is of another version: the checksum shows it, and the file is fetched whole.
    let (sum, sent) = (checksum(ChecksumAlgorithm::Md5, &new), new.clone());
    let (seen, disk) = cut_twice(
        |url| with_checksum(url, sum),
        move |number, asked, stream| match number {
            1 => send(asked, stream, &cut, ("", ""), 1_200_000),
            _ => send(asked, stream, &sent, ("", ""), usize::MAX),
        },
    );
    assert_eq!(seen, [None, Some(1_200_000), None]);
    assert!(disk == new);
}

#[test]
fn an_import_goes_on_where_a_killed_one_ended() {
    let file = content(3 * MIB);
    let (sent, offsets) = (file.clone(), Arc::new(Mutex::new(Vec::new())));
    let seen = offsets.clone();
    let name = serve(move |asked, stream| {
        let first = {
            let mut seen = seen.lock().unwrap();
            seen.push((asked.offset(), asked.header("if-range").map(str::to_owned)));
            seen.len() == 1
        };
        send(
            asked,
            stream,
            &sent,
            TAG,
            if first { 1_200_000 } else { usize::MAX },
        );
        if first {
            std::thread::sleep(Duration::from_secs(60));
        }
    });
    let source = VolumeSource::Http(http(&format!("http://{name}/a?token=SECRET")));
    let directory = tempfile::tempdir().unwrap();
    let mut killed = start(request(directory.path(), source.clone(), None));
    let fetched = || std::fs::metadata(directory.path().join("download")).map_or(0, |file| file.len());
    let deadline = Instant::now() + Duration::from_secs(20);
    while fetched() < 1_200_000 {
        assert!(Instant::now() < deadline, "{} bytes", fetched());
        std::thread::sleep(Duration::from_millis(20));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert_eq!(entries(directory.path()), ["download", "download.json"]);
    let kept = std::fs::read_to_string(directory.path().join("download.json")).unwrap();
    assert!(!kept.contains("SECRET"), "{kept}");
    assert!(filled(directory.path(), source, None) == file);
    let tag = Some("\"1\"".to_owned());
    assert_eq!(*offsets.lock().unwrap(), [(None, None), (Some(1_200_000), tag)]);
}

#[test]
fn what_is_left_of_another_url_is_not_used() {
    let directory = tempfile::tempdir().unwrap();
    let file = content(MIB);
    let url = serve_file(file.clone());
    let size = Some(MIB / 2);
    failed(directory.path(), VolumeSource::Http(http(&url)), size);
    assert_eq!(entries(directory.path()), ["download", "download.json"]);
    let other = VolumeSource::Http(http(&serve_file(vec![7; 1 << 20])));
    assert!(filled(directory.path(), other, None) == [7; 1 << 20]);
    // Neither what a hand has damaged.
    failed(directory.path(), VolumeSource::Http(http(&url)), size);
    std::fs::write(directory.path().join("download.json"), "{").unwrap();
    std::fs::write(directory.path().join("download"), "x").unwrap();
    assert!(filled(directory.path(), VolumeSource::Http(http(&url)), None) == file);
}

#[test]
fn what_a_power_cut_may_have_lost_is_fetched_again() {
    let file = content(MIB);
    let (sent, offsets) = (file.clone(), Arc::new(Mutex::new(Vec::new())));
    let seen = offsets.clone();
    let name = serve(move |asked, stream| {
        seen.lock().unwrap().push(asked.offset());
        send(asked, stream, &sent, TAG, usize::MAX);
    });
    let source = || VolumeSource::Http(http(&format!("http://{name}/a")));
    let directory = tempfile::tempdir().unwrap();
    failed(directory.path(), source(), Some(MIB / 2));
    failed(directory.path(), source(), Some(MIB / 2));
    let path = directory.path().join("download.json");
    let mut kept: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    kept["boot"] = "another".into();
    std::fs::write(&path, kept.to_string()).unwrap();
    assert!(filled(directory.path(), source(), None) == file);
    assert_eq!(*offsets.lock().unwrap(), [None, Some(1 << 20), None]);
}
