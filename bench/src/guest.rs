//! A guest as arguments for Husk and for QEMU, with the same machine and equally few other devices.

use super::bench_files::BenchFiles;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Guest that all cases of a benchmark boot.
#[derive(Debug, Clone, Copy)]
pub struct Guest<'a> {
    /// Name of Husk's VM.
    pub name: &'a str,
    /// Number of processors.
    pub vcpus: u32,
    /// Memory of the guest.
    pub mib: u64,
    /// Command line of the benchmark's kernel and initrd; without it, the guest boots from its disk.
    pub append: Option<&'a str>,
}

/// A VMM that is ready to be started: its guest's serial line is its standard output.
#[derive(Debug)]
pub struct Vmm {
    /// Command that starts the VMM.
    pub command: Command,
    /// Command that ends the guest, if killing the processes does not.
    pub stop: Option<Command>,
    /// File for the VMM's errors.
    pub errors: PathBuf,
}

/// First line of a kernel that has an early console.
pub const FIRST_LINE: &str = "Linux version";
/// First line of user space of the benchmark's initrd.
pub const USERSPACE: &str = "HUSK-USERSPACE";

/// Command line of a guest that runs the benchmark's script.
pub const SCRIPT: &str = "console=ttyS0 quiet husk.do=script";
/// Command line of a guest that becomes idle.
pub const IDLE: &str = "console=ttyS0 quiet husk.do=sleep";
/// The same with the kernel's earliest console.
pub const EARLY: &str = "console=ttyS0 earlyprintk=ttyS0,115200 husk.do=sleep";

/// Name of the case of the least program that boots the kernel.
pub const FLOOR: &str = "floor";
/// Name of that program.
pub const FLOOR_PROGRAM: &str = "husk-floor";

const QEMU: &str = "qemu-system-x86_64";

impl Guest<'_> {
    /// Husk's command, with additional lines of the manifest below `devices` and below `spec`.
    pub fn husk(&self, files: &BenchFiles, devices: &str, spec: &str) -> Result<Vmm> {
        self.husk_run(files, devices, spec, "--console")
    }

    /// The same for a VM without a disk that runs on after the command; its serial line is that of its monitor.
    pub fn husk_detached(&self, files: &BenchFiles) -> Result<Vmm> {
        self.husk_run(files, "", "", "--detach")
    }

    fn husk_run(&self, files: &BenchFiles, devices: &str, spec: &str, how: &str) -> Result<Vmm> {
        let path = self.file(files, "yaml");
        std::fs::write(&path, self.manifest(devices, spec))
            .with_context(|| format!("cannot write {}", path.display()))?;
        let mut command = husk(files);
        command.arg("run").arg(path).arg(how);
        if let Some(append) = self.append {
            command.arg("--kernel").arg(&files.kernel);
            command.arg("--initrd").arg(&files.initrd);
            command.args(["--append", append]);
        }
        Ok(self.as_husk(files, command))
    }

    /// The VMM that a command of `husk` starts under this guest's name.
    pub fn as_husk(&self, files: &BenchFiles, command: Command) -> Vmm {
        let mut stop = husk(files);
        stop.args(["stop", "--force", self.name])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Vmm {
            stop: Some(stop),
            ..self.vmm(files, command)
        }
    }

    /// The VMM that `command` starts, which ends with its processes.
    pub fn vmm(&self, files: &BenchFiles, command: Command) -> Vmm {
        Vmm {
            command,
            stop: None,
            errors: self.file(files, "errors"),
        }
    }

    /// The command of the least program that boots the kernel, with a NIC if a tap is given. Its guest ends by a reset of
    /// the keyboard controller.
    pub fn floor(&self, files: &BenchFiles, tap: Option<&str>) -> Vmm {
        let mut command = program(&files.folder.join(FLOOR_PROGRAM));
        command.arg(&files.kernel).arg(&files.initrd);
        command.arg(self.mib.to_string());
        command.arg(format!("{} panic=1 reboot=k", self.append.unwrap_or_default()));
        command.args(tap);
        self.vmm(files, command)
    }

    /// A file of this guest only. Guests that run at the same time need different names.
    pub fn file(&self, files: &BenchFiles, extension: &str) -> PathBuf {
        files.folder.join(format!("{}.{extension}", self.name))
    }

    fn manifest(&self, devices: &str, spec: &str) -> String {
        let lines = |indent: &str, text: &str| -> String {
            text.lines().map(|line| format!("{indent}{line}\n")).collect()
        };
        format!(
            "apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {{name: {}}}
spec:
  domain:
    cpu: {{cores: {}}}
    memory: {{guest: {}Mi}}
    devices:
      autoattachMemBalloon: false
      autoattachPodInterface: false
{}{}",
            self.name,
            self.vcpus,
            self.mib,
            lines("      ", devices),
            lines("  ", spec),
        )
    }

    /// The socket of Husk's monitor.
    pub fn socket(&self, files: &BenchFiles) -> PathBuf {
        files
            .runtime
            .path()
            .join("default")
            .join(self.name)
            .join("pod.sock")
    }

    /// QEMU's command, without a disk.
    pub fn qemu(&self, machine: &str, files: &BenchFiles) -> Vmm {
        self.qemu_serial(machine, files, "stdio")
    }

    /// The same with another end of the serial line.
    pub fn qemu_serial(&self, machine: &str, files: &BenchFiles, serial: &str) -> Vmm {
        let mut command = program(Path::new(QEMU));
        command
            .args(["-M", &format!("{machine},accel=kvm"), "-cpu", "host"])
            .args(["-smp", &self.vcpus.to_string(), "-m", &format!("{}M", self.mib)])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-serial", serial]);
        if let Some(append) = self.append {
            command.arg("-kernel").arg(&files.kernel);
            command.arg("-initrd").arg(&files.initrd);
            // Husk adds it to every command line that lacks it.
            command.arg("-append").arg(format!("{append} panic=1"));
        }
        self.vmm(files, command)
    }
}

/// `husk`, whose state and overlays are those of the benchmark's VMs only.
pub fn husk(files: &BenchFiles) -> Command {
    let mut command = program(&files.husk);
    command.env("HUSK_RUNTIME_DIR", files.runtime.path());
    command.env("HUSK_SCRATCH_DIR", &files.folder);
    command
}

/// A command without input and without the variables that make either VMM more verbose.
pub fn program(path: &Path) -> Command {
    let mut command = Command::new(path);
    command
        .stdin(Stdio::null())
        .env_remove("RUST_LOG")
        .env_remove("RUST_BACKTRACE");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_has_what_a_case_adds() {
        let guest = Guest {
            name: "bench",
            vcpus: 2,
            mib: 256,
            append: None,
        };
        let text = guest.manifest("blockMultiQueue: true\ndisks: [a]", "volumes: [b]");
        assert!(
            text.contains("    cpu: {cores: 2}\n    memory: {guest: 256Mi}\n"),
            "{text}"
        );
        assert!(
            text.ends_with("\n      blockMultiQueue: true\n      disks: [a]\n  volumes: [b]\n"),
            "{text}"
        );
        assert!(
            guest
                .manifest("", "")
                .ends_with("autoattachPodInterface: false\n")
        );
    }
}
