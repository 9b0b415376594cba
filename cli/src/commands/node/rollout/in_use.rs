//! Versions that running pods need.

use std::fs;
use std::path::{Path, PathBuf};

/// Directory of containerd's state in which each task has a directory, below one for each namespace.
const TASKS: &str = "io.containerd.runtime.v2.task";
/// File of a task with the path of its shim. containerd starts that program once more to clean up after the shim.
const SHIM_PATH: &str = "shim-binary-path";

/// Programs that processes run, and shims of tasks.
#[derive(Debug)]
pub(super) struct InUse {
    /// Ids and programs of processes.
    processes: Vec<(i32, PathBuf)>,
    shims: Vec<PathBuf>,
}

impl InUse {
    /// The processes in `proc`, and the tasks in containerd's directory `state`.
    pub(super) fn find(proc: &Path, state: &Path) -> InUse {
        let processes = entries(proc).filter_map(|path| {
            let id = path.file_name()?.to_str()?.parse().ok()?;
            Some((id, fs::read_link(path.join("exe")).ok()?))
        });
        let namespaces = entries(&state.join(TASKS));
        let tasks = namespaces.flat_map(|namespace| entries(&namespace).collect::<Vec<_>>());
        let shims = tasks.filter_map(|task| fs::read_to_string(task.join(SHIM_PATH)).ok());
        let shims = shims.map(|path| PathBuf::from(path.trim()));
        InUse {
            processes: processes.collect(),
            shims: shims
                .map(|path| fs::canonicalize(&path).unwrap_or(path))
                .collect(),
        }
    }

    /// True if a pod needs programs in `directory`.
    pub(super) fn has(&self, directory: &Path) -> bool {
        let real = real(directory);
        let is_in = |path: &PathBuf| path.starts_with(directory) || path.starts_with(&real);
        !self.processes_in(directory).is_empty() || self.shims.iter().any(is_in)
    }

    /// Processes, other than this one, that run programs in `directory`.
    pub(super) fn processes_in(&self, directory: &Path) -> Vec<i32> {
        let directory = real(directory);
        let own = std::process::id().try_into().unwrap_or(0);
        let running = self
            .processes
            .iter()
            .filter(|(id, path)| *id != own && path.starts_with(&directory));
        running.map(|(id, _)| *id).collect()
    }
}

/// The directory without symbolic links, as the kernel names the programs of processes.
fn real(directory: &Path) -> PathBuf {
    fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned())
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn processes_and_tasks_need_their_versions() {
        let dir = tempfile::tempdir().unwrap();
        let (proc, state) = (dir.path().join("proc"), dir.path().join("state"));
        for name in ["12", "13", "sys"] {
            fs::create_dir_all(proc.join(name)).unwrap();
        }
        // Its file has been replaced.
        symlink(
            "/opt/husk/1/containerd-shim-husk-v2 (deleted)",
            proc.join("12/exe"),
        )
        .unwrap();
        symlink("/usr/bin/sleep", proc.join("13/exe")).unwrap();
        let task = state.join(TASKS).join("k8s.io/abc");
        fs::create_dir_all(&task).unwrap();
        fs::write(task.join(SHIM_PATH), "/opt/husk/2/containerd-shim-husk-v2").unwrap();
        let used = InUse::find(&proc, &state);
        let has = |version: &str| used.has(&Path::new("/opt/husk").join(version));
        assert_eq!([has("1"), has("2"), has("3"), has("")], [true, true, false, true]);
        assert_eq!(used.processes_in(Path::new("/opt/husk")), [12]);
        assert!(!InUse::find(Path::new("/nowhere"), Path::new("/nowhere")).has(Path::new("/opt")));
    }

    #[test]
    fn a_directory_behind_a_link_is_in_use_too() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        let (proc, state, opt) = (root.join("proc"), root.join("state"), root.join("opt"));
        for version in ["var/opt/husk/1", "var/opt/husk/2", "var/opt/husk/3", "proc/12"] {
            fs::create_dir_all(root.join(version)).unwrap();
        }
        symlink("var/opt", &opt).unwrap();
        symlink(root.join("var/opt/husk/1/husk"), proc.join("12/exe")).unwrap();
        let shim = opt.join("husk/2/containerd-shim-husk-v2");
        fs::write(&shim, "").unwrap();
        let task = state.join(TASKS).join("k8s.io/abc");
        fs::create_dir_all(&task).unwrap();
        fs::write(task.join(SHIM_PATH), shim.to_str().unwrap()).unwrap();
        let used = InUse::find(&proc, &state);
        let has = |version: &str| used.has(&opt.join("husk").join(version));
        assert_eq!([has("1"), has("2"), has("3")], [true, true, false]);
        assert_eq!(used.processes_in(&opt.join("husk")), [12]);
    }
}
