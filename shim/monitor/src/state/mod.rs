//! The runtime directory of one user's VMs: a directory per VM, locked by its monitor.
//!
//! ```text
//! RUNTIME/.lock                      held to claim or remove a VM's directory; its text marks RUNTIME as Husk's
//! RUNTIME/NAMESPACE/NAME/monitor.pid write-locked by the live monitor
//!                        plan.json vmi.json pod.sock fds.sock vsock.sock console.log monitor.log netns.json
//!                        network-DEVICE.json launcher
//! RUNTIME/.ended/POD-UID             how the VM of a launcher pod ended
//! RUNTIME/.files/NAMESPACE:NAME/     files of Secrets and ConfigMaps, while the VM of a `husk service` starts
//! ```
//!
//! To remove a directory, Husk moves it to RUNTIME/.removing and deletes it there.
//! A directory whose monitor.pid is not locked belonged to a monitor that died. [`RuntimeDir::remove_abandoned`]
//! removes it. Only known files are deleted: a directory with other files is left as it is.

mod ended;
mod error;
mod owner;
mod vm_dir;

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tracing::warn;

use husk_network::ofd_lock;

pub use error::StateError;
use owner::{LOCK, Origin};
use vm_dir::PID;
pub use vm_dir::VmDir;

/// The namespace for the state of pods. The name is the pod's UID, or outside of pods the container's id.
pub const PODS: &str = "pods";

/// Maximum time to wait for a network namespace that a VM or VMM which is ending still uses.
const NETNS_FREE_WITHIN: Duration = Duration::from_secs(2);
/// Interval between two checks of that.
const AGAIN: Duration = Duration::from_millis(20);

/// The directory that holds the state of one user's VMs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeDir {
    path: PathBuf,
    origin: Origin,
}

impl RuntimeDir {
    /// Returns `HUSK_RUNTIME_DIR`, else `/run/husk` for root, else `$XDG_RUNTIME_DIR/husk`. Creates nothing.
    ///
    /// # Errors
    /// There is none, or it is unsuitable: a relative path, which the next command would resolve differently; a
    /// directory that other users own or can write; for `HUSK_RUNTIME_DIR`, a directory with other contents.
    pub fn locate() -> Result<RuntimeDir, StateError> {
        let set = |name| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let (path, origin) = if let Some(path) = set("HUSK_RUNTIME_DIR") {
            (path, Origin::Variable)
        } else if rustix::process::geteuid().is_root() {
            (PathBuf::from("/run/husk"), Origin::Standard)
        } else {
            let session = set("XDG_RUNTIME_DIR").ok_or(StateError::Nowhere)?;
            (session.join("husk"), Origin::Session)
        };
        let runtime = RuntimeDir { path, origin };
        runtime.check()?;
        Ok(runtime)
    }

    /// The runtime directory at `path`.
    pub fn at(path: impl Into<PathBuf>) -> RuntimeDir {
        RuntimeDir {
            path: path.into(),
            origin: Origin::Standard,
        }
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the running VMs, by namespace and name.
    pub fn list(&self) -> Result<Vec<VmDir>, StateError> {
        let mut live = self.directories()?;
        live.retain(VmDir::is_live);
        Ok(live)
    }

    /// Returns the running VM of that name.
    pub fn find(&self, namespace: &str, name: &str) -> Result<VmDir, StateError> {
        let dir = self.vm_dir(namespace, name)?;
        if dir.is_live() {
            return Ok(dir);
        }
        Err(StateError::NotFound {
            namespace: namespace.into(),
            name: name.into(),
        })
    }

    /// Removes the directories of monitors that died, restores their networks, and returns them.
    pub fn remove_abandoned(&self) -> Result<Vec<VmDir>, StateError> {
        self.check()?;
        // Without a lock file there has been no VM. Create nothing then.
        if !self.path.join(LOCK).exists() {
            return Ok(Vec::new());
        }
        let _lock = self.lock()?;
        if let Err(error) = vm_dir::clear(&self.removal_path()) {
            warn!(%error, "could not remove state of a dead monitor");
        }
        let mut removed = Vec::new();
        for dir in self.directories()?.into_iter().filter(VmDir::is_abandoned) {
            // An agent that starts after the removal takes a pod without directory and record as not Husk's.
            if dir.is_launchers()
                && let Err(error) = self.record_death(dir.name())
            {
                warn!(%error, "the end of a dead monitor's VM was not recorded for the agent");
                continue;
            }
            match dir.remove(&self.removal_path()) {
                Ok(()) => removed.push(dir),
                Err(error) => {
                    warn!(dir = %dir.path().display(), %error, "could not remove state of a dead monitor")
                }
            }
        }
        if let Err(error) = husk_network::clean_up() {
            warn!(%error, "could not remove network state of dead monitors");
        }
        Ok(removed)
    }

    /// As [`RuntimeDir::remove_abandoned`], for a VM that is to use the network namespace at `netns`. Waits a moment
    /// for a VM that uses it and is ending, and for the VMM of a killed monitor, which prevents the network from being
    /// restored. Blocks.
    pub fn remove_abandoned_for(&self, netns: &Path) -> Result<Vec<VmDir>, StateError> {
        let deadline = Instant::now() + NETNS_FREE_WITHIN;
        let mut removed = self.remove_abandoned()?;
        let is_had = |dir: &VmDir| husk_network::uses_netns(dir.path(), netns);
        while self.directories()?.iter().any(is_had) && Instant::now() < deadline {
            std::thread::sleep(AGAIN);
            removed.extend(self.remove_abandoned()?);
        }
        Ok(removed)
    }

    /// Removes the directory of one VM if its monitor died.
    pub fn clear(&self, namespace: &str, name: &str) -> Result<(), StateError> {
        let dir = self.vm_dir(namespace, name)?;
        if !dir.is_abandoned() {
            return Ok(());
        }
        let _lock = self.lock()?;
        match dir.is_abandoned() {
            true => dir.remove(&self.removal_path()),
            false => Ok(()),
        }
    }

    /// Removes the runtime directory unless a VM runs, or it has other files. Returns whether it was removed.
    pub fn remove_if_unused(&self) -> Result<bool, StateError> {
        Ok(self.empty_if_unused()? && removed(fs::remove_dir(&self.path), &self.path)?)
    }

    /// Removes what Husk has in the runtime directory, unless a VM runs. Returns whether no directory is left in it.
    pub fn empty_if_unused(&self) -> Result<bool, StateError> {
        self.remove_abandoned()?;
        if !self.path.exists() {
            return Ok(false);
        }
        let _lock = self.lock()?;
        if !self.directories()?.is_empty() {
            return Ok(false);
        }
        for whole in [self.ended_path(), self.files_path(), self.removal_path()] {
            removed(fs::remove_dir_all(&whole), &whole)?;
        }
        for namespace in subdirectories(&self.path)? {
            let path = self.path.join(namespace);
            if !removed(fs::remove_dir(&path), &path)? {
                return Ok(false);
            }
        }
        let lock = self.path.join(LOCK);
        removed(fs::remove_file(&lock), &lock)
    }

    /// Creates the directory of a new VM and locks it for this process.
    pub fn claim(&self, namespace: &str, name: &str) -> Result<ClaimedDir, StateError> {
        let dir = self.vm_dir(namespace, name)?;
        self.prepare()?;
        let mut lock = self.lock()?;
        owner::mark(&self.path, &mut lock)?;
        if dir.is_live() {
            return Err(StateError::Exists {
                namespace: namespace.into(),
                name: name.into(),
            });
        }
        if dir.is_abandoned() {
            dir.remove(&self.removal_path())?;
        }
        private_dirs(dir.path())?;
        let claimed = ClaimedDir::lock(self.clone(), dir)?;
        drop(lock);
        Ok(claimed)
    }

    /// As [`RuntimeDir::claim`], for the pod with this UID, whose VM an agent starts. If this process dies, the removal of
    /// the directory leaves a record of the end.
    pub fn claim_launcher(&self, pod_uid: &str) -> Result<ClaimedDir, StateError> {
        let claimed = self.claim(PODS, pod_uid)?;
        self.forget_end(pod_uid);
        let path = claimed.dir().path();
        claimed.dir().mark_launchers().map_err(StateError::io(path))?;
        Ok(claimed)
    }

    /// Creates the runtime directory if necessary, and checks that it is suitable.
    pub fn prepare(&self) -> Result<(), StateError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.path);
        made.map_err(self.origin.unusable(&self.path))?;
        self.check()
    }

    /// Path of a directory for the files that the volumes of a VM are made from. The caller makes it, and removes it once
    /// the VM runs.
    pub fn volume_files(&self, namespace: &str, name: &str) -> Result<PathBuf, StateError> {
        self.vm_dir(namespace, name)?;
        self.prepare()?;
        let mut lock = self.lock()?;
        owner::mark(&self.path, &mut lock)?;
        Ok(self.files_path().join(format!("{namespace}:{name}")))
    }

    fn files_path(&self) -> PathBuf {
        self.path.join(".files")
    }

    /// Locks the runtime directory, which is necessary to create or remove directories. Others hold the lock for
    /// milliseconds.
    fn lock(&self) -> Result<File, StateError> {
        let path = self.path.join(LOCK);
        ofd_lock::exclusive(&path).map_err(StateError::io(&path))
    }

    /// Path of a directory while it is being removed. No namespace has this name.
    fn removal_path(&self) -> PathBuf {
        self.path.join(".removing")
    }

    /// Checks that the directory is suitable.
    fn check(&self) -> Result<(), StateError> {
        self.origin.check(&self.path)
    }

    fn vm_dir(&self, namespace: &str, name: &str) -> Result<VmDir, StateError> {
        for part in [namespace, name] {
            if part.is_empty() || part.starts_with('.') || part.len() > 253 || part.contains(['/', '\0']) {
                return Err(StateError::BadName(part.into()));
            }
        }
        Ok(VmDir::new(self.path.join(namespace).join(name), namespace, name))
    }

    fn directories(&self) -> Result<Vec<VmDir>, StateError> {
        let mut found = Vec::new();
        for namespace in subdirectories(&self.path)? {
            for name in subdirectories(&self.path.join(&namespace))? {
                found.extend(self.vm_dir(&namespace, &name).ok());
            }
        }
        found.sort_by(|a, b| (a.namespace(), a.name()).cmp(&(b.namespace(), b.name())));
        Ok(found)
    }
}

/// The directory of a VM that this process owns. Dropped without [`ClaimedDir::remove`], it is abandoned.
#[derive(Debug)]
pub struct ClaimedDir {
    runtime: RuntimeDir,
    dir: VmDir,
    _lock: File,
}

impl ClaimedDir {
    /// Locks the directory. The caller holds the lock of the runtime directory, so nobody else can.
    fn lock(runtime: RuntimeDir, dir: VmDir) -> Result<ClaimedDir, StateError> {
        let path = dir.path().join(PID);
        let mut file = ofd_lock::exclusive(&path).map_err(StateError::io(&path))?;
        file.write_all(format!("{}\n", std::process::id()).as_bytes())
            .map_err(StateError::io(&path))?;
        Ok(ClaimedDir {
            runtime,
            dir,
            _lock: file,
        })
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &VmDir {
        &self.dir
    }

    /// Removes the directory with its contents.
    pub fn remove(self) -> Result<(), StateError> {
        let _lock = self.runtime.lock()?;
        self.dir.remove(&self.runtime.removal_path())
    }
}

/// Creates a directory and its parents, for this user only.
fn private_dirs(path: &Path) -> Result<(), StateError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(StateError::io(path))
}

/// Result of a removal: false for a directory that stays, because it has files.
fn removed(result: io::Result<()>, path: &Path) -> Result<bool, StateError> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(false),
        Err(error) => Err(StateError::io(path)(error)),
    }
}

/// Returns the names of the directories in `path`, without symbolic links. None if it does not exist.
fn subdirectories(path: &Path) -> Result<Vec<String>, StateError> {
    let entries = match fs::read_dir(path) {
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        other => other.map_err(StateError::io(path))?,
    };
    let directories = entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    Ok(directories
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect())
}

#[cfg(test)]
mod tests;
