//! `cargo xtask demo`: keeps a stock Debian running from a KubeVirt manifest and a registry, and shows each step until
//! nothing is left; or the same Debian under KubeVirt's control plane.

mod cluster;
mod console;
mod guest;
mod inside;
mod place;
mod show;

use crate::native::native_kvm;
use crate::packages::{self, Tool, present, tool};
use crate::progress::Progress;
use crate::{binaries, checkout, container_image, images, lab, self_copy};
use anyhow::{Result, bail};
use inside::Plan;
use show::{Message, Show};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

/// Arguments of `cargo xtask demo`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Show a VirtualMachine under KubeVirt 1.9's control plane, built from this checkout; needs root
    #[arg(long, value_name = "CHECKOUT")]
    kubevirt: Option<PathBuf>,
    /// Show this plan on this machine (the command runs itself this way where KVM is)
    #[arg(long, hide = true, value_name = "JSON")]
    inside: Option<String>,
}

/// The disk in the registry.
const IMAGE: &str = "debian-13-cloud";

/// Maximum time, in a lab on a busy machine.
const LIMIT: Duration = Duration::from_secs(1800);

/// Number of attempts where QEMU emulates the processor: some nested guests crash or hang there.
const TRIES_IN_THE_LAB: u32 = 3;

/// A container image is made on this machine; the rest is for a registry on it. The lab has all of them.
const TOOLS: [Tool; 5] = [
    tool("qemu-img", "qemu-utils"),
    tool("docker-registry", "docker-registry"),
    tool("htpasswd", "apache2-utils"),
    tool("openssl", "openssl"),
    tool("skopeo", "skopeo"),
];

/// Runs `cargo xtask demo`.
pub fn run(args: Args) -> Result<()> {
    if let Some(plan) = &args.inside {
        return inside::run(&serde_json::from_str(plan)?);
    }
    if let Some(source) = &args.kubevirt {
        return cluster::run(source);
    }
    let began = Instant::now();
    let progress = Progress::on_stderr();
    let mut show = Show::new();
    show.title("A stock Debian from a registry, kept running in a microVM as a KubeVirt manifest says");
    binaries::build_runtime(&progress)?;
    let obstacle = native_kvm().then(place::obstacle).flatten();
    if let Some(obstacle) = obstacle {
        show.line(&format!("in the lab, because {obstacle}"));
    }
    let native = native_kvm() && obstacle.is_none();
    ensure_tools(&progress, native)?;
    images::ensure(&progress, &[IMAGE])?;
    let plan = Plan {
        manifest: checkout::root().join("tests/manifests/demo-apply.yaml"),
        archive: archive(&progress)?,
    };
    // The lab is booted now, so that its boot does not count as part of the guest's start.
    if lab::Command::new(["true"]).in_lab(!native).status(&progress)? != 0 {
        bail!("the lab does not run commands");
    }
    let copy = self_copy::copy()?;
    let words = [
        copy.to_string_lossy().into_owned(),
        "demo".to_owned(),
        "--inside".to_owned(),
        serde_json::to_string(&plan)?,
    ];
    let mut tries = if native { 1 } else { TRIES_IN_THE_LAB };
    loop {
        let mut ran = false;
        let status = lab::Command::new(words.clone())
            .in_lab(!native)
            .timeout(LIMIT)
            .lines(&progress, |line| match serde_json::from_str::<Message>(line) {
                Ok(message) => {
                    ran |= matches!(message, Message::Moment(..));
                    show.take(&message);
                }
                Err(_) => show.line(line),
            })?;
        if status == 0 {
            break;
        }
        tries -= 1;
        // Only a guest may fail by chance.
        if tries == 0 || !ran {
            bail!("the demonstration ended early, with status {status}");
        }
        show.line("it ended early; now and then a guest does not survive the lab's emulation: once more");
    }
    drop(show);
    println!("\n  {:.1} s in all\n", began.elapsed().as_secs_f64());
    Ok(())
}

fn ensure_tools(progress: &Progress, native: bool) -> Result<()> {
    if !native {
        return packages::ensure(progress, &TOOLS[..1]);
    }
    let new = !present("docker-registry");
    packages::ensure(progress, &TOOLS)?;
    if new {
        // Debian starts an open registry with the package. The demonstration has its own.
        let mut stop = Command::new("systemctl");
        stop.args(["disable", "--now", "--quiet", "docker-registry.service"]);
        let _ = stop.status();
    }
    Ok(())
}

/// The disk as a containerDisk, made unless it is newer than the disk: a qcow2 image, because tar keeps no holes that
/// every reader of container images knows.
fn archive(progress: &Progress) -> Result<PathBuf> {
    let disk = images::path(IMAGE)?.join("disk.img");
    let folder = checkout::folder(checkout::target().join("images"))?;
    let archive = folder.join(format!("{IMAGE}.tar"));
    if modified(&archive).is_ok_and(|made| modified(&disk).is_ok_and(|disk| disk < made)) {
        return Ok(archive);
    }
    let step = progress.step(format!("packing {IMAGE} as a containerDisk"));
    let tree = tempfile::tempdir_in(&folder)?;
    std::fs::create_dir(tree.path().join("disk"))?;
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-O", "qcow2"]).arg(&disk);
    step.command(convert.arg(tree.path().join("disk/disk.img")))?;
    let unfinished = folder.join(format!(".{IMAGE}.tar"));
    container_image::pack(tree.path(), "localhost/debian:13", &["/none"], &unfinished, true)?;
    std::fs::rename(&unfinished, &archive)?;
    step.done();
    Ok(archive)
}

fn modified(file: &Path) -> std::io::Result<SystemTime> {
    file.metadata()?.modified()
}
