//! One VM's directory.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use husk_network::ofd_lock;

use super::error::StateError;

/// Marks the directory of a launcher pod's VM.
const LAUNCHER: &str = "launcher";

pub(super) const PID: &str = "monitor.pid";
/// All files of a VM's directory except monitor.pid and the saved state of its network.
const FILES: [&str; 12] = [
    LAUNCHER,
    "pod.sock",
    "fds.sock",
    "vsock.sock",
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

    /// The socket of `husk.shim.v1`. Its path may be too long for `connect`: see [`crate::client::connect`].
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.path.join("pod.sock")
    }

    /// The socket for the descriptors that calls of `husk.shim.v1` name: see [`husk_proto::fds`].
    #[must_use]
    pub fn descriptors(&self) -> PathBuf {
        self.path.join("fds.sock")
    }

    /// The log of the guest's serial console, as raw bytes. A large log is renamed to `console.log.1` and a new one is
    /// started, so a reader that follows it reopens it when its inode changes.
    #[must_use]
    pub fn console_log(&self) -> PathBuf {
        self.path.join("console.log")
    }

    /// The log of the monitor and its VMM.
    #[must_use]
    pub fn monitor_log(&self) -> PathBuf {
        self.path.join("monitor.log")
    }

    /// The `husk_vmi::VmPlan` of the VM with its hotplugged volumes, as JSON.
    #[must_use]
    pub fn plan(&self) -> PathBuf {
        self.path.join("plan.json")
    }

    /// The metadata of the VM's manifest, as JSON.
    #[must_use]
    pub fn vmi(&self) -> PathBuf {
        self.path.join("vmi.json")
    }

    /// The guest's SSH host keys, for `husk ssh`.
    #[must_use]
    pub fn known_hosts(&self) -> PathBuf {
        self.path.join("known_hosts")
    }

    /// Returns the process id of its monitor.
    #[must_use]
    pub fn monitor_pid(&self) -> Option<u32> {
        fs::read_to_string(self.path.join(PID)).ok()?.trim().parse().ok()
    }

    /// True if its monitor runs.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.held().unwrap_or(false)
    }

    /// True if an agent waits for the end of this VM.
    pub(super) fn is_launchers(&self) -> bool {
        self.path.join(LAUNCHER).exists()
    }

    pub(super) fn mark_launchers(&self) -> io::Result<()> {
        fs::write(self.path.join(LAUNCHER), "")
    }

    /// True if its monitor died.
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

    /// Removes the directory, and that of its namespace if it is empty then. The caller holds the lock of the runtime
    /// directory.
    ///
    /// The network is restored first, from the state that the directory holds. Then the directory is moved to `aside`,
    /// so that nobody sees a part of it.
    pub(super) fn remove(&self, aside: &Path) -> Result<(), StateError> {
        clear(aside)?;
        refuse_foreign(&self.path)?;
        husk_network::tear_down_saved(&self.path, None).map_err(|source| StateError::Network {
            dir: self.path.clone(),
            source,
        })?;
        fs::rename(&self.path, aside).map_err(StateError::io(&self.path))?;
        if let Err(error) = clear(aside) {
            // Files that Husk did not create stay where they were.
            let _ = fs::rename(aside, &self.path);
            return Err(error);
        }
        if let Some(namespace) = self.path.parent() {
            // This fails if the namespace has another VM.
            let _ = fs::remove_dir(namespace);
        }
        Ok(())
    }
}

/// Refuses a directory with files that monitors do not create.
fn refuse_foreign(dir: &Path) -> Result<(), StateError> {
    for entry in fs::read_dir(dir).map_err(StateError::io(dir))?.flatten() {
        let name = entry.file_name();
        if !is_known(&name) || entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            return Err(StateError::Foreign(entry.path()));
        }
    }
    Ok(())
}

/// Removes the known files of a VM's directory, and the directory. Does nothing if it does not exist.
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

/// True for the name of a socket on which a program waits for the guest: vsock.sock_PORT.
fn is_vsock_listener(name: &str) -> bool {
    let port = name.strip_prefix("vsock.sock_");
    port.is_some_and(|port| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u32>().is_ok())
}

/// True for the name of a file that monitors create, or that programs make for it.
fn is_known(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    FILES.into_iter().chain([PID]).any(|known| name == known)
        || husk_network::is_state_file(&name)
        || is_vsock_listener(&name)
}
