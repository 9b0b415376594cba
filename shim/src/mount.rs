//! Root filesystems. The mounts are those of containerd's snapshotter, and read-only.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use containerd_shim_protos::types::mount::Mount;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

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
    while umount2(target, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).is_ok() {}
}

fn mount_one(one: &Mount, target: &Path) -> io::Result<()> {
    let none: Option<&str> = None;
    let Options { flags, data } = Options::parse(&one.options);
    // Devices and programs of an image must not be used on the host.
    let flags = flags | MsFlags::MS_NODEV | MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    if one.type_ == "bind" || flags.contains(MsFlags::MS_BIND) {
        let bind = MsFlags::MS_BIND | (flags & MsFlags::MS_REC);
        mount(Some(one.source.as_str()), target, none, bind, none)?;
        let again = (flags - MsFlags::MS_REC) | MsFlags::MS_BIND | MsFlags::MS_REMOUNT;
        return Ok(mount(none, target, none, again, none)?);
    }
    let Some((directory, data)) = shortened(data) else {
        return Err(io::Error::other("it has too many layers for one mount"));
    };
    let (source, kind, target) = (one.source.clone(), one.type_.clone(), target.to_owned());
    let mount = move || -> io::Result<()> {
        if let Some(directory) = directory {
            // Only this thread changes its working directory.
            unshare(CloneFlags::CLONE_FS)?;
            std::env::set_current_dir(directory)?;
        }
        Ok(mount(
            Some(source.as_str()),
            &target,
            Some(kind.as_str()),
            flags,
            Some(data.as_os_str()),
        )?)
    };
    std::thread::Builder::new()
        .spawn(mount)?
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("mounting panicked")))
}

#[derive(Debug, PartialEq, Eq)]
struct Options {
    flags: MsFlags,
    data: Vec<String>,
}

impl Options {
    fn parse(options: &[String]) -> Options {
        let (mut flags, mut data) = (MsFlags::empty(), Vec::new());
        for option in options {
            match option.as_str() {
                "ro" => flags |= MsFlags::MS_RDONLY,
                "rw" => flags -= MsFlags::MS_RDONLY,
                "bind" => flags |= MsFlags::MS_BIND,
                "rbind" => flags |= MsFlags::MS_BIND | MsFlags::MS_REC,
                "noatime" => flags |= MsFlags::MS_NOATIME,
                "relatime" => flags |= MsFlags::MS_RELATIME,
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
            MsFlags::MS_BIND | MsFlags::MS_REC | MsFlags::MS_RDONLY
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
