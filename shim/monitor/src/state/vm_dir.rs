//! One VM's directory.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use husk_network::ofd_lock;

use super::error::StateError;

pub(super) const PID: &str = "monitor.pid";
/// Everything a monitor may leave in its directory beside monitor.pid and what is kept of the VM's network.
const FILES: [&str; 10] = [
    "pod.sock",
    "fds.sock",
    "plan.json",
    "plan.json.new",
    "vmi.json",
    "console.log",
    "console.log.1",
    "monitor.log",
    "monitor.log.1",
    "known_hosts",
];

/// The state directory of one VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmDir {
    path: PathBuf,
    namespace: String,
    name: String,
}

impl VmDir {
    pub(super) fn new(path: PathBuf, namespace: &str, name: &str) -> VmDir {
        VmDir {
            path,
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The VM's namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The VM's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The socket its monitor serves `husk.shim.v1` on. Its path may be too long for `connect`: see
    /// [`crate::client::connect`].
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.path.join("pod.sock")
    }

    /// The socket to which descriptors are sent that calls of `husk.shim.v1` name: see [`husk_proto::fds`].
    #[must_use]
    pub fn descriptors(&self) -> PathBuf {
        self.path.join("fds.sock")
    }

    /// What the guest wrote to its serial console, raw bytes. When it grows large it becomes `console.log.1` and starts
    /// anew, so a follower reopens it when its inode changes.
    #[must_use]
    pub fn console_log(&self) -> PathBuf {
        self.path.join("console.log")
    }

    /// The log of the monitor and its VMM.
    #[must_use]
    pub fn monitor_log(&self) -> PathBuf {
        self.path.join("monitor.log")
    }

    /// The `husk_vmi::VmPlan` the VM was started from, with the volumes plugged since, as JSON.
    #[must_use]
    pub fn plan(&self) -> PathBuf {
        self.path.join("plan.json")
    }

    /// The metadata of the manifest it was started from, as JSON.
    #[must_use]
    pub fn vmi(&self) -> PathBuf {
        self.path.join("vmi.json")
    }

    /// The host keys its guest showed to `husk ssh`.
    #[must_use]
    pub fn known_hosts(&self) -> PathBuf {
        self.path.join("known_hosts")
    }

    /// The process id of its monitor.
    #[must_use]
    pub fn monitor_pid(&self) -> Option<u32> {
        fs::read_to_string(self.path.join(PID)).ok()?.trim().parse().ok()
    }

    /// Whether its monitor lives.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.held().unwrap_or(false)
    }

    /// Whether a monitor had it and died.
    pub(super) fn is_abandoned(&self) -> bool {
        self.held().is_ok_and(|held| !held)
    }

    fn held(&self) -> io::Result<bool> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(self.path.join(PID))?;
        ofd_lock::is_held(&file)
    }

    /// Removes the directory, and its namespace's if that was the last. Under the runtime directory's lock.
    ///
    /// It is moved removal_path first, so that nobody ever sees a part of it. Before that, what a monitor did to a network and
    /// did not take back is taken back: nobody would know of it later.
    pub(super) fn remove(&self, aside: &Path) -> Result<(), StateError> {
        clear(aside)?;
        refuse_foreign(&self.path)?;
        husk_network::tear_down_saved(&self.path, None).map_err(|source| StateError::Network {
            dir: self.path.clone(),
            source,
        })?;
        fs::rename(&self.path, aside).map_err(StateError::io(&self.path))?;
        if let Err(error) = clear(aside) {
            // What Husk did not make stays where it was.
            let _ = fs::rename(aside, &self.path);
            return Err(error);
        }
        if let Some(namespace) = self.path.parent() {
            // Fails where another VM is in it, which is as it should be.
            let _ = fs::remove_dir(namespace);
        }
        Ok(())
    }
}

/// Refuses a directory with anything in it that no monitor makes.
fn refuse_foreign(dir: &Path) -> Result<(), StateError> {
    for entry in fs::read_dir(dir).map_err(StateError::io(dir))?.flatten() {
        let name = entry.file_name();
        if !is_known(&name) || entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            return Err(StateError::Foreign(entry.path()));
        }
    }
    Ok(())
}

/// Removes a VM's directory, file by known file; does nothing where it is not.
pub(super) fn clear(dir: &Path) -> Result<(), StateError> {
    match fs::symlink_metadata(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Ok(meta) if !meta.is_dir() => return Err(StateError::Foreign(dir.to_owned())),
        _ => refuse_foreign(dir)?,
    }
    let gone = |path: &Path, removed: io::Result<()>| match removed {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(StateError::io(path)(e)),
        _ => Ok(()),
    };
    for entry in fs::read_dir(dir).map_err(StateError::io(dir))?.flatten() {
        if is_known(&entry.file_name()) {
            gone(&entry.path(), fs::remove_file(entry.path()))?;
        }
    }
    gone(dir, fs::remove_dir(dir))
}

/// Whether a monitor makes files of this name.
fn is_known(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    FILES.into_iter().chain([PID]).any(|known| name == known) || husk_network::is_state_file(&name)
}
