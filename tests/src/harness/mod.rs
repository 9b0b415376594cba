//! What the cases have in common.

pub mod attach;
pub mod capture;
pub mod containerd;
pub mod context;
pub mod cri;
pub mod datapath;
pub mod flow;
pub mod guest;
pub mod images;
pub mod initrd;
pub mod kubelet;
pub mod kubernetes;
pub mod log_writes;
pub mod manifest;
pub mod netns;
pub mod output_buffer;
pub mod pod;
pub mod privileges;
pub mod processes;
pub mod program;
pub mod qemu_img;
pub mod runner;
pub mod vm;

use context::TestContext;
use std::time::Duration;

/// One end-to-end test.
#[derive(Debug)]
pub struct Case {
    /// Its name, unique.
    pub name: &'static str,
    /// What it proves, in one line.
    pub about: &'static str,
    /// When it counts as hung. Generous: other work may share the machine.
    pub limit: Duration,
    /// Runs it. It may report parts by [`TestContext::part`].
    pub run: fn(&TestContext) -> anyhow::Result<()>,
}

/// The limit of a case whose guests are small initramfs systems.
pub const SMALL: Duration = Duration::from_secs(240);

/// The limit of a case that boots Debian from a disk.
pub const DEBIAN: Duration = Duration::from_secs(900);

/// Time after which a step of a guest or of a command counts as hung.
pub const PATIENCE: Duration = Duration::from_secs(120);
