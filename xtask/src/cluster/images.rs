//! Container images for the nodes, which have no registry.

use super::{Programs, guests, kubevirt};
use crate::container_image;
use crate::images::containers;
use crate::progress::Progress;
use crate::{checkout, lab};
use anyhow::{Context, Result, ensure};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Image of the nodes' sandboxes.
pub const PAUSE: &str = "localhost/husk/pause:1";
/// Image with a small guest's kernel and initramfs, for VMIs with `kernelBoot`.
const GUEST: &str = "localhost/husk/guest:6.12";
/// A containerDisk with the same guest.
const DISK: &str = "localhost/husk/disk:6.12";

/// The agent's image with a shim that has another hash. Nodes do not import it at their start.
const NEXT: &str = "localhost/husk/agent:next";

/// The content of an image.
struct Recipe<'a> {
    /// Name of the archive.
    name: &'a str,
    image: &'a str,
    /// Files by their paths in the image.
    files: Vec<(&'a str, &'a Path)>,
    command: &'a [&'a str],
}

/// Packs the images that every node imports; returns the archives.
pub fn make(progress: &Progress, folder: &Path, source: &Path, programs: &Programs) -> Result<Vec<PathBuf>> {
    let to = checkout::folder(folder.join("images"))?;
    let guests = guests::make(progress, &to)?;
    let step = progress.step("packing container images");
    let busybox = lab::program(progress, "usr/bin/busybox")?;
    let container_disk = to.join("container-disk");
    // KubeVirt's attachment pods run it.
    step.command(
        Command::new("gcc")
            .args(["-static", "-O1", "-o"])
            .arg(&container_disk)
            .arg(source.join("cmd/container-disk-v2alpha/main.c")),
    )?;
    let launcher = kubevirt::launcher_image(&kubevirt::version(source)?);
    // A node unpacks images slowly, and most of a test's program is debugging data.
    let stripped = checkout::folder(to.join("programs"))?;
    for program in containers::PROGRAMS {
        step.command(
            Command::new("strip")
                .arg("-o")
                .arg(stripped.join(program))
                .arg(programs.husk.join(program)),
        )?;
    }
    let recipes = [
        Recipe {
            name: "pause",
            image: PAUSE,
            files: vec![("bin/busybox", &busybox)],
            command: &["/bin/busybox", "sleep", "1000000000"],
        },
        Recipe {
            name: "launcher",
            image: &launcher,
            files: vec![
                ("bin/busybox", &busybox),
                ("usr/bin/container-disk", &container_disk),
            ],
            command: &["/bin/sh"],
        },
        Recipe {
            name: "guest",
            image: GUEST,
            files: vec![("boot/vmlinuz", &guests.kernel), ("boot/initrd", &guests.initrd)],
            command: &["/none"],
        },
        Recipe {
            name: "disk",
            image: DISK,
            files: vec![("disk/disk.img", &guests.disk)],
            command: &["/none"],
        },
    ];
    let agent = to.join("agent.tar");
    containers::pack(&stripped, containers::AGENT, &agent)?;
    // A node that has this one is upgraded to it by a test.
    let shim = stripped.join("containerd-shim-husk-v2");
    std::fs::OpenOptions::new()
        .append(true)
        .open(shim)?
        .write_all(b"\n")?;
    containers::pack(&stripped, NEXT, &to.join("agent-next.tar"))?;
    let mut archives = vec![agent];
    for recipe in recipes {
        let tree = tempfile::tempdir_in(&to)?;
        for (path, from) in recipe.files {
            let file = tree.path().join(path);
            checkout::folder(file.parent().context("no folder")?.to_owned())?;
            std::fs::copy(from, &file).with_context(|| format!("cannot copy {}", from.display()))?;
        }
        if tree.path().join("bin/busybox").exists() {
            for link in [
                "sh", "bash", "cat", "cp", "ls", "ping", "sleep", "wget", "nc", "test",
            ] {
                symlink("busybox", tree.path().join("bin").join(link))?;
            }
        }
        let mode = Command::new("chmod").arg("755").arg(tree.path()).status()?;
        ensure!(mode.success(), "chmod: {mode}");
        let archive = to.join(format!("{}.tar", recipe.name));
        container_image::pack(tree.path(), recipe.image, recipe.command, &archive, false)?;
        archives.push(archive);
    }
    step.done();
    Ok(archives)
}
