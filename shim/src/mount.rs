//! Root filesystems. The mounts are those of containerd's snapshotter, and read-only.

use std::ffi::{CString, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use containerd_shim_protos::types::mount::Mount;
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, UnmountFlags, mount, mount_bind, mount_bind_recursive, mount_remount, unmount as umount2,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Maximum length of the data of mount(2), with its terminator: a page.
const MOST_DATA: usize = 4096;

/// An error of mounting a root filesystem.
#[derive(Debug, thiserror::Error)]
#[error("the root filesystem ({kind} of {source_path}) cannot be mounted: {error}")]
pub(crate) struct MountError {
    kind: String,
    source_path: String,
    error: io::Error,
}

/// Mounts a container's root filesystem at `target`, which is created. Does nothing if containerd has mounted it.
pub(crate) fn mount_rootfs(mounts: &[Mount], target: &Path) -> Result<(), MountError> {
    for one in mounts {
        let failed = |error| MountError {
            kind: one.type_.clone(),
            source_path: one.source.clone(),
            error,
        };
        std::fs::create_dir_all(target).map_err(failed)?;
        if let Err(error) = mount_one(one, target) {
            unmount(target);
            return Err(failed(error));
        }
    }
    Ok(())
}

/// Unmounts a container's root filesystem. Its open files stay open.
pub(crate) fn unmount(target: &Path) {
    while umount2(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).is_ok() {}
}

fn mount_one(one: &Mount, target: &Path) -> io::Result<()> {
    let Options { flags, data } = Options::parse(&one.options);
    // Devices and programs of an image must not be used on the host.
    let flags = flags | MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
    if one.type_ == "bind" || flags.contains(MountFlags::BIND) {
        if flags.contains(MountFlags::REC) {
            mount_bind_recursive(one.source.as_str(), target)?;
        } else {
            mount_bind(one.source.as_str(), target)?;
        }
        let again = (flags - MountFlags::REC) | MountFlags::BIND;
        // The kernel ignores the data of such a remount.
        return Ok(mount_remount(target, again, "")?);
    }
    let Some((directory, data)) = shortened(data) else {
        return Err(io::Error::other("it has too many layers for one mount"));
    };
    let (source, kind, target) = (one.source.clone(), one.type_.clone(), target.to_owned());
    let mount = move || -> io::Result<()> {
        if let Some(directory) = directory {
            // Only this thread changes its working directory.
            // SAFETY: without FILES, the descriptors stay shared.
            unsafe { unshare_unsafe(UnshareFlags::FS) }?;
            std::env::set_current_dir(directory)?;
        }
        let data = CString::new(data.into_vec()).map_err(|_| Errno::INVAL)?;
        Ok(mount(source.as_str(), &target, kind.as_str(), flags, &*data)?)
    };
    std::thread::Builder::new()
        .spawn(mount)?
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("mounting panicked")))
}

#[derive(Debug, PartialEq, Eq)]
struct Options {
    flags: MountFlags,
    data: Vec<String>,
}

impl Options {
    fn parse(options: &[String]) -> Options {
        let (mut flags, mut data) = (MountFlags::empty(), Vec::new());
        for option in options {
            match option.as_str() {
                "ro" => flags |= MountFlags::RDONLY,
                "rw" => flags -= MountFlags::RDONLY,
                "bind" => flags |= MountFlags::BIND,
                "rbind" => flags |= MountFlags::BIND | MountFlags::REC,
                "noatime" => flags |= MountFlags::NOATIME,
                "relatime" => flags |= MountFlags::RELATIME,
                "defaults" | "nodev" | "nosuid" | "noexec" | "" => {}
                other => data.push(other.to_owned()),
            }
        }
        Options { flags, data }
    }
}

/// Shortens the options of a file system. Returns them and the directory to which their paths are relative: the layers
/// of an overlay are in the same directory.
fn shortened(data: Vec<String>) -> Option<(Option<PathBuf>, OsString)> {
    let whole = data.join(",");
    if whole.len() < MOST_DATA {
        return Some((None, whole.into()));
    }
    let layers = data.iter().find_map(|option| option.strip_prefix("lowerdir="))?;
    let layers: Vec<&Path> = layers.split(':').map(Path::new).collect();
    let directory = common(&layers)?;
    let relative: Option<Vec<String>> = layers
        .iter()
        .map(|layer| Some(layer.strip_prefix(&directory).ok()?.to_str()?.to_owned()))
        .collect();
    let relative = format!("lowerdir={}", relative?.join(":"));
    let options = data.iter().map(|option| match option.starts_with("lowerdir=") {
        true => relative.as_str(),
        false => option.as_str(),
    });
    let short = options.collect::<Vec<_>>().join(",");
    (short.len() < MOST_DATA).then_some((Some(directory), short.into()))
}

/// The directory that contains all of them.
fn common(paths: &[&Path]) -> Option<PathBuf> {
    let mut directory = paths.first()?.parent()?;
    while !paths.iter().all(|path| path.starts_with(directory)) {
        directory = directory.parent()?;
    }
    (directory.as_os_str().as_bytes() != b"/").then(|| directory.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(options: &[&str]) -> Vec<String> {
        options.iter().map(|option| (*option).to_owned()).collect()
    }

    #[test]
    fn options_are_flags_or_the_file_systems() {
        let parsed = Options::parse(&strings(&["rbind", "ro", "lowerdir=/a:/b", "index=off"]));
        assert_eq!(
            parsed.flags,
            MountFlags::BIND | MountFlags::REC | MountFlags::RDONLY
        );
        assert_eq!(parsed.data, ["lowerdir=/a:/b", "index=off"]);
    }

    #[test]
    fn many_layers_are_named_from_the_directory_they_share() {
        let layers: Vec<String> = (0..100)
            .map(|n| format!("/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/{n}/fs"))
            .collect();
        let lower = format!("lowerdir={}", layers.join(":"));
        let (directory, data) = shortened(strings(&["index=off", &lower, "upperdir=/u"])).unwrap();
        assert!(directory.unwrap().ends_with("snapshots"));
        let data = data.into_string().unwrap();
        assert!(data.starts_with("index=off,lowerdir=0/fs:1/fs:"), "{data}");
        assert!(data.ends_with(",upperdir=/u"));
        let few = shortened(strings(&["lowerdir=/a:/b"])).unwrap();
        assert_eq!(few, (None, "lowerdir=/a:/b".into()));
    }
}
