//! The cases: how each VMM is started, how its guest is saved, and how it is restored.

use crate::bench_files::BenchFiles;
use crate::cases::named_cases;
use crate::guest::{self, EARLY, Guest, SCRIPT};
use crate::line::Line;
use crate::qmp;
use crate::started::Started;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use xtask::finish::finish;
use xtask::qmp::Qmp;

named_cases! {
    /// A VMM with one way to save its guest.
    pub enum Case {
        /// `husk snapshot` and `husk restore`.
        Husk = "husk",
        /// QEMU's migration as one stream, which `cat` writes and reads.
        Q35 = "qemu-q35",
        /// QEMU's migration with `mapped-ram`, where each page has its place in the file, and with `multifd`.
        Q35Mapped = "qemu-q35-mapped",
    }
}

/// Memory of every guest.
pub const MEMORY_MIB: u64 = 1024;
/// Memory that a guest writes to before it is saved.
pub const WRITTEN_MIB: u64 = 256;
/// Memory that a clone writes to.
pub const MORE_MIB: u64 = 64;

const NAME: &str = "bench-snapshot";
/// More than any disk writes in a second: QEMU's default is 128 MiB.
const UNLIMITED: u64 = 1 << 40;

/// A guest that runs.
#[derive(Debug)]
pub struct Running {
    /// Its processes.
    pub started: Started,
    /// Its serial line.
    pub line: Line,
    /// QEMU's monitor.
    qmp: Option<Qmp>,
}

impl Case {
    /// The VMM of a guest whose kernel prints its first line at once, to the VMM's output.
    pub fn early(self, files: &BenchFiles) -> Result<guest::Vmm> {
        let guest = guest(NAME, EARLY);
        match self {
            Self::Husk => guest.husk(files, "", ""),
            Self::Q35 | Self::Q35Mapped => {
                let mut vmm = guest.qemu("q35", files);
                devices(&mut vmm);
                Ok(vmm)
            }
        }
    }

    /// Boots a guest.
    pub fn boot(self, files: &BenchFiles, timeout: Duration) -> Result<Running> {
        match self {
            Self::Husk => {
                let guest = guest(NAME, SCRIPT);
                let mut started = Started::start(guest.husk_detached(files)?, timeout)?;
                let line = started.reached(&guest.socket(files), Line::monitor)?;
                started.returned()?;
                Ok(Running {
                    started,
                    line,
                    qmp: None,
                })
            }
            Self::Q35 | Self::Q35Mapped => {
                let mut started = Started::start(qemu(files), timeout)?;
                let qmp = started.reached(&qmp::socket(files), Qmp::connect)?;
                let line = started.reached(&serial_socket(files), Line::socket)?;
                Ok(Running {
                    started,
                    line,
                    qmp: Some(qmp),
                })
            }
        }
    }

    /// Saves a guest to the new file or directory `to`; returns the time that it took.
    pub fn save(self, running: &mut Running, files: &BenchFiles, to: &Path) -> Result<Duration> {
        let Some(qmp) = &mut running.qmp else {
            let mut husk = guest::husk(files);
            husk.args(["snapshot", NAME]).arg(to);
            let began = Instant::now();
            finish(&mut husk)?;
            return Ok(began.elapsed());
        };
        self.prepare(qmp)?;
        let began = Instant::now();
        // As Husk does: a guest that ran on would have to be copied more than once.
        qmp.execute("stop", json!({}))?;
        qmp.execute("migrate", json!({ "uri": self.uri(to, ">")? }))?;
        qmp.migrated()?;
        Ok(began.elapsed())
    }

    /// Restores a guest, and connects its serial line.
    pub fn restore(self, files: &BenchFiles, from: &Path, timeout: Duration) -> Result<Running> {
        if self == Self::Husk {
            return restore_as(NAME, files, from, timeout);
        }
        let mut vmm = qemu(files);
        vmm.command.args(["-incoming", "defer"]);
        let mut started = Started::start(vmm, timeout)?;
        let mut qmp = started.reached(&qmp::socket(files), Qmp::connect)?;
        let line = started.reached(&serial_socket(files), Line::socket)?;
        self.prepare(&mut qmp)?;
        qmp.execute("migrate-incoming", json!({ "uri": self.uri(from, "<")? }))?;
        qmp.migrated()?;
        // It was saved while it was stopped.
        qmp.execute("cont", json!({}))?;
        Ok(Running {
            started,
            line,
            qmp: Some(qmp),
        })
    }

    /// The file that QEMU writes, or reads.
    fn uri(self, path: &Path, direction: &str) -> Result<String> {
        let path = path.to_str().context("no text")?;
        Ok(match self {
            Self::Q35Mapped => format!("file:{path}"),
            _ => format!("exec:cat {direction}'{path}'"),
        })
    }

    fn prepare(self, qmp: &mut Qmp) -> Result<()> {
        let capabilities: &[&str] = match self {
            Self::Q35Mapped => &["events", "mapped-ram", "multifd"],
            _ => &["events"],
        };
        let on = |name: &&str| json!({ "capability": name, "state": true });
        let capabilities: Vec<Value> = capabilities.iter().map(on).collect();
        qmp.execute(
            "migrate-set-capabilities",
            json!({ "capabilities": capabilities }),
        )?;
        let mut parameters = json!({ "max-bandwidth": UNLIMITED });
        if self == Self::Q35Mapped {
            parameters["multifd-channels"] = json!(std::thread::available_parallelism()?.get().min(8));
        }
        qmp.execute("migrate-set-parameters", parameters)?;
        Ok(())
    }
}

/// Starts `husk snapshot --live --resume` of the guest of a round.
pub fn save_live(files: &BenchFiles, to: &Path) -> Result<Child> {
    let mut husk = guest::husk(files);
    husk.args(["snapshot", NAME]).arg(to).args(["--live", "--resume"]);
    Ok(husk.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?)
}

/// Starts `husk restore` under a name, and connects to the guest's serial line, which may be there before the command
/// has ended.
pub fn restore_as(name: &str, files: &BenchFiles, from: &Path, timeout: Duration) -> Result<Running> {
    let guest = guest(name, SCRIPT);
    let mut husk = guest::husk(files);
    husk.arg("restore").arg(from).args(["--name", name, "--detach"]);
    let mut started = Started::start(guest.as_husk(files, husk), timeout)?;
    let line = started.reached(&guest.socket(files), Line::monitor)?;
    Ok(Running {
        started,
        line,
        qmp: None,
    })
}

/// True if QEMU has a capability of migrations.
pub fn has_capability(files: &BenchFiles, name: &str) -> Result<bool> {
    let mut vmm = qemu(files);
    vmm.command.arg("-S");
    let mut started = Started::start(vmm, Duration::from_secs(60))?;
    let mut qmp = started.reached(&qmp::socket(files), Qmp::connect)?;
    let known = qmp.execute("query-migrate-capabilities", json!({}))?;
    let known = known.as_array().context("no capabilities")?;
    Ok(known.iter().any(|known| known["capability"] == name))
}

fn guest<'a>(name: &'a str, append: &'a str) -> Guest<'a> {
    Guest {
        name,
        vcpus: 1,
        mib: MEMORY_MIB,
        append: Some(append),
    }
}

fn qemu(files: &BenchFiles) -> guest::Vmm {
    let serial = format!("unix:{},server=on,wait=off", serial_socket(files).display());
    let mut vmm = guest(NAME, SCRIPT).qemu_serial("q35", files, &serial);
    devices(&mut vmm);
    qmp::listen(&mut vmm, files);
    vmm
}

/// The virtio devices that Husk gives every guest.
fn devices(vmm: &mut guest::Vmm) {
    for device in ["virtio-scsi-pci", "virtio-serial-pci"] {
        vmm.command.args(["-device", device]);
    }
}

fn serial_socket(files: &BenchFiles) -> PathBuf {
    files.folder.join("serial")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemus_cases_write_and_read_the_same_file() {
        let file = Path::new("/a b/saved");
        let uri = |case: Case, direction| case.uri(file, direction).expect("text");
        assert_eq!(uri(Case::Q35, ">"), "exec:cat >'/a b/saved'");
        assert_eq!(uri(Case::Q35, "<"), "exec:cat <'/a b/saved'");
        assert_eq!(uri(Case::Q35Mapped, ">"), "file:/a b/saved");
        assert_eq!(uri(Case::Q35Mapped, "<"), "file:/a b/saved");
    }
}
