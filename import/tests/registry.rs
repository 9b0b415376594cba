//! Registries that refuse, break, lie and stall.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use husk_images::{Event, ImageFile, ImageStore, PullPolicy, PullRequest, Request};
use serde_json::json;
use sha2::{Digest, Sha256};

/// What a registry answers to a request for `path` with an offset; it may write anything.
type Answer = dyn Fn(&str, u64, &mut TcpStream) + Send + Sync;

fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("sha256:{hex}")
}

fn reply(stream: &mut TcpStream, status: &str, headers: &str, body: &[u8]) {
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n{headers}\r\n",
        body.len()
    );
    let _ = stream
        .write_all(head.as_bytes())
        .and_then(|()| stream.write_all(body));
}

/// Serves on a port of localhost, whose name it returns.
fn serve(answer: Arc<Answer>) -> String {
    serve_with(None, answer)
}

/// The same, with the path of a token server, if there is one.
fn serve_with(token: Option<&'static str>, answer: Arc<Answer>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = format!("localhost:{}", listener.local_addr().unwrap().port());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let answer = answer.clone();
            std::thread::spawn(move || {
                let mut lines = BufReader::new(stream.try_clone().unwrap())
                    .lines()
                    .map_while(Result::ok);
                let request = lines.next().unwrap_or_default();
                let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
                let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
                let range = headers.iter().find_map(|line| {
                    line.to_lowercase()
                        .strip_prefix("range: bytes=")
                        .map(str::to_owned)
                });
                let offset = range.and_then(|range| range.trim_end_matches('-').parse().ok());
                match path.as_str() {
                    "/v2/" => match token {
                        Some(token) => {
                            let port = stream.local_addr().unwrap().port();
                            let realm = format!("http://localhost:{port}{token}");
                            let challenge =
                                format!("www-authenticate: Bearer realm=\"{realm}\",service=\"s\"\r\n");
                            reply(&mut stream, "401 Unauthorized", &challenge, b"");
                        }
                        None => reply(&mut stream, "200 OK", "", b""),
                    },
                    path => answer(path, offset.unwrap_or(0), &mut stream),
                }
            });
        }
    });
    name
}

/// An image with one layer.
struct Image {
    layer: Vec<u8>,
    manifest: Vec<u8>,
}

impl Image {
    fn of_layer(layer: Vec<u8>) -> Image {
        Image::sized(layer, None)
    }

    /// An image whose manifest says that its layer has `size` bytes.
    fn sized(layer: Vec<u8>, size: Option<u64>) -> Image {
        let size = size.unwrap_or(layer.len() as u64);
        let manifest = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest(b"{}"), "size": 2},
            "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest(&layer), "size": size}],
        });
        let manifest = manifest.to_string().into_bytes();
        Image { layer, manifest }
    }

    fn disk() -> Image {
        let content: Vec<u8> = (0..2 << 20_u32).map(|number| (number % 251) as u8).collect();
        Image::of_layer(tar("disk/a.img", &content))
    }

    fn send_manifest(&self, stream: &mut TcpStream) {
        reply(
            stream,
            "200 OK",
            "content-type: application/vnd.oci.image.manifest.v1+json\r\n",
            &self.manifest,
        );
    }

    fn send_layer(&self, offset: u64, stream: &mut TcpStream) {
        reply(stream, "206 Partial Content", "", &self.layer[offset as usize..]);
    }
}

fn tar(path: &str, content: &[u8]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    tar.append_data(&mut header, path, content).unwrap();
    tar.into_inner().unwrap()
}

fn pull(store: &Path, name: &str) -> Event {
    pull_files(store, name, &[None])
}

fn pull_files(store: &Path, name: &str, files: &[Option<&str>]) -> Event {
    let output = start(store, name, files).wait_with_output().unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let last = lines
        .lines()
        .last()
        .and_then(|line| serde_json::from_str(line).ok());
    last.unwrap_or_else(|| Event::Failed {
        reason: format!("no result: {}", output.status),
    })
}

fn start(store: &Path, name: &str, files: &[Option<&str>]) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_husk-import"))
        .env("HOME", store)
        .env_remove("REGISTRY_AUTH_FILE")
        .env_remove("XDG_RUNTIME_DIR")
        .env_remove("DOCKER_CONFIG")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let request = PullRequest {
        store: store.join("images"),
        name: name.to_owned(),
        policy: PullPolicy::Always,
        files: files.iter().map(|file| file.map(Into::into)).collect(),
        pull_secret: None,
    };
    let request = serde_json::to_vec(&Request::Pull(request)).unwrap();
    child.stdin.take().unwrap().write_all(&request).unwrap();
    child
}

/// The reason of a failure, after which the store has no image and nothing half done.
fn failure(answer: Arc<Answer>) -> String {
    let home = tempfile::tempdir().unwrap();
    let name = serve(answer);
    let event = pull(home.path(), &format!("{name}/disks/a:1"));
    let Event::Failed { reason } = event else {
        panic!("{event:?}")
    };
    assert_eq!(reason.lines().count(), 1, "{reason}");
    let store = ImageStore::at(home.path().join("images"));
    assert_eq!(store.list().unwrap(), []);
    let left = std::fs::read_dir(home.path().join("images/staging"));
    assert_eq!(left.map_or(0, Iterator::count), 0, "{reason}");
    reason.replace(&name, "REGISTRY")
}

#[test]
fn images_are_pulled_once_and_named() {
    let home = tempfile::tempdir().unwrap();
    let (layers, manifests) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let counts = (layers.clone(), manifests.clone());
    let image = Image::disk();
    let name = serve(Arc::new(move |path, offset, stream| {
        if path.contains("/blobs/") {
            counts.0.fetch_add(1, Ordering::Relaxed);
            image.send_layer(offset, stream);
        } else {
            counts.1.fetch_add(1, Ordering::Relaxed);
            image.send_manifest(stream);
        }
    }));
    for tag in ["1", "1", "2"] {
        let event = pull(home.path(), &format!("{name}/disks/a:{tag}"));
        assert!(matches!(event, Event::Done { .. }), "{event:?}");
    }
    assert_eq!(layers.load(Ordering::Relaxed), 1);
    let store = ImageStore::at(home.path().join("images"));
    let images = store.list().unwrap();
    assert_eq!(images.len(), 2);
    assert_eq!(images[0].digest, images[1].digest);
    let disk = store.rootfs(&images[0].digest).join("disk/a.img");
    assert_eq!(std::fs::metadata(&disk).unwrap().len(), 2 << 20);

    let tag = |tag: &str| format!("{name}/disks/a:{tag}").parse().unwrap();
    assert_eq!(store.remove(&tag("1")).unwrap(), 0);
    assert!(disk.exists());
    assert!(store.remove(&tag("2")).unwrap() >= 2 << 20);
    assert!(!disk.exists());
    assert!(
        store
            .remove(&tag("2"))
            .unwrap_err()
            .to_string()
            .starts_with("no image")
    );
}

#[test]
fn further_files_of_an_image_are_added() {
    let home = tempfile::tempdir().unwrap();
    let mut layer = tar("boot/kernel", b"kernel");
    layer.truncate(1024);
    layer.extend(tar("boot/initrd", b"initrd"));
    let image = Image::of_layer(layer);
    let name = serve(Arc::new(move |path, offset, stream| {
        match path.contains("/blobs/") {
            true => image.send_layer(offset, stream),
            false => image.send_manifest(stream),
        }
    }));
    let name = format!("{name}/kernels/a:1");
    let store = ImageStore::at(home.path().join("images"));
    let mut kernels = Vec::new();
    for files in [
        &[Some("boot/kernel")][..],
        &[Some("boot/initrd"), Some("boot/kernel")],
        &[Some("boot/kernel")],
    ] {
        let event = pull_files(home.path(), &name, files);
        assert!(matches!(event, Event::Done { .. }), "{event:?}");
        let rootfs = store.rootfs(&store.list().unwrap()[0].digest);
        let kernel = rootfs.join("boot/kernel").metadata().unwrap();
        kernels.push((kernel.ino(), kernel.modified().unwrap()));
        assert_eq!(
            std::fs::read_dir(store.path().join("staging")).unwrap().count(),
            0
        );
    }
    // A snapshot knows a file by these.
    assert!(kernels.iter().all(|kernel| *kernel == kernels[0]), "{kernels:?}");
    let rootfs = store.rootfs(&store.list().unwrap()[0].digest);
    assert_eq!(std::fs::read(rootfs.join("boot/kernel")).unwrap(), b"kernel");
    assert_eq!(std::fs::read(rootfs.join("boot/initrd")).unwrap(), b"initrd");
    let event = pull_files(home.path(), &name, &[None]);
    let Event::Failed { reason } = event else {
        panic!("{event:?}")
    };
    assert_eq!(
        reason,
        "it has no file in folder /disk: it is not a containerDisk"
    );
    assert!(rootfs.join("boot/kernel").exists());
}

#[test]
fn a_disk_that_was_wanted_by_its_path_is_not_the_only_one() {
    let home = tempfile::tempdir().unwrap();
    let mut layer = tar("disk/a.img", b"a");
    layer.truncate(1024);
    layer.extend(tar("disk/b.img", b"b"));
    let image = Image::of_layer(layer);
    let name = serve(Arc::new(move |path, offset, stream| {
        match path.contains("/blobs/") {
            true => image.send_layer(offset, stream),
            false => image.send_manifest(stream),
        }
    }));
    let name = format!("{name}/disks/a:1");
    let event = pull_files(home.path(), &name, &[Some("disk/a.img")]);
    assert!(matches!(event, Event::Done { .. }), "{event:?}");
    let event = pull(home.path(), &name);
    let Event::Failed { reason } = event else {
        panic!("{event:?}")
    };
    assert!(reason.contains("several files in folder /disk"), "{reason}");

    // An older store does not say which disk is the only one.
    let image = Image::disk();
    let name = serve(Arc::new(move |path, offset, stream| {
        match path.contains("/blobs/") {
            true => image.send_layer(offset, stream),
            false => image.send_manifest(stream),
        }
    }));
    let name = format!("{name}/disks/a:1");
    let store = ImageStore::at(home.path().join("images"));
    let event = pull_files(home.path(), &name, &[Some("disk/a.img")]);
    let Event::Done { image } = event else {
        panic!("{event:?}")
    };
    let disk = store.rootfs(&image.digest).join("disk/a.img");
    let before = disk.metadata().unwrap().ino();
    assert!(!store.has(&image.digest, &ImageFile::Disk));
    let event = pull(home.path(), &name);
    assert!(matches!(event, Event::Done { .. }), "{event:?}");
    assert!(store.has(&image.digest, &ImageFile::Disk));
    assert_eq!(disk.metadata().unwrap().ino(), before);
}

#[test]
fn refusals_are_one_line_with_the_remedy() {
    let code = |code: &str| format!(r#"{{"errors": [{{"code": "{code}", "message": "m\n"}}]}}"#);
    for (status, body, text) in [
        (
            "401 Unauthorized",
            String::new(),
            "REGISTRY does not let you read it: log in with `podman login REGISTRY`",
        ),
        (
            "403 Forbidden",
            code("DENIED"),
            "REGISTRY does not let you read it: log in",
        ),
        (
            "404 Not Found",
            code("MANIFEST_UNKNOWN"),
            "REGISTRY has no such image",
        ),
        ("404 Not Found", String::new(), "REGISTRY has no such image"),
        (
            "418 Teapot",
            "short\nand stout".into(),
            "unexpected answer from REGISTRY: HTTP status 418 short and stout",
        ),
        ("200 OK", "[]".into(), "unexpected answer from REGISTRY"),
    ] {
        let reason = failure(Arc::new(move |_, _, stream| {
            reply(stream, status, "", body.as_bytes())
        }));
        assert!(reason.starts_with(text), "{reason}");
    }
}

#[test]
fn a_registry_that_is_busy_is_asked_again() {
    let home = tempfile::tempdir().unwrap();
    let refused = AtomicUsize::new(0);
    let image = Image::disk();
    let name = serve(Arc::new(move |path, offset, stream| {
        match path.contains("/blobs/") {
            true => image.send_layer(offset, stream),
            false if refused.fetch_add(1, Ordering::Relaxed) == 0 => {
                reply(stream, "429 Too Many Requests", "retry-after: 1\r\n", b"");
            }
            false => image.send_manifest(stream),
        }
    }));
    let event = pull(home.path(), &format!("{name}/disks/a:1"));
    assert!(matches!(event, Event::Done { .. }), "{event:?}");
}

#[test]
fn a_token_server_that_does_not_answer_is_asked_again() {
    let home = tempfile::tempdir().unwrap();
    let (asked, has_token) = (AtomicUsize::new(0), AtomicBool::new(false));
    let image = Image::disk();
    let answer = move |path: &str, offset, stream: &mut TcpStream| match path {
        path if path.starts_with("/token") => {
            if asked.fetch_add(1, Ordering::Relaxed) >= 2 {
                has_token.store(true, Ordering::Relaxed);
                reply(stream, "200 OK", "", br#"{"token": "t"}"#);
            }
        }
        _ if !has_token.load(Ordering::Relaxed) => reply(stream, "401 Unauthorized", "", b""),
        path if path.contains("/blobs/") => image.send_layer(offset, stream),
        _ => image.send_manifest(stream),
    };
    let name = serve_with(Some("/token"), Arc::new(answer));
    let event = pull(home.path(), &format!("{name}/disks/a:1"));
    assert!(matches!(event, Event::Done { .. }), "{event:?}");
}

#[test]
fn a_layer_goes_on_where_the_connection_broke() {
    let home = tempfile::tempdir().unwrap();
    let offsets = Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = offsets.clone();
    let image = Image::disk();
    let name = serve(Arc::new(move |path, offset, stream| {
        if !path.contains("/blobs/") {
            return image.send_manifest(stream);
        }
        let mut seen = seen.lock().unwrap();
        seen.push(offset);
        let rest = &image.layer[offset as usize..];
        let head = format!(
            "HTTP/1.1 206 Partial Content\r\ncontent-length: {}\r\n\r\n",
            rest.len()
        );
        let sent = if seen.len() < 3 {
            500_000.min(rest.len())
        } else {
            rest.len()
        };
        let _ = stream
            .write_all(head.as_bytes())
            .and_then(|()| stream.write_all(&rest[..sent]));
    }));
    let event = pull(home.path(), &format!("{name}/disks/a:1"));
    assert!(matches!(event, Event::Done { .. }), "{event:?}");
    assert_eq!(*offsets.lock().unwrap(), [0, 500_000, 1_000_000]);
}

#[test]
fn a_pull_goes_on_where_a_broken_registry_ended_one() {
    for status in ["503 Service Unavailable", "401 Unauthorized"] {
        goes_on_after(status);
    }
}

fn goes_on_after(status: &'static str) {
    let home = tempfile::tempdir().unwrap();
    let offsets = Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = offsets.clone();
    let broken = Arc::new(AtomicBool::new(true));
    let breaks = broken.clone();
    let image = Image::disk();
    let name = serve(Arc::new(move |path, offset, stream| {
        if !path.contains("/blobs/") {
            return image.send_manifest(stream);
        }
        let mut seen = seen.lock().unwrap();
        seen.push(offset);
        match (breaks.load(Ordering::Relaxed), seen.len()) {
            (true, 1) => {
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", image.layer.len());
                let _ = stream
                    .write_all(head.as_bytes())
                    .and_then(|()| stream.write_all(&image.layer[..500_000]));
            }
            (true, _) => reply(stream, status, "", b""),
            (false, _) => image.send_layer(offset, stream),
        }
    }));
    let name = format!("{name}/disks/a:1");
    let event = pull(home.path(), &name);
    assert!(matches!(event, Event::Failed { .. }), "{event:?}");
    broken.store(false, Ordering::Relaxed);
    let event = pull(home.path(), &name);
    assert!(matches!(event, Event::Done { .. }), "{event:?}");
    assert_eq!(offsets.lock().unwrap().last(), Some(&500_000));
}

#[test]
fn a_pull_goes_on_where_a_killed_one_ended() {
    let home = tempfile::tempdir().unwrap();
    let (image, stalled) = (Image::disk(), AtomicUsize::new(0));
    let (offsets, seen) = std::sync::mpsc::channel();
    let offsets = std::sync::Mutex::new(offsets);
    let name = serve(Arc::new(move |path, offset, stream| {
        if !path.contains("/blobs/") {
            return image.send_manifest(stream);
        }
        offsets.lock().unwrap().send(offset).unwrap();
        if stalled.fetch_add(1, Ordering::Relaxed) > 0 {
            return image.send_layer(offset, stream);
        }
        let head = format!(
            "HTTP/1.1 206 Partial Content\r\ncontent-length: {}\r\n\r\n",
            image.layer.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(&image.layer[..500_000]).unwrap();
        std::thread::sleep(Duration::from_secs(60));
    }));
    let name = format!("{name}/disks/a:1");
    let mut killed = start(home.path(), &name, &[None]);
    assert_eq!(seen.recv_timeout(Duration::from_secs(20)), Ok(0));
    let staging = home.path().join("images/staging");
    let fetched = || -> u64 {
        let parts = std::fs::read_dir(&staging).unwrap().flatten();
        let parts = parts.filter_map(|image| std::fs::read_dir(image.path().join("blobs")).ok());
        let parts = parts.flatten().flatten().filter_map(|part| part.metadata().ok());
        parts.filter(|part| part.is_file()).map(|part| part.len()).sum()
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    while fetched() < 500_000 {
        assert!(Instant::now() < deadline, "{} bytes", fetched());
        std::thread::sleep(Duration::from_millis(20));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    let event = pull(home.path(), &name);
    assert!(matches!(event, Event::Done { .. }), "{event:?}");
    assert_eq!(seen.recv_timeout(Duration::from_secs(20)), Ok(500_000));
    assert_eq!(std::fs::read_dir(&staging).unwrap().count(), 0);
}

#[test]
fn other_data_than_the_digest_is_refused() {
    let image = Image::disk();
    let changed = move |path: &str, offset: u64, stream: &mut TcpStream| {
        if !path.contains("/blobs/") {
            return image.send_manifest(stream);
        }
        let mut layer = image.layer.clone();
        layer[1000] ^= 1;
        reply(stream, "206 Partial Content", "", &layer[offset as usize..]);
    };
    let reason = failure(Arc::new(changed));
    assert!(
        reason.starts_with("the content that REGISTRY sent does not match the digest sha256:"),
        "{reason}"
    );

    // More than the manifest says, without an end.
    let image = Image::sized(tar("disk/a.img", &[1; 4096]), Some(1000));
    let endless = move |path: &str, _: u64, stream: &mut TcpStream| {
        if !path.contains("/blobs/") {
            return image.send_manifest(stream);
        }
        let _ = stream.write_all(b"HTTP/1.1 206 Partial Content\r\ntransfer-encoding: chunked\r\n\r\n");
        while stream.write_all(b"4\r\nabcd\r\n").is_ok() {}
    };
    let reason = failure(Arc::new(endless));
    assert!(
        reason.starts_with("the content that REGISTRY sent does not match the digest sha256:"),
        "{reason}"
    );
}

#[test]
fn a_layer_that_does_not_fit_is_not_begun() {
    let image = Image::sized(tar("disk/a.img", &[1; 4096]), Some(1 << 60));
    let reason = failure(Arc::new(move |path, _, stream| match path.contains("/blobs/") {
        true => panic!("the layer was asked for"),
        false => image.send_manifest(stream),
    }));
    assert!(
        reason.contains("the image needs 1152921504606846976 bytes"),
        "{reason}"
    );
}

#[test]
fn a_manifest_without_an_end_costs_the_process_only() {
    let home = tempfile::tempdir().unwrap();
    let name = serve(Arc::new(|_, _, stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n");
        while stream.write_all(&[b' '; 1 << 16]).is_ok() {}
    }));
    let event = pull(home.path(), &format!("{name}/disks/a:1"));
    let Event::Failed { reason } = event else {
        panic!("{event:?}")
    };
    assert!(reason.starts_with("no result: signal: 6"), "{reason}");
}

#[test]
fn hostile_layers_leave_nothing() {
    let link = {
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        tar.append_link(&mut header, "disk/a.img", "/etc/shadow").unwrap();
        tar.into_inner().unwrap()
    };
    let mut cut = tar("disk/a.img", &[1; 100_000]);
    cut.truncate(50_000);
    for (layer, text) in [
        (link, "disk/a.img in it is a symbolic link, not a regular file"),
        (cut, "it ends within disk/a.img"),
        (
            tar("etc/hosts", b"h"),
            "it has no file in folder /disk: it is not a containerDisk",
        ),
        (b"nonsense".repeat(200), "a header of the archive is damaged"),
    ] {
        let image = Image::of_layer(layer);
        let reason = failure(Arc::new(move |path, offset, stream| {
            match path.contains("/blobs/") {
                true => image.send_layer(offset, stream),
                false => image.send_manifest(stream),
            }
        }));
        assert!(reason.ends_with(text), "{reason}");
    }
}
