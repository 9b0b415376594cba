//! Data of hotpluggable volumes, which KubeVirt's attachment pods bring to the node.
//!
//! The agent opens the data and passes the descriptor to the shim, which needs no mount and no device node of its own.
//! An attachment pod runs under another runtime than Husk and in the namespace of the VMI's owner, so no path in it is
//! followed out of it.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt};
use serde_json::Value;

use super::object::Vmi;

/// Directory that an attachment pod shares with its node, in the kubelet's directory of the pod.
const SHARED: &str = "volumes/kubernetes.io~empty-dir/hotplug-disks";
/// Socket in it; the process that listens has the volumes with a filesystem.
const SOCKET: &str = "hp.sock";
/// Flags to open a directory or a socket as the start of a path.
const PATH: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// A hotpluggable volume of a VMI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// Name of the volume.
    pub name: String,
    /// UID of its attachment pod; empty while there is none.
    pod: String,
    block: bool,
    read_only: bool,
}

impl Attachment {
    /// The hotpluggable volumes of a VMI that `attached` does not name.
    pub fn outstanding(vmi: &Vmi, attached: &[&str]) -> Vec<Attachment> {
        let entries = vmi.status()["volumeStatus"].as_array();
        let disks = vmi.spec()["domain"]["devices"]["disks"].as_array();
        let named = |list: Option<&Vec<Value>>, name: &str| -> Value {
            let mut list = list.into_iter().flatten();
            list.find(|item| item["name"] == name)
                .cloned()
                .unwrap_or_default()
        };
        let names = vmi.hotpluggable().into_iter();
        names
            .filter(|name| !attached.contains(name))
            .map(|name| {
                let (entry, disk) = (named(entries, name), named(disks, name));
                let pod = entry["hotplugVolume"]["attachPodUID"].as_str();
                Attachment {
                    name: name.to_owned(),
                    pod: pod.unwrap_or_default().to_owned(),
                    block: entry["persistentVolumeClaimInfo"]["volumeMode"] == "Block",
                    read_only: ["disk", "lun"].iter().any(|kind| disk[*kind]["readonly"] == true),
                }
            })
            .collect()
    }

    fn flags(&self) -> OFlags {
        let access = match self.read_only {
            true => OFlags::RDONLY,
            false => OFlags::RDWR,
        };
        // A FIFO would block.
        access | OFlags::CLOEXEC | OFlags::NONBLOCK
    }
}

/// The kubelet's directory of pods.
#[derive(Debug, Clone)]
pub struct PodsDir(PathBuf);

impl PodsDir {
    /// The directory at `path`, which is `/var/lib/kubelet/pods` on a node.
    pub fn at(path: PathBuf) -> PodsDir {
        PodsDir(path)
    }

    /// Opens the data of a volume: a block device, or `disk.img` of a filesystem. `None` if it is not there yet.
    /// Blocks.
    ///
    /// # Errors
    /// The text names the volume.
    pub fn open(&self, attachment: &Attachment) -> Result<Option<OwnedFd>, String> {
        let Attachment { name, pod, .. } = attachment;
        if !is_component(pod) || !is_component(name) {
            return Ok(None);
        }
        let opened = match attachment.block {
            true => self.open_device(attachment),
            false => self.open_image(attachment),
        };
        match opened {
            Ok(fd) => Ok(Some(fd)),
            // The pod has just been created.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(None),
            Err(error) => Err(format!("volume {name:?}: attachment pod {pod}: {error}")),
        }
    }

    /// The directory that the pod shares with the node.
    fn shared(&self, pod: &str) -> io::Result<OwnedFd> {
        let pods = openat(CWD, &self.0, PATH | OFlags::DIRECTORY, Mode::empty())?;
        beneath(
            pods.as_fd(),
            &Path::new(pod).join(SHARED),
            PATH | OFlags::DIRECTORY,
        )
    }

    /// Opens the only block device in the volume's directory.
    fn open_device(&self, attachment: &Attachment) -> io::Result<OwnedFd> {
        let shared = self.shared(&attachment.pod)?;
        let directory = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = beneath(shared.as_fd(), Path::new(&attachment.name), directory)?;
        let mut found = None;
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            if entry.file_type() != FileType::BlockDevice {
                continue;
            }
            if found.is_some() {
                return Err(io::Error::other("more than one block device"));
            }
            found = Some(OsStr::from_bytes(entry.file_name().to_bytes()).to_owned());
        }
        let name = found.ok_or(io::ErrorKind::NotFound)?;
        let device = beneath(directory.as_fd(), Path::new(&name), attachment.flags())?;
        expect(device, FileType::BlockDevice)
    }

    /// Opens `disk.img` in the volume's filesystem, which only processes of the pod see.
    fn open_image(&self, attachment: &Attachment) -> io::Result<OwnedFd> {
        let shared = self.shared(&attachment.pod)?;
        let socket = beneath(shared.as_fd(), Path::new(SOCKET), PATH)?;
        let process = listener(&socket)?;
        if !belongs_to(process, &attachment.pod)? {
            return Err(io::Error::other("another pod's process listens on hp.sock"));
        }
        let root = format!("/proc/{process}/root");
        let root = openat(CWD, root, PATH | OFlags::DIRECTORY, Mode::empty())?;
        let image = Path::new(&attachment.name).join("disk.img");
        let image = beneath(root.as_fd(), &image, attachment.flags())?;
        expect(image, FileType::RegularFile)
    }
}

/// True if `text` is one component of a path.
fn is_component(text: &str) -> bool {
    !text.is_empty()
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// Opens a path below a directory without following a symbolic link.
fn beneath(directory: BorrowedFd<'_>, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    Ok(openat2(directory, path, flags, Mode::empty(), resolve)?)
}

fn expect(fd: OwnedFd, kind: FileType) -> io::Result<OwnedFd> {
    match FileType::from_raw_mode(fstat(&fd)?.st_mode) == kind {
        true => Ok(fd),
        false => Err(io::Error::other(format!("not a {kind:?}"))),
    }
}

/// The process that listens on a socket.
fn listener(socket: &OwnedFd) -> io::Result<i32> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let client = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
    connect(&client, &SocketAddrUnix::new(path)?)?;
    let credentials = sockopt::socket_peercred(&client)?;
    Ok(credentials.pid.as_raw_nonzero().get())
}

/// True if a process is in the cgroup of the pod `uid`.
fn belongs_to(process: i32, uid: &str) -> io::Result<bool> {
    let cgroup = std::fs::read_to_string(format!("/proc/{process}/cgroup"))?;
    Ok(is_cgroup_of(&cgroup, uid))
}

fn is_cgroup_of(cgroup: &str, uid: &str) -> bool {
    // The kubelet's driver for systemd writes a UID with underscores.
    [uid.to_owned(), uid.replace('-', "_")]
        .iter()
        .any(|uid| cgroup.contains(&format!("pod{uid}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use kube::core::{DynamicObject, ObjectMeta};

    const POD: &str = "0f3a-pod";

    fn vmi(data: Value) -> Vmi {
        Vmi(DynamicObject {
            types: None,
            metadata: ObjectMeta::default(),
            data,
        })
    }

    fn attachment(block: bool) -> Attachment {
        Attachment {
            name: "data".to_owned(),
            pod: POD.to_owned(),
            block,
            read_only: false,
        }
    }

    /// A kubelet's directory with one attachment pod, and the directory that this pod shares.
    fn kubelet() -> (tempfile::TempDir, PodsDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let shared = folder.path().join(POD).join(SHARED);
        std::fs::create_dir_all(&shared).unwrap();
        let pods = PodsDir::at(folder.path().to_owned());
        (folder, pods, shared)
    }

    #[test]
    fn missing_data_is_no_error() {
        let (_folder, pods, shared) = kubelet();
        for block in [true, false] {
            assert!(pods.open(&attachment(block)).unwrap().is_none());
        }
        std::fs::create_dir(shared.join("data")).unwrap();
        assert!(pods.open(&attachment(true)).unwrap().is_none());
        for pod in ["", "other", "../0f3a-pod", "."] {
            let elsewhere = Attachment {
                pod: pod.to_owned(),
                ..attachment(true)
            };
            assert!(pods.open(&elsewhere).unwrap().is_none());
        }
    }

    #[test]
    fn links_are_not_followed() {
        let (folder, pods, shared) = kubelet();
        let outside = folder.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        symlink(&outside, shared.join("data")).unwrap();
        let error = pods.open(&attachment(true)).unwrap_err();
        assert!(
            error.starts_with("volume \"data\": attachment pod 0f3a-pod: "),
            "{error}"
        );
        // Files that are no devices are passed over.
        std::fs::remove_file(shared.join("data")).unwrap();
        std::fs::create_dir(shared.join("data")).unwrap();
        File::create(shared.join("data/file")).unwrap();
        symlink("/dev/null", shared.join("data/link")).unwrap();
        assert!(pods.open(&attachment(true)).unwrap().is_none());
    }

    #[test]
    fn a_socket_of_another_process_is_refused() {
        let (_folder, pods, shared) = kubelet();
        let _listener = UnixListener::bind(shared.join(SOCKET)).unwrap();
        let error = pods.open(&attachment(false)).unwrap_err();
        assert!(error.contains("another pod's process"), "{error}");
    }

    #[test]
    fn a_pod_is_known_by_its_cgroup() {
        let cgroupfs = "0::/kubepods/burstable/pod12ab-34/0123\n";
        let systemd = "0::/kubepods.slice/kubepods-pod12ab_34.slice/cri-containerd-0123.scope\n";
        for cgroup in [cgroupfs, systemd] {
            assert!(is_cgroup_of(cgroup, "12ab-34"));
            assert!(!is_cgroup_of(cgroup, "12ab-35"));
        }
    }

    #[test]
    fn only_hotpluggable_volumes_without_a_disk_are_outstanding() {
        let claim = |name: &str, hotpluggable: bool| serde_json::json!({"name": name, "persistentVolumeClaim": {"claimName": name, "hotpluggable": hotpluggable}});
        let entry = |name: &str, mode: &str| {
            serde_json::json!({
                "name": name,
                "hotplugVolume": {"attachPodUID": POD},
                "persistentVolumeClaimInfo": {"volumeMode": mode},
            })
        };
        let vmi = vmi(serde_json::json!({
            "spec": {
                "domain": {"devices": {"disks": [{"name": "image", "disk": {"readonly": true}}]}},
                "volumes": [claim("fixed", false), claim("data", true), claim("image", true), claim("there", true)],
            },
            "status": {"volumeStatus": [entry("data", "Block"), entry("image", "Filesystem")]},
        }));
        let image = Attachment {
            name: "image".to_owned(),
            read_only: true,
            ..attachment(false)
        };
        assert_eq!(
            Attachment::outstanding(&vmi, &["there"]),
            [attachment(true), image]
        );
    }
}
