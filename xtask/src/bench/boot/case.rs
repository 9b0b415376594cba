//! What is compared, and how each is started.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A VMM in one configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Vmm {
    /// `husk run`, as anybody starts it.
    Husk,
    /// QEMU's small machine. Without an RTC the guest looks for one for over a second.
    Microvm,
    /// QEMU's PC.
    Q35,
}

/// What a guest boots from.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// The kernel and initrd of the kit, with this command line.
    Kernel(&'a str),
    /// The kernel and whatever else is on this disk.
    Disk(&'a Path),
}

/// Files that all runs use, in a folder of their own.
#[derive(Debug)]
pub struct Kit {
    /// Where the manifests go.
    pub folder: PathBuf,
    /// `husk`, with `husk-vmm` beside it.
    pub husk: PathBuf,
    /// A kernel.
    pub kernel: PathBuf,
    /// Its initrd.
    pub initrd: PathBuf,
}

/// Memory of a guest that boots a kernel and an initrd.
pub const KERNEL_MIB: u64 = 256;

/// Memory of a guest that boots a whole Debian.
pub const DISK_MIB: u64 = 512;

/// Name of Husk's VM.
const NAME: &str = "bench-boot";

const QEMU: &str = "qemu-system-x86_64";

impl Vmm {
    /// Those that boot a kernel and an initrd.
    pub const ALL: [Self; 3] = [Self::Husk, Self::Microvm, Self::Q35];

    /// Those that boot a disk.
    pub const WITH_DISK: [Self; 2] = [Self::Husk, Self::Q35];

    /// The case's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Husk => "husk",
            Self::Microvm => "qemu-microvm",
            Self::Q35 => "qemu-q35",
        }
    }

    /// The case's name where the guest boots a disk.
    pub fn disk_name(self) -> String {
        format!("{}-disk", self.name())
    }

    /// The command that boots a guest of one vCPU, with its serial line on standard output.
    pub fn command(self, kit: &Kit, source: Source<'_>) -> Result<Command> {
        let mut command = match self {
            Self::Husk => husk(kit, source)?,
            Self::Microvm => qemu("microvm,accel=kvm,rtc=on", kit, source)?,
            Self::Q35 => qemu("q35,accel=kvm", kit, source)?,
        };
        command
            .stdin(Stdio::null())
            .env_remove("RUST_LOG")
            .env_remove("RUST_BACKTRACE");
        Ok(command)
    }

    /// Ends a guest that would run on, as far as that takes more than killing processes.
    pub fn end(self, kit: &Kit) {
        if self == Self::Husk {
            let _ = Command::new(&kit.husk)
                .args(["stop", "--force", NAME])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
        }
    }
}

fn husk(kit: &Kit, source: Source<'_>) -> Result<Command> {
    let (mib, disks, volumes) = match source {
        Source::Kernel(_) => (KERNEL_MIB, String::new(), String::new()),
        Source::Disk(disk) => (
            DISK_MIB,
            "\n      disks: [{name: root, disk: {bus: virtio}}]".to_owned(),
            format!(
                "\n  volumes: [{{name: root, hostDisk: {{type: Disk, path: {}}}}}]",
                disk.display()
            ),
        ),
    };
    // As little beside the serial line as QEMU is given.
    let manifest = format!(
        "apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {{name: {NAME}}}
spec:
  domain:
    cpu: {{cores: 1}}
    memory: {{guest: {mib}Mi}}
    devices:
      autoattachMemBalloon: false
      autoattachPodInterface: false{disks}{volumes}
"
    );
    let path = kit.folder.join("vmi.yaml");
    std::fs::write(&path, manifest).with_context(|| format!("cannot write {}", path.display()))?;
    let mut command = Command::new(&kit.husk);
    command.arg("run").arg(path).arg("--console");
    if let Source::Kernel(append) = source {
        command.arg("--kernel").arg(&kit.kernel);
        command.arg("--initrd").arg(&kit.initrd);
        command.args(["--append", append]);
    }
    Ok(command)
}

fn qemu(machine: &str, kit: &Kit, source: Source<'_>) -> Result<Command> {
    let mut command = Command::new(QEMU);
    command
        .args(["-M", machine, "-cpu", "host", "-smp", "1"])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .args(["-serial", "stdio"]);
    match source {
        Source::Kernel(append) => {
            command.args(["-m", &format!("{KERNEL_MIB}M")]);
            command.arg("-kernel").arg(&kit.kernel);
            command.arg("-initrd").arg(&kit.initrd);
            // What Husk adds to every command line without one.
            command.arg("-append").arg(format!("{append} panic=1"));
        }
        Source::Disk(disk) => {
            let drive = format!(
                "if=none,id=root,format=raw,aio=io_uring,cache={},file={}",
                cache(disk)?,
                disk.display()
            );
            command.args(["-m", &format!("{DISK_MIB}M"), "-drive", &drive]);
            command.args(["-device", "virtio-blk-pci,drive=root,bootindex=0"]);
        }
    }
    Ok(command)
}

/// The cache mode that Husk takes for this file when not told one: none where the file system can.
fn cache(disk: &Path) -> Result<&'static str> {
    let direct = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(disk);
    match direct {
        Ok(_) => Ok("none"),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok("writethrough"),
        Err(error) => Err(error).with_context(|| format!("cannot open {}", disk.display())),
    }
}
