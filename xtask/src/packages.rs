//! Debian packages that a step needs on this machine.

use crate::progress::Progress;
use anyhow::{Result, bail};
use std::path::Path;
use std::process::Command;

/// A command and the Debian package that contains it.
#[derive(Debug, Clone, Copy)]
pub struct Tool {
    /// Name on PATH, or an absolute path of any file.
    pub name: &'static str,
    /// Name of the package.
    pub package: &'static str,
}

/// The command `name` of the package `package`.
pub const fn tool(name: &'static str, package: &'static str) -> Tool {
    Tool { name, package }
}

/// Makes sure that every tool is installed.
///
/// # Errors
/// Names the command to run if a tool is missing and this process is not root on a machine with apt.
pub fn ensure(progress: &Progress, tools: &[Tool]) -> Result<()> {
    let mut missing: Vec<&str> = tools
        .iter()
        .filter(|tool| !present(tool.name))
        .map(|tool| tool.package)
        .collect();
    missing.sort_unstable();
    missing.dedup();
    if missing.is_empty() {
        return Ok(());
    }
    let packages = missing.join(" ");
    if !rustix::process::geteuid().is_root() || !present("apt-get") {
        bail!("missing on this machine: {packages}\nrun: sudo apt-get install -y {packages}");
    }
    let step = progress.step(format!("installing {packages}"));
    // A fresh machine may have no package lists at all, an old one stale lists: refresh, then install.
    step.command(&mut apt(&["update"]))?;
    let mut install = apt(&["install", "-y", "--no-install-recommends"]);
    install.args(&missing);
    step.command(&mut install)?;
    step.done();
    Ok(())
}

/// True if `name` is an existing file, or a command on PATH or in the system's own folders.
pub fn present(name: &str) -> bool {
    if name.starts_with('/') {
        return Path::new(name).exists();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|folder| folder.join(name).is_file())
}

/// An `apt-get` without prompts that waits for another apt's lock.
pub fn apt(args: &[&str]) -> Command {
    let mut command = Command::new("apt-get");
    command
        .args(["-q", "-o", "DPkg::Lock::Timeout=300"])
        .args(args)
        .env("DEBIAN_FRONTEND", "noninteractive");
    command
}
