//! File systems that are too small.

use husk_images::VolumeSource;
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::server::{begin, serve, serve_file};
use crate::{content, entries, failed, filled, http};

/// Runs a test with a directory on a file system with room for 16 MiB, beside what an import leaves free.
fn with_little_room(test: impl FnOnce(&std::path::Path) + Send + 'static) {
    let thread = std::thread::spawn(|| {
        // SAFETY: without FILES, the descriptors stay shared.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
        mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE).unwrap();
        let directory = tempfile::tempdir().unwrap();
        mount(
            "none",
            directory.path(),
            "tmpfs",
            MountFlags::empty(),
            c"size=80m",
        )
        .unwrap();
        test(directory.path());
    });
    thread.join().unwrap();
}

fn source(url: &str) -> VolumeSource {
    VolumeSource::Http(http(url))
}

#[test]
fn a_file_that_does_not_fit_is_not_begun() {
    let name = serve(|_, stream| begin(stream, "200 OK", 1 << 60, "etag: \"1\"\r\n"));
    let directory = tempfile::tempdir().unwrap();
    let reason = failed(directory.path(), source(&format!("http://{name}/a")), None);
    assert!(
        reason.starts_with("the import needs 1152921504606846976 bytes, and "),
        "{reason}"
    );
    assert_eq!(entries(directory.path()), [""; 0]);
}

#[test]
#[ignore = "needs root"]
fn a_file_without_an_end_fills_no_file_system() {
    with_little_room(|directory| {
        let name = serve(|_, stream| {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n");
            while stream.write_all(&[1; 1 << 16]).is_ok() {}
        });
        let reason = failed(directory, source(&format!("http://{name}/a")), None);
        assert!(reason.starts_with("the import needs "), "{reason}");
    });
}

#[test]
#[ignore = "needs root"]
fn a_disk_that_does_not_fit_is_one_line() {
    with_little_room(|directory| {
        for length in [10_u64 << 20, 14 << 20] {
            let url = serve_file(content(length));
            let reason = failed(directory, source(&url), None);
            assert!(reason.starts_with("the file system of "), "{reason}");
            assert!(
                reason.ends_with(" is full: free space, and try again"),
                "{reason}"
            );
        }
        // Of a bomb.
        let url = serve_file(crate::formats::gz(&vec![1; 40 << 20]));
        let reason = failed(directory, source(&url), None);
        assert!(reason.contains(" is full: "), "{reason}");
        let url = serve_file(content(7 << 20));
        assert_eq!(filled(directory, source(&url), None).len(), 7 << 20);
    });
}
