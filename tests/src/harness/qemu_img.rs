//! qcow2 images, made and checked by `qemu-img`.

use super::context::{Skip, TestContext};
use super::vm::Vm;
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs `qemu-img` in the context's folder; returns its output.
///
/// # Errors
/// If it fails; a [`Skip`] if it is not installed.
pub fn qemu_img<S: AsRef<OsStr>>(ctx: &TestContext, arguments: &[S]) -> Result<String> {
    let mut command = Command::new("qemu-img");
    command.args(arguments).current_dir(ctx.path("."));
    let output = match command.output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(Skip("needs qemu-img".to_owned()).into());
        }
        output => output.context("cannot start qemu-img")?,
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {text}{errors}");
    Ok(text)
}

/// Fails unless the qcow2 image at `path` has no errors and no leaked clusters.
pub fn is_sound(ctx: &TestContext, path: &Path) -> Result<()> {
    qemu_img(ctx, &["check", "-f", "qcow2", &path.to_string_lossy()]).map(drop)
}

/// The only overlay of a VM, which is an unlinked file. This keeps it open, even after the VM has ended.
pub fn overlay(vm: &Vm<'_>) -> Result<File> {
    let pid = vm.pid("vmmPid")?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        // Descriptors may be closed meanwhile.
        let Ok(target) = std::fs::read_link(&path) else {
            continue;
        };
        if !target.to_string_lossy().ends_with("(deleted)") {
            continue;
        }
        let mut head = [0; 4];
        if let Ok(mut file) = File::open(&path)
            && file.read_exact(&mut head).is_ok()
            && head == *b"QFI\xfb"
        {
            found.push(file);
        }
    }
    ensure!(found.len() == 1, "{} overlays", found.len());
    found.pop().context("no overlay")
}

/// Links an overlay as `name` in the context's folder.
pub fn keep(ctx: &TestContext, mut overlay: File, name: &str) -> Result<PathBuf> {
    let path = ctx.path(name);
    overlay.rewind()?;
    std::io::copy(&mut overlay, &mut File::create(&path)?)?;
    Ok(path)
}

/// Converts the overlay `path` over the qcow2 image `base` to the raw file `name`.
pub fn content(ctx: &TestContext, path: &Path, base: &Path, name: &str) -> Result<PathBuf> {
    let to = ctx.path(name);
    let layer = |path: &Path| json!({"driver": "file", "filename": path});
    let backing = json!({"driver": "qcow2", "file": layer(base)});
    let chain = json!({"driver": "qcow2", "file": layer(path), "backing": backing});
    let from = format!("json:{chain}");
    qemu_img(ctx, &["convert", "-O", "raw", &from, &to.to_string_lossy()])?;
    Ok(to)
}
