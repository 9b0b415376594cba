//! `cargo xtask test --kubevirt`: the cases under KubeVirt's control plane. They run on this machine, in a cluster of
//! their own.

use super::stages::{Stage, Stages};
use crate::binaries::Profile;
use crate::progress::Progress;
use crate::{cluster, images, packages};
use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Interval of looks for killed processes.
const RESTART_INTERVAL: Duration = Duration::from_secs(1);

/// Starts a cluster with KubeVirt from the checkout `source`, runs the cases whose names contain `filter`, and ends the
/// cluster.
pub fn run(stages: &Stages, source: &Path, build: bool, filter: Option<&str>) {
    let up = stages.run("cluster", |_| {
        if cluster::exists() {
            bail!("there is a cluster: end it by cargo xtask cluster down");
        }
        let progress = Progress::new();
        // For virtctl ssh.
        packages::ensure(&progress, &super::TOOLS)?;
        images::ensure(&progress, &["debian-13-cloud"])?;
        cluster::up(source, 1, build)
    });
    if up {
        stages.run("cases under KubeVirt", |stage| {
            let (end, ended) = mpsc::channel::<()>();
            std::thread::scope(|scope| {
                scope.spawn(move || restart_killed(&ended));
                let result = cases(stage, source, filter);
                drop(end);
                result
            })
        });
        stages.run("end of the cluster", |_| cluster::down());
    } else {
        stages.fail("cases under KubeVirt", "not run, because there is no cluster");
    }
}

/// Starts the processes again that cases kill, until `ended` is closed.
fn restart_killed(ended: &mpsc::Receiver<()>) {
    while ended.recv_timeout(RESTART_INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
        if let Err(error) = cluster::restart_ended() {
            eprintln!("the control plane: {error:#}");
        }
    }
}

fn cases(stage: &mut Stage, source: &Path, filter: Option<&str>) -> Result<()> {
    let mut suite = Command::new(Profile::EndToEnd.folder().join("husk-e2e"))
        .arg("--kubevirt")
        .args(filter)
        .env("HUSK_CLUSTER", cluster::folder()?)
        .env("HUSK_XTASK", std::env::current_exe()?)
        .env("HUSK_KUBEVIRT", source.canonicalize()?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start husk-e2e")?;
    let stdout = suite.stdout.take().context("no output")?;
    let mut closed = false;
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        if stage.tally.end_to_end(&line) {
            closed = true;
        } else {
            println!("{line}");
        }
    }
    let status = suite.wait()?;
    if !closed {
        bail!("husk-e2e ended early: {status}");
    }
    Ok(())
}
