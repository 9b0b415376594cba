//! Code that the cases share.

pub mod applied;
pub mod attach;
pub mod capture;
pub mod containerd;
pub mod context;
pub mod cri;
pub mod datapath;
pub mod examples;
pub mod flow;
pub mod guest;
pub mod images;
pub mod initrd;
pub mod kubelet;
pub mod kubernetes;
pub mod kubevirt;
pub mod log_writes;
pub mod manifest;
pub mod netns;
pub mod oci;
pub mod output_buffer;
pub mod pod;
pub mod privileges;
pub mod processes;
pub mod program;
pub mod qemu_img;
pub mod registry;
pub mod runner;
pub mod stores;
pub mod vm;

use anyhow::{Result, ensure};
use context::TestContext;
use std::time::{Duration, Instant};

/// One end-to-end test.
#[derive(Debug)]
pub struct Case {
    /// Unique name.
    pub name: &'static str,
    /// One-line description of what it proves.
    pub about: &'static str,
    /// Time limit, after which it counts as hung. Generous, because the machine may run other work.
    pub limit: Duration,
    /// Runs the case. It may report parts by [`TestContext::part`].
    pub run: fn(&TestContext) -> Result<()>,
}

/// Time limit of a case whose guests are small initramfs systems.
pub const SMALL: Duration = Duration::from_secs(240);

/// Time limit of a case that boots Debian from a disk.
pub const DEBIAN: Duration = Duration::from_secs(1500);

/// Time after which a step of a guest or of a command counts as hung.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Pause between two looks, unless a case has another.
pub const PAUSE: Duration = Duration::from_millis(100);

/// Calls `look` every `pause` until it returns a value. The inner error is a text that says why there is none yet.
///
/// # Errors
/// `look` fails, or there is no value after `limit`: the last text.
pub fn poll<T>(
    limit: Duration,
    pause: Duration,
    mut look: impl FnMut() -> Result<Result<T, String>>,
) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        match look()? {
            Ok(found) => return Ok(found),
            Err(missing) => ensure!(Instant::now() < deadline, "{missing}"),
        }
        std::thread::sleep(pause);
    }
}

/// The answer of a look for [`poll`]: success if `is` is true, else the text of `missing`.
pub fn met(is: bool, missing: impl FnOnce() -> String) -> Result<Result<(), String>> {
    Ok(is.then_some(()).ok_or_else(missing))
}

/// Waits until `is` returns true.
///
/// # Errors
/// It fails, or does not become true.
pub fn until(mut is: impl FnMut() -> Result<bool>) -> Result<()> {
    poll(TIMEOUT, PAUSE, || met(is()?, || "it stays so".to_owned()))
}
