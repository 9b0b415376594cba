//! A machine like the lab, whose clock counts instructions, for one command.
//!
//! QEMU's `-icount` advances the machine's clock by two nanoseconds for each instruction, so the load of this machine
//! has no influence, and a command of the same seed takes the same time again. The machine's system is an initramfs:
//! with a disk, most runs hang.

use super::boot;
use super::image::{self, Image};
use super::state::Process;
use crate::archive;
use crate::checkout;
use crate::progress::{Progress, ends_with_this_process};
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Folder of the files that a caller adds.
pub const FILES: &str = "/files";

/// Memory in MiB: the initramfs, copies of its files, and a guest.
const MEMORY_MIB: u32 = 3072;

/// The processor. With that of the lab, most guests hang.
const CPU: &str = "max";

/// Modules of KVM, in the order in which they are loaded.
const KVM: [&str; 3] = ["virt/lib/irqbypass", "arch/x86/kvm/kvm", "arch/x86/kvm/kvm-amd"];

/// Modules of a network with bridges, taps and vhost.
const NETWORK: [&str; 9] = [
    "net/llc/llc",
    "net/802/stp",
    "net/bridge/bridge",
    "drivers/net/veth",
    "drivers/net/tun",
    "drivers/net/tap",
    "drivers/vhost/vhost_iotlb",
    "drivers/vhost/vhost",
    "drivers/vhost/vhost_net",
];

/// Programs that set up a network.
const NETWORK_TOOLS: [&str; 5] = [
    "usr/bin/ip",
    "usr/sbin/ethtool",
    "usr/bin/nsenter",
    "usr/bin/setsid",
    "usr/bin/unshare",
];

/// Module of the file system below [`CountedMachine::with_file_system`].
const LOOP: &str = "drivers/block/loop";

/// QEMU and what it reads for a guest whose kernel is given to it.
const QEMU: [&str; 5] = [
    "usr/bin/qemu-system-x86_64",
    "usr/share/seabios/bios-256k.bin",
    "usr/share/qemu/kvmvapic.bin",
    "usr/share/qemu/linuxboot_dma.bin",
    "usr/share/qemu/pvh.bin",
];

const XZ: &str = "usr/bin/xz";
const BUSYBOX: &str = "usr/bin/busybox";
const LOADER: &str = "usr/lib64/ld-linux-x86-64.so.2";
/// Folder where the loader finds libraries.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// Makes the file system of [`CountedMachine::with_file_system`].
const FILE_SYSTEM: &str = "\
truncate -s 1G /image && mke2fs -F /image > /image.log && mount -o loop -t ext4 /image /var/tmp || exit";

/// A run may take this many times its limit on the clock: other work may have the rest of the processor.
const CLOCK_FACTOR: u32 = 5;

const INIT: &str = include_str!("guest/counted-init");
/// Line that [`INIT`] ends with.
const END: &str = "counted: ";

/// The machine, not running.
#[derive(Debug)]
pub struct CountedMachine {
    image: Image,
    folder: TempDir,
    contents: BTreeMap<String, Vec<u8>>,
    modules: usize,
    /// Shell command that comes before any other.
    setup: &'static str,
}

impl CountedMachine {
    /// A machine with the lab's kernel, KVM, busybox and QEMU, and with `files` in [`FILES`].
    ///
    /// # Errors
    /// A file cannot be read, or a library of it is missing in the lab's system.
    pub fn new(progress: &Progress, files: &[&Path]) -> Result<Self> {
        let image = image::ensure(progress)?;
        let mut machine = Self {
            folder: tempfile::Builder::new()
                .prefix("counted.")
                .tempdir_in(checkout::folder(checkout::target().join("lab"))?)?,
            contents: BTreeMap::new(),
            modules: 0,
            setup: "",
            image,
        };
        machine.add_system()?;
        for file in files {
            let name = file.file_name().context("no file")?.to_string_lossy();
            machine.add(&format!("{}/{name}", FILES.trim_start_matches('/')), file)?;
        }
        Ok(machine)
    }

    fn add_system(&mut self) -> Result<()> {
        let root = self.image.root();
        self.add("bin/busybox", &root.join(BUSYBOX))?;
        for path in QEMU {
            self.add(path, &root.join(path))?;
        }
        KVM.into_iter().try_for_each(|module| self.add_module(module))
    }

    /// Adds a module of the lab's kernel, which is loaded after those added before.
    fn add_module(&mut self, module: &str) -> Result<()> {
        let file = only_entry(&self.image.root().join("lib/modules"))?
            .join("kernel")
            .join(format!("{module}.ko.xz"));
        let unpacked = self.image.command(XZ).arg("-dc").arg(&file).output()?;
        ensure!(unpacked.status.success(), "cannot unpack {}", file.display());
        self.contents
            .insert(format!("modules/{:02}.ko", self.modules), unpacked.stdout);
        self.modules += 1;
        Ok(())
    }

    /// Adds what a network of namespaces, bridges and taps needs.
    ///
    /// # Errors
    /// As [`CountedMachine::new`].
    pub fn with_network(mut self) -> Result<Self> {
        let root = self.image.root();
        for tool in NETWORK_TOOLS {
            self.add(tool, &root.join(tool))?;
        }
        NETWORK
            .into_iter()
            .try_for_each(|module| self.add_module(module))?;
        Ok(self)
    }

    /// Adds `xz`.
    ///
    /// # Errors
    /// As [`CountedMachine::new`].
    pub fn with_xz(mut self) -> Result<Self> {
        let file = self.image.root().join(XZ);
        self.add(XZ, &file)?;
        Ok(self)
    }

    /// Mounts an ext4 file system of 1 GiB on `/var/tmp`. The root is a tmpfs, on which Husk serves images without
    /// io_uring.
    ///
    /// # Errors
    /// As [`CountedMachine::new`].
    pub fn with_file_system(mut self) -> Result<Self> {
        self.add_module(LOOP)?;
        self.setup = FILE_SYSTEM;
        Ok(self)
    }

    /// Adds a file, and the libraries that it needs.
    fn add(&mut self, path: &str, file: &Path) -> Result<()> {
        let read =
            |file: &Path| std::fs::read(file).with_context(|| format!("cannot read {}", file.display()));
        let content = read(file)?;
        if content.starts_with(b"\x7fELF") {
            for library in self.libraries(file)? {
                let name = library.file_name().unwrap_or_default().to_string_lossy();
                let to = format!("{LIBRARIES}/{name}").replacen("usr/", "", 1);
                self.contents.insert(to, read(&library)?);
            }
            let loader = self.image.root().join(LOADER);
            self.contents
                .insert(LOADER.replacen("usr/", "", 1), read(&loader)?);
        }
        self.contents.insert(path.to_owned(), content);
        Ok(())
    }

    /// Libraries of the lab's system that a program needs: none if it is static, or no program.
    fn libraries(&self, program: &Path) -> Result<Vec<PathBuf>> {
        let root = self.image.root();
        let mut list = Command::new(root.join(LOADER));
        list.arg("--library-path").arg(root.join(LIBRARIES));
        let output = list.arg("--list").arg(program).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if let Some(missing) = text.lines().find(|line| line.contains("not found")) {
            bail!("{}: {}", program.display(), missing.trim());
        }
        let paths = text
            .lines()
            .filter_map(|line| line.split_once(" => ")?.1.split_once(" ("));
        Ok(paths.map(|(path, _)| PathBuf::from(path)).collect())
    }

    /// Boots the machine, runs `command` in its shell and returns what it wrote.
    ///
    /// # Errors
    /// The command fails, takes more processor time of the host than `limit`, or five times as long on the clock: with
    /// some seeds QEMU executes the same VMRUN for ever.
    pub fn run(&self, command: &str, seed: u32, limit: Duration) -> Result<String> {
        let run = tempfile::tempdir_in(self.folder.path())?;
        let initrd = run.path().join("initrd");
        let init = INIT.replace("COMMAND", &format!("{}\n{command}", self.setup));
        let mut files: Vec<(&str, &[u8])> = vec![("init", init.as_bytes())];
        files.extend(
            self.contents
                .iter()
                .map(|(path, content)| (path.as_str(), &content[..])),
        );
        std::fs::write(&initrd, archive::newc(&files))?;
        let console = run.path().join("console");
        let mut child = self
            .qemu(&initrd, &console, seed)
            .stderr(File::create(run.path().join("errors"))?)
            .spawn()
            .context("cannot start QEMU")?;
        let process = Process::running(child.id().cast_signed());
        let deadline = Instant::now() + limit * CLOCK_FACTOR;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break Some(status);
            }
            let used = process.and_then(Process::cpu_time);
            if used.is_some_and(|used| used > limit) || Instant::now() > deadline {
                child.kill()?;
                child.wait()?;
                break None;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let text = String::from_utf8_lossy(&std::fs::read(&console)?).replace('\r', "");
        let (said, ended) = text.rsplit_once(END).unwrap_or((&text, ""));
        let last = said.lines().next_back().unwrap_or_default();
        ensure!(status.is_some(), "it hangs: {last}");
        let errors = std::fs::read_to_string(run.path().join("errors"))?;
        ensure!(ended == "0\n", "it failed: {last} {}", errors.trim_end());
        Ok(said.to_owned())
    }

    fn qemu(&self, initrd: &Path, console: &Path, seed: u32) -> Command {
        let root = self.image.root();
        let mut qemu = self.image.command("usr/bin/qemu-system-x86_64");
        qemu.env("QEMU_MODULE_DIR", root.join(LIBRARIES).join("qemu"))
            .arg("-L")
            .arg(root.join("usr/share/qemu"))
            .arg("-L")
            .arg(root.join("usr/share/seabios"));
        let words = format!(
            "-name husk-counted -nodefaults -no-user-config -display none -no-reboot -M q35,accel=tcg,vmport=off \
             -cpu {CPU} -smp 1 -m {MEMORY_MIB}M -icount shift=1,sleep=off -rtc base=2026-01-01,clock=vm -seed {seed}"
        );
        qemu.args(words.split_whitespace())
            .args(["-append", "console=ttyS0 panic=1 mitigations=off loglevel=0"])
            .arg("-kernel")
            .arg(self.image.kernel())
            .arg("-initrd")
            .arg(initrd)
            .arg("-serial")
            .arg(format!("file:{}", boot::comma(console)))
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        ends_with_this_process(&mut qemu);
        qemu
    }
}

/// The only entry of a folder.
fn only_entry(folder: &Path) -> Result<PathBuf> {
    let entry = std::fs::read_dir(folder)
        .with_context(|| format!("cannot read {}", folder.display()))?
        .next();
    Ok(entry
        .with_context(|| format!("{} is empty", folder.display()))??
        .path())
}
