//! Data of hotpluggable volumes, which KubeVirt's attachment pods bring to the node.
//!
//! The agent opens the data and passes the descriptor to the shim, which needs no mount and no device node of its own.
//! The VMI's owner may write what an attachment pod shares with the node, and may make a pod that looks like one. So a
//! path that starts in its directory never leaves it, and the data must be of a volume that the kubelet gave to the pod.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use husk_launcher_user::retry_as_launcher;
use rustix::fs::{
    CWD, Dir, FileType, Mode, OFlags, ResolveFlags, fcntl_getfl, fcntl_setfl, fstat, openat, openat2,
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt};
use serde_json::Value;

use super::awaited::{AwaitedVolume, VolumeOfPod};
use super::container::Container;
use super::object::Vmi;

/// A volume of launcher pods only, in the kubelet's directory of the pod. The kubelet makes it before it waits for
/// images, and removes it when the pod ends.
pub const LAUNCHER_VOLUME: &str = "volumes/kubernetes.io~empty-dir/libvirt-runtime";
/// Directory that an attachment pod shares with its node, in the kubelet's directory of the pod.
const SHARED: &str = "volumes/kubernetes.io~empty-dir/hotplug-disks";
/// Socket in it; the process that listens has the volumes with a filesystem.
const SOCKET: &str = "hp.sock";
/// Flags to open a directory or a socket as the start of a path.
const HANDLE: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// A hotpluggable volume of a VMI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// Name of the volume.
    pub name: String,
    /// Namespace of the VMI, which is that of the attachment pod.
    namespace: String,
    /// Name and UID of the attachment pod; empty while there is none.
    pod_name: String,
    pod: String,
    block: bool,
    read_only: bool,
}

impl Attachment {
    /// The hotpluggable volumes of a VMI that `attached` does not name.
    pub fn outstanding(vmi: &Vmi, attached: &[&str]) -> Vec<Attachment> {
        let entries = vmi.status()["volumeStatus"].as_array();
        let disks = vmi.spec()["domain"]["devices"]["disks"].as_array();
        let volumes = vmi.spec()["volumes"].as_array();
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
                let claim = &named(volumes, name)["persistentVolumeClaim"];
                let pod = |field: &str| {
                    let value = entry["hotplugVolume"][field].as_str();
                    value.unwrap_or_default().to_owned()
                };
                Attachment {
                    name: name.to_owned(),
                    namespace: vmi.namespace(),
                    pod_name: pod("attachPodName"),
                    pod: pod("attachPodUID"),
                    block: entry["persistentVolumeClaimInfo"]["volumeMode"] == "Block",
                    read_only: disk["cdrom"].is_object()
                        || disk["disk"]["readonly"] == true
                        || claim["readOnly"] == true,
                }
            })
            .collect()
    }

    /// The volume as one whose data is awaited.
    pub fn awaited(&self, missing: String) -> AwaitedVolume {
        AwaitedVolume {
            name: self.name.clone(),
            pod: self.pod_name.clone(),
            missing,
        }
    }

    /// The names of the volume and of its attachment pod.
    pub fn names(&self) -> VolumeOfPod {
        (self.name.clone(), self.pod_name.clone())
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

/// The data of a volume.
#[derive(Debug)]
pub enum VolumeData {
    /// It is there.
    Open(OwnedFd),
    /// It is not there yet; the text says what is not.
    Missing(String),
    /// virt-controller has not made an attachment pod yet.
    NoPod,
}

/// The kubelet's directories.
#[derive(Debug, Clone)]
pub struct PodsDir {
    pods: PathBuf,
    logs: PathBuf,
    /// The node's root directory, in which the kubelet's links are resolved.
    root: PathBuf,
}

impl PodsDir {
    /// The directories of pods and of their logs, on a node `/var/lib/kubelet/pods` and `/var/log/pods`, and the node's
    /// root directory.
    pub fn at(pods: PathBuf, logs: PathBuf, root: PathBuf) -> PodsDir {
        PodsDir { pods, logs, root }
    }

    /// Returns whether these launcher pods, which were ready once, have ended: the kubelet has removed their volumes.
    pub fn have_ended(&self, launchers: &[&str]) -> bool {
        let entries = std::fs::read_dir(&self.pods);
        // The agent's own pod is there, if this is the kubelet's directory.
        let is_known = entries.is_ok_and(|mut entries| entries.next().is_some());
        let has_ended = |uid: &&str| {
            let volume = self.pods.join(uid).join(LAUNCHER_VOLUME);
            is_component(uid) && matches!(volume.try_exists(), Ok(false))
        };
        is_known && launchers.iter().all(has_ended)
    }

    /// Opens the data of a volume: a block device, or `disk.img` of a filesystem. Blocks.
    ///
    /// # Errors
    /// The text names the volume.
    pub fn open(&self, attachment: &Attachment) -> Result<VolumeData, String> {
        let Attachment {
            name, pod, pod_name, ..
        } = attachment;
        if !is_component(pod) || !is_component(name) || !is_component(pod_name) {
            return Ok(VolumeData::NoPod);
        }
        if !self.is_in_namespace(attachment) {
            let text = "the kubelet of this node has no logs of a pod of this name, UID and namespace";
            return Ok(VolumeData::Missing(text.to_owned()));
        }
        let opened = match attachment.block {
            true => self.open_device(attachment),
            false => self.open_image(attachment),
        };
        match opened {
            Ok(fd) => Ok(VolumeData::Open(fd)),
            // The pod has just been created.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok(VolumeData::Missing(error.to_string()))
            }
            Err(error) => Err(format!("volume {name:?}: attachment pod {pod}: {error}")),
        }
    }

    /// True if the pod is in the VMI's namespace. Who creates a VMI may write any UID into its status; the kubelet's
    /// directory of the pod's logs has the namespace in its name, and the agent may not read pods.
    fn is_in_namespace(&self, attachment: &Attachment) -> bool {
        let Attachment {
            namespace,
            pod_name,
            pod,
            ..
        } = attachment;
        is_component(namespace) && self.logs.join(format!("{namespace}_{pod_name}_{pod}")).is_dir()
    }

    /// The kubelet's directory of a pod.
    fn pod(&self, uid: &str) -> io::Result<OwnedFd> {
        let pods = openat(CWD, &self.pods, HANDLE | OFlags::DIRECTORY, Mode::empty())?;
        beneath(pods.as_fd(), Path::new(uid), HANDLE | OFlags::DIRECTORY)
            .map_err(missing(|| "the kubelet has no directory of the pod".to_owned()))
    }

    /// Opens the only block device in the volume's directory.
    fn open_device(&self, attachment: &Attachment) -> io::Result<OwnedFd> {
        let pod = self.pod(&attachment.pod)?;
        let directory = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let path = Path::new(SHARED).join(&attachment.name);
        let without = missing(|| format!("no block device in hotplug-disks/{}", attachment.name));
        let directory = beneath(pod.as_fd(), &path, directory).map_err(&without)?;
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
        let name = found.ok_or_else(|| without(io::ErrorKind::NotFound.into()))?;
        let handle = beneath(directory.as_fd(), Path::new(&name), HANDLE)?;
        let device = fstat(&handle)?.st_rdev;
        if !self.volume_devices(&attachment.pod)?.contains(&device) {
            return Err(io::Error::other(
                "the block device is not one of the pod's volumes",
            ));
        }
        open_handle(&handle, FileType::BlockDevice, attachment.flags())
    }

    /// Numbers of the devices that the kubelet gave to a pod. It makes a link to each.
    fn volume_devices(&self, uid: &str) -> io::Result<Vec<u64>> {
        let root = openat(CWD, &self.root, HANDLE | OFlags::DIRECTORY, Mode::empty())?;
        let links = entries(&self.pods.join(uid).join("volumeDevices")).map_err(missing(|| {
            "the kubelet has not given the pod a device".to_owned()
        }))?;
        let devices = links.into_iter().filter_map(|link| {
            let target = std::fs::read_link(link).ok()?;
            let resolve = ResolveFlags::IN_ROOT;
            let device = openat2(&root, target, HANDLE, Mode::empty(), resolve).ok()?;
            fstat(&device).ok().map(|status| status.st_rdev)
        });
        Ok(devices.collect())
    }

    /// Opens `disk.img` in the volume's filesystem, as the pod's process that listens on the socket sees it.
    fn open_image(&self, attachment: &Attachment) -> io::Result<OwnedFd> {
        let pod = self.pod(&attachment.pod)?;
        let without = missing(|| format!("no process listens on hotplug-disks/{SOCKET}"));
        let socket = beneath(pod.as_fd(), &Path::new(SHARED).join(SOCKET), HANDLE).map_err(&without)?;
        let process = format!("/proc/{}", listening_process(&socket).map_err(&without)?);
        // Held, so that all of it is of one process.
        let process = openat(CWD, process, HANDLE | OFlags::DIRECTORY, Mode::empty())?;
        let container = Container::of(&process, &attachment.pod)?
            .ok_or_else(|| io::Error::other("another pod's process listens on hp.sock"))?;
        let root = openat(&process, "root", HANDLE | OFlags::DIRECTORY, Mode::empty())?;
        self.open_image_in(attachment, &root, &container)
    }

    /// Opens `disk.img` in the volume's directory in `root`, the root directory of a process of the pod's container.
    fn open_image_in(
        &self,
        attachment: &Attachment,
        root: &OwnedFd,
        container: &Container,
    ) -> io::Result<OwnedFd> {
        let volume = Path::new(&attachment.name);
        let volume = beneath(root.as_fd(), volume, HANDLE | OFlags::DIRECTORY).map_err(missing(|| {
            format!("the pod has no directory /{}", attachment.name)
        }))?;
        let status = fstat(&volume)?;
        let directory = (status.st_dev, status.st_ino);
        if !self.has_volume(&attachment.pod, directory)?
            && container.source(&self.root, &attachment.name) != Some(directory)
        {
            return Err(io::Error::other(
                "the directory is not one of the pod's volumes: it is neither in the kubelet's directory of the pod, \
                 nor does containerd mount it in the container, as it does with a hostPath volume",
            ));
        }
        let image = beneath(volume.as_fd(), Path::new("disk.img"), HANDLE)
            .map_err(missing(|| "no disk.img in the volume".to_owned()))?;
        open_handle(&image, FileType::RegularFile, attachment.flags())
    }

    /// True if the kubelet gave the directory with this device and inode to a pod as a volume.
    fn has_volume(&self, uid: &str, directory: (u64, u64)) -> io::Result<bool> {
        let volumes = entries(&self.pods.join(uid).join("volumes"))?;
        Ok(volumes.into_iter().any(|volume| {
            // A CSI volume is one level deeper.
            [volume.join("mount"), volume]
                .iter()
                .filter_map(|path| std::fs::symlink_metadata(path).ok())
                .any(|status| (status.dev(), status.ino()) == directory)
        }))
    }
}

/// Puts `text` into an error that something is not there yet.
fn missing(text: impl Fn() -> String) -> impl Fn(io::Error) -> io::Error {
    move |error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            io::Error::new(io::ErrorKind::NotFound, text())
        }
        _ => error,
    }
}

/// The entries of the directories in `directory`.
fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for plugin in std::fs::read_dir(directory)? {
        for entry in std::fs::read_dir(plugin?.path())? {
            found.push(entry?.path());
        }
    }
    Ok(found)
}

/// True if `text` is one component of a path.
fn is_component(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with('.')
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.'))
}

/// Opens a path below a directory without following a symbolic link. On NFS with root_squash root may not look up a
/// claim's image.
fn beneath(directory: BorrowedFd<'_>, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    retry_as_launcher(|| Ok(openat2(directory, path, flags, Mode::empty(), resolve)?))
}

/// Opens exactly the file of an O_PATH handle. Checks its type before: to open a device may start it, and the owner of
/// a volume may have made a device node in it.
fn open_handle(handle: &OwnedFd, kind: FileType, flags: OFlags) -> io::Result<OwnedFd> {
    if FileType::from_raw_mode(fstat(handle)?.st_mode) != kind {
        return Err(io::Error::other(format!("not a {kind:?}")));
    }
    let path = format!("/proc/self/fd/{}", handle.as_raw_fd());
    let fd = retry_as_launcher(|| Ok(openat(CWD, &path, flags, Mode::empty())?))?;
    // io_uring fails requests with EAGAIN on such a file where they would block.
    fcntl_setfl(&fd, fcntl_getfl(&fd)? - OFlags::NONBLOCK)?;
    Ok(fd)
}

/// The process that listens on a socket.
fn listening_process(socket: &OwnedFd) -> io::Result<i32> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let client = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
    connect(&client, &SocketAddrUnix::new(path)?)?;
    let credentials = sockopt::socket_peercred(&client)?;
    Ok(credentials.pid.as_raw_nonzero().get())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use husk_launcher_user::without;
    use kube::core::{DynamicObject, ObjectMeta};
    use rustix::fs::chown;
    use rustix::thread::CapabilitySet;

    const POD: &str = "0f3a-pod";

    fn vmi(data: Value) -> Vmi {
        Vmi(DynamicObject {
            types: None,
            metadata: ObjectMeta {
                namespace: Some("team".to_owned()),
                ..ObjectMeta::default()
            },
            data,
        })
    }

    fn attachment(block: bool) -> Attachment {
        Attachment {
            name: "data".to_owned(),
            namespace: "team".to_owned(),
            pod_name: "hp-volume-1".to_owned(),
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
        let logs = folder.path().join("logs");
        std::fs::create_dir_all(logs.join(format!("team_hp-volume-1_{POD}"))).unwrap();
        let pods = PodsDir::at(folder.path().to_owned(), logs, "/".into());
        (folder, pods, shared)
    }

    /// The text about what is missing.
    fn missing(pods: &PodsDir, attachment: &Attachment) -> String {
        match pods.open(attachment).unwrap() {
            VolumeData::Missing(text) => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn missing_data_is_no_error() {
        let (_folder, pods, shared) = kubelet();
        assert_eq!(
            missing(&pods, &attachment(true)),
            "no block device in hotplug-disks/data"
        );
        let no_process = "no process listens on hotplug-disks/hp.sock";
        assert_eq!(missing(&pods, &attachment(false)), no_process);
        std::fs::create_dir(shared.join("data")).unwrap();
        assert_eq!(
            missing(&pods, &attachment(true)),
            "no block device in hotplug-disks/data"
        );
        drop(UnixListener::bind(shared.join(SOCKET)).unwrap());
        assert_eq!(missing(&pods, &attachment(false)), no_process);
        for pod in ["", "other", "../0f3a-pod", "."] {
            let elsewhere = Attachment {
                pod: pod.to_owned(),
                ..attachment(true)
            };
            assert!(!matches!(pods.open(&elsewhere).unwrap(), VolumeData::Open(_)));
        }
    }

    #[test]
    fn launchers_have_ended_once_their_volumes_are_gone() {
        let (folder, pods, _) = kubelet();
        let ended = folder.path().join("ended");
        std::fs::create_dir_all(ended.join("volumes")).unwrap();
        std::fs::create_dir_all(folder.path().join("running").join(LAUNCHER_VOLUME)).unwrap();
        assert!(pods.have_ended(&["ended", "gone"]));
        assert!(!pods.have_ended(&["ended", "running"]));
        assert!(!pods.have_ended(&["../ended"]));
        // Not the kubelet's directory.
        for elsewhere in [ended.join("volumes"), folder.path().join("none")] {
            let pods = PodsDir::at(elsewhere, folder.path().to_owned(), "/".into());
            assert!(!pods.have_ended(&["gone"]));
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
        assert_eq!(
            missing(&pods, &attachment(true)),
            "no block device in hotplug-disks/data"
        );
    }

    #[test]
    fn pods_of_other_namespaces_are_passed_over() {
        let (_folder, pods, shared) = kubelet();
        let _listener = UnixListener::bind(shared.join(SOCKET)).unwrap();
        let foreign = Attachment {
            namespace: "other".to_owned(),
            ..attachment(false)
        };
        assert!(pods.open(&attachment(false)).is_err());
        assert!(missing(&pods, &foreign).contains("namespace"));
    }

    #[test]
    #[ignore = "needs root"]
    fn only_devices_of_the_kubelet_are_opened() {
        let (folder, pods, shared) = kubelet();
        crate::vmi::testing::block_device(&shared.join("data/claim"));
        let read_only = Attachment {
            read_only: true,
            ..attachment(true)
        };
        let links = folder
            .path()
            .join(POD)
            .join("volumeDevices/kubernetes.io~local-volume");
        std::fs::create_dir_all(&links).unwrap();
        let error = pods.open(&read_only).unwrap_err();
        assert!(error.contains("not one of the pod's volumes"), "{error}");
        let device = folder.path().join("device");
        crate::vmi::testing::block_device(&device);
        symlink(&device, links.join("pv")).unwrap();
        assert!(matches!(pods.open(&read_only).unwrap(), VolumeData::Open(_)));
    }

    #[test]
    #[ignore = "needs root"]
    fn an_image_that_only_the_launcher_may_open_is_opened() {
        let home = tempfile::tempdir().unwrap();
        std::fs::set_permissions(home.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let claim = home.path().join("claim");
        let image = claim.join("disk.img");
        std::fs::create_dir(&claim).unwrap();
        std::fs::write(&image, "data").unwrap();
        let (user, group) = husk_launcher_user::owner();
        for (path, mode) in [(&image, 0o600), (&claim, 0o700)] {
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
            chown(path, Some(user), Some(group)).unwrap();
        }
        // The rights to ignore permissions, which an NFS server with root_squash does not give.
        let ignoring = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
        without(ignoring, || {
            File::open(&image).unwrap_err();
            let directory = openat(CWD, &claim, HANDLE | OFlags::DIRECTORY, Mode::empty()).unwrap();
            let handle = beneath(directory.as_fd(), Path::new("disk.img"), HANDLE).unwrap();
            open_handle(&handle, FileType::RegularFile, attachment(false).flags()).unwrap();
        });
    }

    #[test]
    fn an_image_of_a_host_path_volume_is_opened() {
        let (folder, _, shared) = kubelet();
        let node = folder.path().join("node");
        let bundle = node.join("run/containerd/io.containerd.runtime.v2.task/k8s.io/0123");
        std::fs::create_dir_all(node.join("data")).unwrap();
        std::fs::create_dir_all(&bundle).unwrap();
        File::create(node.join("data/disk.img")).unwrap();
        let pods = PodsDir::at(folder.path().to_owned(), shared, node.clone());
        let container = Container::of_cgroup(&format!("0::/pod{POD}/0123\n"), POD).unwrap();
        let root = openat(CWD, &node, HANDLE, Mode::empty()).unwrap();
        let open = || pods.open_image_in(&attachment(false), &root, &container);
        let error = open().unwrap_err().to_string();
        assert!(error.contains("hostPath"), "{error}");
        let mount = r#"{"mounts": [{"destination": "/data", "type": "bind", "source": "/data"}]}"#;
        std::fs::write(bundle.join("config.json"), mount).unwrap();
        open().unwrap();
    }

    #[test]
    fn a_socket_of_another_process_is_refused() {
        let (_folder, pods, shared) = kubelet();
        let _listener = UnixListener::bind(shared.join(SOCKET)).unwrap();
        let error = pods.open(&attachment(false)).unwrap_err();
        assert!(error.contains("another pod's process"), "{error}");
    }

    #[test]
    fn only_hotpluggable_volumes_without_a_disk_are_outstanding() {
        let claim = |name: &str, hotpluggable: bool| serde_json::json!({"name": name, "persistentVolumeClaim": {"claimName": name, "hotpluggable": hotpluggable}});
        let entry = |name: &str, mode: &str| {
            serde_json::json!({
                "name": name,
                "hotplugVolume": {"attachPodName": "hp-volume-1", "attachPodUID": POD},
                "persistentVolumeClaimInfo": {"volumeMode": mode},
            })
        };
        let vmi = vmi(serde_json::json!({
            "spec": {
                "domain": {"devices": {"disks": [
                    {"name": "image", "disk": {"readonly": true}},
                    {"name": "disc", "cdrom": {"bus": "sata"}},
                ]}},
                "volumes": [
                    claim("fixed", false), claim("data", true), claim("image", true), claim("disc", true),
                    claim("there", true),
                ],
            },
            "status": {"volumeStatus": [
                entry("data", "Block"), entry("image", "Filesystem"), entry("disc", "Filesystem"),
            ]},
        }));
        let read_only = |name: &str| Attachment {
            name: name.to_owned(),
            read_only: true,
            ..attachment(false)
        };
        assert_eq!(
            Attachment::outstanding(&vmi, &["there"]),
            [attachment(true), read_only("image"), read_only("disc")]
        );
    }
}
