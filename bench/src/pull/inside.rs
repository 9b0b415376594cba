//! The process that runs in the lab: pulls from a registry there, and reports the times.

use crate::rounds::{Turn, turns};
use crate::{bench_files, host, message};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use xtask::finish::finish;
use xtask::lab;

/// Parameters of a measurement.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Folder of `husk` and `husk-import`.
    pub release: PathBuf,
    /// The image, as an OCI archive.
    pub archive: PathBuf,
    /// Size of the disk in it.
    pub size_mib: u64,
    /// Rounds of both cases.
    pub rounds: u32,
}

pub const HUSK: &str = "husk";
pub const PEER: &str = "skopeo+tar";
/// The metric of a case.
pub const WHOLE: &str = "pull_s";
const COPY: &str = "copy_s";
const UNPACK: &str = "unpack_s";
/// Metrics and their titles.
pub const METRICS: [(&str, &str); 3] = [
    (WHOLE, "pull and unpack, s"),
    (COPY, "  skopeo copy, s"),
    (UNPACK, "  tar -xz, s"),
];

/// Address of the registry, which is asked by plain HTTP.
const REGISTRY: &str = "localhost:5077";
const IMAGE: &str = "localhost:5077/bench/disk:1";
/// Maximum time until the registry listens.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs the `plan`.
pub fn run(plan: &Plan) -> Result<()> {
    let folder = bench_files::folder()?;
    let folder = folder.path();
    // A shared folder drops its cache at every open.
    for program in ["husk", "husk-import"] {
        std::fs::copy(plan.release.join(program), folder.join(program))?;
    }
    let facts = [("disk_mib", json!(plan.size_mib))];
    message::env(host::facts(&folder.join("husk"))?, facts);
    let mut registry = registry(folder)?;
    let archive = plan.archive.display();
    let measured = listens().and_then(|()| run_in(
        folder,
        &format!("skopeo copy -q --insecure-policy --preserve-digests --dest-tls-verify=false oci-archive:{archive} docker://{IMAGE}"),
    ))
    .and_then(|_| rounds(plan, folder));
    let _ = registry.kill();
    let _ = registry.wait();
    measured
}

fn registry(folder: &Path) -> Result<std::process::Child> {
    let configuration = json!({
        "version": "0.1",
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": folder.join("registry")}},
        "http": {"addr": REGISTRY},
    });
    let file = folder.join("registry.yml");
    std::fs::write(&file, configuration.to_string())?;
    let log = std::fs::File::create(folder.join("registry.log"))?;
    let mut command = Command::new("docker-registry");
    command.arg("serve").arg(file);
    lab::detach(&mut command, &log)
        .spawn()
        .context("cannot start docker-registry")
}

/// Waits until the registry listens.
fn listens() -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while TcpStream::connect(REGISTRY).is_err() {
        ensure!(Instant::now() < deadline, "the registry does not listen");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn rounds(plan: &Plan, folder: &Path) -> Result<()> {
    for Turn { case, round, what } in turns(&[HUSK, PEER], plan.rounds) {
        message::news(format!("{case}: {what}"));
        run_in(folder, "rm -rf data copy unpacked; sync")?;
        let values = if case == HUSK {
            let pull = format!("HUSK_DATA_DIR=$PWD/data ./husk images pull {IMAGE}");
            let whole = run_in(folder, &pull)?;
            let size = run_in(
                folder,
                &format!(
                    "test $(stat -c %s data/images/sha256-*/rootfs/disk/disk.img) = {}",
                    plan.size_mib << 20
                ),
            );
            size.context("the disk is not in the store")?;
            vec![(WHOLE, "s", whole)]
        } else {
            let copy = run_in(
                folder,
                &format!("skopeo copy -q --insecure-policy --src-tls-verify=false docker://{IMAGE} dir:copy"),
            )?;
            let unpack = run_in(
                folder,
                "mkdir unpacked; layer=$(jq -r '.layers[0].digest' copy/manifest.json)
                 tar -C unpacked -xzf copy/${layer#sha256:}",
            )?;
            vec![
                (COPY, "s", copy),
                (UNPACK, "s", unpack),
                (WHOLE, "s", copy + unpack),
            ]
        };
        message::values("pull", case, round, values);
    }
    Ok(())
}

/// Runs a shell script; returns its time in seconds.
fn run_in(folder: &Path, script: &str) -> Result<f64> {
    let began = Instant::now();
    finish(Command::new("sh").args(["-euc", script]).current_dir(folder))?;
    Ok(began.elapsed().as_secs_f64())
}
