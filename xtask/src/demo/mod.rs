//! `cargo xtask demo`: boots a stock Debian from a KubeVirt manifest, and shows each step until its clean shutdown; or
//! the same Debian under KubeVirt's control plane.

mod cluster;
mod console;
mod guest;
mod inside;
mod show;

use crate::native::native_kvm;
use crate::progress::Progress;
use crate::{binaries, checkout, images, lab, self_copy};
use anyhow::{Context, Result, bail};
use inside::Plan;
use show::{Message, Show};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Arguments of `cargo xtask demo`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The disk image to boot: debian-13-cloud or debian-12-cloud
    #[arg(long, default_value = "debian-13-cloud", value_name = "NAME")]
    image: String,
    /// Show a VirtualMachine under KubeVirt 1.9's control plane, built from this checkout; needs root
    #[arg(long, value_name = "CHECKOUT", conflicts_with = "image")]
    kubevirt: Option<PathBuf>,
    /// Show this plan on this machine (the command runs itself this way where KVM is)
    #[arg(long, hide = true, value_name = "JSON")]
    inside: Option<String>,
}

/// Maximum time for the guest, in a lab on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

/// Number of attempts where QEMU emulates the processor: some nested guests crash or hang there.
const TRIES_IN_THE_LAB: u32 = 3;

/// Runs `cargo xtask demo`.
pub fn run(args: Args) -> Result<()> {
    if let Some(plan) = &args.inside {
        return inside::run(&serde_json::from_str(plan)?);
    }
    if let Some(source) = &args.kubevirt {
        return cluster::run(source);
    }
    let began = Instant::now();
    let progress = Progress::new();
    let mut show = Show::new();
    show.title("A stock Debian in a microVM, from a KubeVirt manifest");
    binaries::build_runtime(&progress)?;
    images::ensure(&progress, &[&args.image])?;
    let disk = images::path(&args.image)?.join("disk.img");
    if !disk.is_file() {
        bail!("{} is not a disk image", args.image);
    }
    // The lab is booted now, so that its boot does not count as part of the guest's start.
    if lab::Command::new(["true"]).status(&progress)? != 0 {
        bail!("the lab does not run commands");
    }
    let plan = Plan {
        manifest: checkout::root().join("tests/manifests/demo-vm.yaml"),
        disk: disk.clone(),
    };
    let before = modified(&disk)?;
    let copy = self_copy::copy()?;
    let words = [
        copy.to_string_lossy().into_owned(),
        "demo".to_owned(),
        "--inside".to_owned(),
        serde_json::to_string(&plan)?,
    ];
    let mut tries = if native_kvm() { 1 } else { TRIES_IN_THE_LAB };
    let guest = loop {
        let mut guest = Duration::ZERO;
        let status = lab::Command::new(words.clone())
            .timeout(LIMIT)
            .lines(&progress, |line| match serde_json::from_str(line) {
                Ok(Message::Guest(seconds)) => guest = Duration::from_secs_f64(seconds),
                Ok(message) => show.take(&message),
                Err(_) => show.line(line),
            })?;
        if status == 0 {
            break guest;
        }
        tries -= 1;
        if tries == 0 {
            bail!("the demonstration ended early, with status {status}");
        }
        show.line("the guest did not survive the lab's emulation, as happens now and then: once more");
    };
    drop(show);
    if modified(&disk)? != before {
        bail!("{} was changed", disk.display());
    }
    let total = began.elapsed();
    println!(
        "\n  {:.1} s in all: {:.1} s the guest's own, {:.1} s around it\n",
        total.as_secs_f64(),
        guest.as_secs_f64(),
        total.saturating_sub(guest).as_secs_f64()
    );
    Ok(())
}

/// Modification time of the image, which must not change.
fn modified(image: &std::path::Path) -> Result<std::time::SystemTime> {
    let metadata = image
        .metadata()
        .with_context(|| format!("no {}", image.display()))?;
    Ok(metadata.modified()?)
}
