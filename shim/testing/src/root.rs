//! Tests that only root can run, also for ordinary users.

use std::process::Command;

/// Set where a test runs as the root of a user namespace, in which there are no other users.
pub const INSIDE: &str = "HUSK_TEST_USERNS";

/// Whether the calling test can go on, as root. For an ordinary user it is run once more as the root of a user namespace,
/// and that is all there is to do.
///
/// # Panics
/// If it fails there, or the machine lets this user have no such namespace.
pub fn is_root() -> bool {
    if rustix::process::geteuid().is_root() {
        return true;
    }
    let thread = std::thread::current();
    let test = thread.name().expect("a test's thread has its name");
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .expect("this test needs root or the command unshare, of util-linux");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(
        out.contains("running 1 test"),
        "this test needs root or user namespaces: {}",
        err.trim()
    );
    assert!(output.status.success() && out.contains("1 passed"), "{out}{err}");
    false
}
