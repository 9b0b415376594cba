//! Trust in the paths of a plan.
//!
//! The caller of `husk run` may open what its rights allow. A pod may use the devices it was given, by device number,
//! and files below its mounts. The author of the volume or the image chooses the names in the mounts, so they must
//! not contain symbolic links or lead out of the mount, and only regular files are opened there, because a device node
//! in a volume is not a device that the pod was given.

use std::collections::BTreeMap;
use std::io;
use std::path::{Component, Path, PathBuf};

use husk_launcher_user::{as_launcher, owner};
use rustix::fs::{FileType, fchown, fstat};
use tracing::warn;

use super::error::VolumeFault;
use super::host_disk;
use super::path_handle::PathHandle;

/// Paths of the hotplug directory inside a pod.
const HOTPLUG: [&str; 2] = ["/var/run/kubevirt/hotplug-disks", "/run/kubevirt/hotplug-disks"];

/// A claim's image.
const IMAGE: &str = "disk.img";

/// Trust in the paths of a plan.
#[derive(Debug, Clone)]
pub enum PathPolicy {
    /// Paths of the user who runs the VM. Symbolic links are followed.
    Caller,
    /// Paths of a pod.
    PodMounts(PodMounts),
}

/// Files that a pod may use beside its mounts.
#[derive(Debug, Clone, Default)]
pub struct PodMounts {
    /// Block devices: path on the host and device number (`st_rdev`).
    pub devices: BTreeMap<PathBuf, u64>,
    /// Directory for hotplugged volumes.
    pub hotplug: Option<PathBuf>,
}

impl PathPolicy {
    /// Resolves a claim: the path itself, or `disk.img` in that directory.
    pub(super) fn resolve_claim(&self, path: &Path) -> Result<PathHandle, VolumeFault> {
        if let PathPolicy::PodMounts(given) = self
            && let Some(number) = given.devices.get(path)
        {
            return device(path, *number);
        }
        let found = PathHandle::on_host(path).map_err(VolumeFault::io(path))?;
        let found = match found.is_directory() {
            true => found
                .child(Path::new(IMAGE))
                .map_err(VolumeFault::io(path.join(IMAGE)))?,
            false => found,
        };
        self.image(found)
    }

    /// Creates `disk.img` with `bytes` in the directory of a pod's claim if it has none, as virt-handler does.
    pub(super) fn create_missing_image(&self, path: &Path, bytes: u64) -> Result<(), VolumeFault> {
        if !matches!(self, PathPolicy::PodMounts(_)) {
            return Ok(());
        }
        let found = PathHandle::on_host(path).map_err(VolumeFault::io(path))?;
        if !found.is_directory() {
            return Ok(());
        }
        match found.child(Path::new(IMAGE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // Other problems are reported when it is opened.
            _ => return Ok(()),
        }
        // The file belongs to the user of KubeVirt's launcher, who opens it if the VM starts on a node with QEMU.
        let (user, group) = owner();
        let create = || {
            host_disk::create_in(&found, IMAGE, bytes, |image| {
                if let Err(error) = fchown(image, Some(user), Some(group)) {
                    warn!(path = %path.display(), %error, "cannot change the owner of the new image");
                }
            })
        };
        // Where root is squashed, it cannot give the file away. In a directory of root's, the launcher creates none.
        match as_launcher(create) {
            None => create(),
            Some(Err(VolumeFault::Io { source, .. })) if source.kind() == io::ErrorKind::PermissionDenied => {
                create()
            }
            Some(created) => created,
        }
    }

    /// Resolves a hotplugged volume: `path` itself, or `disk.img` in that directory. The lookup is repeated on each
    /// call, since volumes are mounted in a pod's hotplug directory at any time.
    pub(super) fn resolve_hotplugged(&self, path: &Path) -> Result<PathHandle, VolumeFault> {
        let PathPolicy::PodMounts(given) = self else {
            return self.resolve_claim(path);
        };
        let not_given = || VolumeFault::NotInPod(path.to_owned());
        let hotplug = given.hotplug.as_deref().ok_or_else(not_given)?;
        let name = path.strip_prefix(hotplug).map_err(|_| not_given())?;
        let mut parts = name.components();
        let node = match (parts.next(), parts.next()) {
            (Some(Component::Normal(node)), None) => Path::new(node).extension().is_none_or(|e| e != "img"),
            (Some(Component::Normal(_)), Some(Component::Normal(_))) if parts.next().is_none() => false,
            _ => return Err(not_given()),
        };
        let found = PathHandle::beneath(hotplug, name).map_err(VolumeFault::io(path))?;
        // The controller creates device nodes directly in the directory. Other files, and those named like an image,
        // come from a claim, in which anybody may have created a node.
        match found.is_directory() {
            true => found
                .child(Path::new(IMAGE))
                .map_err(VolumeFault::io(path.join(IMAGE)))
                .and_then(|found| self.image(found)),
            false if node => Ok(found),
            false => self.image(found),
        }
    }

    /// Path on the host of a hotplugged volume. Accepts the path inside the pod as well.
    pub fn host_path(&self, path: &Path) -> PathBuf {
        let PathPolicy::PodMounts(PodMounts {
            hotplug: Some(hotplug),
            ..
        }) = self
        else {
            return path.to_owned();
        };
        let name = HOTPLUG
            .iter()
            .find_map(|directory| path.strip_prefix(directory).ok());
        name.map_or_else(|| path.to_owned(), |name| hotplug.join(name))
    }

    /// Path of the volume `name` in a pod's hotplug directory, by KubeVirt's names for images and block devices. `None`
    /// if it is not there yet.
    pub fn find_hotplugged(&self, name: &str) -> Option<PathBuf> {
        let PathPolicy::PodMounts(PodMounts {
            hotplug: Some(hotplug),
            ..
        }) = self
        else {
            return None;
        };
        let is_there = |path: &Path| match PathHandle::beneath(hotplug, path) {
            // An empty mount point.
            Ok(found) if found.is_directory() => found.child(Path::new(IMAGE)).is_ok(),
            // Other problems are reported when it is opened.
            Ok(_) => true,
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        };
        let names = [format!("{name}.img"), name.to_owned()];
        let found = names.iter().find(|name| is_there(Path::new(name)))?;
        Some(hotplug.join(found))
    }

    /// Resolves the image of a hostDisk, and creates it with `create_bytes` if it is missing.
    pub(super) fn host_disk(
        &self,
        path: &Path,
        create_bytes: Option<u64>,
    ) -> Result<PathHandle, VolumeFault> {
        let found = match self {
            PathPolicy::Caller => host_disk::find(path, create_bytes, PathHandle::on_host)?,
            PathPolicy::PodMounts(_) => host_disk::find(path, create_bytes, |path| {
                let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                    return Err(io::ErrorKind::InvalidInput.into());
                };
                PathHandle::beneath(parent, Path::new(name))
            })?,
        };
        self.image(found)
    }

    /// Refuses files of a pod that are not regular files.
    pub(super) fn image(&self, found: PathHandle) -> Result<PathHandle, VolumeFault> {
        match self {
            PathPolicy::PodMounts(_) if found.kind != FileType::RegularFile => {
                Err(VolumeFault::WrongFileType {
                    path: found.path,
                    kind: found.kind,
                    wanted: "an image file",
                })
            }
            _ => Ok(found),
        }
    }

    /// True for trusted paths: only then a container image may be an archive.
    pub(super) fn is_caller(&self) -> bool {
        matches!(self, PathPolicy::Caller)
    }
}

/// Resolves a block device and checks its device number.
fn device(path: &Path, number: u64) -> Result<PathHandle, VolumeFault> {
    let found = PathHandle::on_host(path).map_err(VolumeFault::io(path))?;
    let stat = fstat(found.handle()).map_err(VolumeFault::io(path))?;
    if found.kind == FileType::BlockDevice && stat.st_rdev == number {
        return Ok(found);
    }
    Err(VolumeFault::NotInPod(path.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use husk_launcher_user::without;
    use rustix::fs::{CWD, Gid, Mode, Uid, chown, mkfifoat};
    use rustix::thread::CapabilitySet;

    use super::*;

    fn given() -> PathPolicy {
        PathPolicy::PodMounts(PodMounts::default())
    }

    #[test]
    fn a_missing_image_of_a_pods_claim_is_created_once() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk.img");
        PathPolicy::Caller
            .create_missing_image(dir.path(), 3 << 20)
            .unwrap();
        assert!(!image.exists());
        symlink("other", &image).unwrap();
        given().create_missing_image(dir.path(), 3 << 20).unwrap();
        assert!(!dir.path().join("other").exists());
        fs::remove_file(&image).unwrap();

        given().create_missing_image(dir.path(), (3 << 20) + 7).unwrap();
        assert_eq!(fs::metadata(&image).unwrap().len(), 3 << 20);
        fs::write(&image, "data").unwrap();
        given().create_missing_image(dir.path(), 3 << 20).unwrap();
        assert_eq!(fs::read(&image).unwrap(), b"data");
        // A block device, or an image that is given by its own path.
        given().create_missing_image(&image, 3 << 20).unwrap();

        fs::remove_file(&image).unwrap();
        let small = given().create_missing_image(dir.path(), 7).unwrap_err();
        assert!(matches!(small, VolumeFault::TooSmall));
        assert!(!image.exists());
    }

    #[test]
    fn a_claims_image_is_a_regular_file_in_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk.img");
        let refused = |paths: &PathPolicy| paths.resolve_claim(dir.path()).unwrap_err().to_string();
        symlink("/etc/shadow", &image).unwrap();
        assert!(refused(&given()).contains("disk.img: "));
        fs::remove_file(&image).unwrap();
        fs::write(dir.path().join("other"), "").unwrap();
        symlink("other", &image).unwrap();
        assert!(refused(&given()).contains("disk.img: "));
        fs::remove_file(&image).unwrap();
        mkfifoat(CWD, &image, Mode::RUSR | Mode::WUSR).unwrap();
        assert!(refused(&given()).ends_with("is a FIFO, not an image file"));
        fs::remove_file(&image).unwrap();
        fs::create_dir(&image).unwrap();
        assert!(refused(&given()).ends_with("is a directory, not an image file"));
        fs::remove_dir(&image).unwrap();
        fs::write(&image, [0; 512]).unwrap();
        given().resolve_claim(dir.path()).unwrap();
        // A device that the pod was not given, whatever its name.
        let error = given()
            .resolve_claim(Path::new("/dev/null"))
            .unwrap_err()
            .to_string();
        assert_eq!(error, "/dev/null is a character device, not an image file");
        let devices = BTreeMap::from([("/dev/null".into(), 7)]);
        let paths = PathPolicy::PodMounts(PodMounts {
            devices,
            hotplug: None,
        });
        let error = paths
            .resolve_claim(Path::new("/dev/null"))
            .unwrap_err()
            .to_string();
        assert!(
            error
                .starts_with("/dev/null is not in a mount, the devices or the hotplug directory of this pod"),
            "{error}"
        );
    }

    #[test]
    fn a_host_disk_of_a_pod_is_no_link_and_made_in_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("shadow");
        symlink("/etc/shadow", &link).unwrap();
        given().host_disk(&link, None).unwrap_err();
        given().host_disk(&link, Some(1 << 20)).unwrap_err();
        let dangling = dir.path().join("dangling");
        symlink(dir.path().join("elsewhere"), &dangling).unwrap();
        given().host_disk(&dangling, Some(1 << 20)).unwrap_err();
        assert!(!dir.path().join("elsewhere").exists());
        let made = given().host_disk(&dir.path().join("made"), Some(1 << 20));
        assert_eq!(made.unwrap().kind, FileType::RegularFile);
    }

    #[test]
    fn hotplugged_volumes_of_a_pod_come_from_its_hotplug_directory() {
        let dir = tempfile::tempdir().unwrap();
        let hotplug = dir.path().join("hotplug-disks");
        fs::create_dir_all(hotplug.join("claim")).unwrap();
        fs::write(hotplug.join("data.img"), [0; 512]).unwrap();
        fs::write(dir.path().join("other.img"), [0; 512]).unwrap();
        symlink("../other.img", hotplug.join("link.img")).unwrap();
        symlink("../../other.img", hotplug.join("claim/disk.img")).unwrap();
        let paths = PathPolicy::PodMounts(PodMounts {
            devices: BTreeMap::new(),
            hotplug: Some(hotplug.clone()),
        });
        paths.resolve_hotplugged(&hotplug.join("data.img")).unwrap();
        for view in HOTPLUG {
            let path = paths.host_path(&Path::new(view).join("data.img"));
            assert_eq!(path, hotplug.join("data.img"));
        }
        for other in ["/var/run/kubevirt/hotplug-disks-2/data.img", "/etc/shadow"] {
            assert_eq!(paths.host_path(Path::new(other)), Path::new(other));
        }
        // Files named like an image or in a subdirectory are not devices.
        for fifo in ["fifo.img", "claim/fifo"] {
            mkfifoat(CWD, hotplug.join(fifo), Mode::RUSR).unwrap();
            let error = paths
                .resolve_hotplugged(&hotplug.join(fifo))
                .unwrap_err()
                .to_string();
            assert!(error.ends_with("is a FIFO, not an image file"), "{error}");
        }
        let other = dir.path().join("other.img");
        for bad in [
            hotplug.join("../other.img"),
            hotplug.join("link.img"),
            hotplug.join("claim"),
            hotplug.clone(),
            hotplug.join("a/b/c"),
            other.clone(),
        ] {
            paths.resolve_hotplugged(&bad).unwrap_err();
        }
        let error = given().resolve_hotplugged(&other).unwrap_err().to_string();
        assert!(
            error.contains("is not in a mount, the devices or the hotplug directory of this pod"),
            "{error}"
        );
    }

    #[test]
    fn volumes_appear_under_kubevirts_names() {
        let dir = tempfile::tempdir().unwrap();
        let hotplug = dir.path().to_owned();
        let paths = PathPolicy::PodMounts(PodMounts {
            devices: BTreeMap::new(),
            hotplug: Some(hotplug.clone()),
        });
        assert_eq!(paths.find_hotplugged("data"), None);
        fs::create_dir(hotplug.join("data")).unwrap();
        assert_eq!(paths.find_hotplugged("data"), None, "nothing is mounted there");
        fs::write(hotplug.join("data/disk.img"), [0; 512]).unwrap();
        assert_eq!(paths.find_hotplugged("data"), Some(hotplug.join("data")));
        // A link is found, and refused on opening.
        symlink("/etc/shadow", hotplug.join("data.img")).unwrap();
        assert_eq!(paths.find_hotplugged("data"), Some(hotplug.join("data.img")));
        paths.resolve_hotplugged(&hotplug.join("data.img")).unwrap_err();
        assert_eq!(given().find_hotplugged("data"), None);
        assert_eq!(PathPolicy::Caller.find_hotplugged("data"), None);
    }

    #[test]
    #[ignore = "needs root"]
    fn a_missing_image_is_created_by_the_launcher_or_by_root() {
        let home = tempfile::tempdir().unwrap();
        fs::set_permissions(home.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let (user, group) = owner();
        for (name, of) in [("theirs", user), ("roots", Uid::ROOT)] {
            let claim = home.path().join(name);
            fs::create_dir(&claim).unwrap();
            chown(&claim, Some(of), Some(Gid::from_raw(of.as_raw()))).unwrap();
            let rights = match of.is_root() {
                true => CapabilitySet::empty(),
                false => CapabilitySet::DAC_OVERRIDE | CapabilitySet::CHOWN,
            };
            without(rights, || given().create_missing_image(&claim, 1 << 20).unwrap());
            let made = claim.join("disk.img").metadata().unwrap();
            assert_eq!(
                (made.uid(), made.gid(), made.len()),
                (user.as_raw(), group.as_raw(), 1 << 20)
            );
        }
    }
}
