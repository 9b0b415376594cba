//! A separate containerd for the benchmark, with Husk's runtime as `husk node install` adds it.

use super::image;
use crate::bench_files::BenchFiles;
use crate::group::Group;
use anyhow::{Context, Result, ensure};
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use xtask::finish::finish;

/// Folder of containerd's programs in the lab.
const PROGRAMS: &str = "/opt/containerd-2.1/usr/bin";
/// The namespace of `ctr`, which is also the parent cgroup of its containers.
pub const NAMESPACE: &str = "husk-bench";
/// Time limit of a reply.
const TIMEOUT: Duration = Duration::from_secs(90);
/// Husk's runtime.
pub const SHIM: &str = "containerd-shim-husk-v2";

/// A running containerd, which is ended when this is dropped.
#[derive(Debug)]
pub struct Containerd {
    folder: PathBuf,
    daemon: Child,
    /// Cgroup of containerd.
    group: Group,
    /// Cgroup of its clients.
    clients: Group,
    mounted: Option<PathBuf>,
    /// The parent cgroup, dropped last.
    _around: Group,
}

impl Containerd {
    /// Starts it and waits until it answers. Its shims keep the state of their VMs in `files`'s state folder.
    pub fn start(files: &BenchFiles) -> Result<Self> {
        let programs = Path::new(PROGRAMS);
        ensure!(
            programs.join("containerd").is_file(),
            "there is no containerd in {PROGRAMS}, where the lab has it"
        );
        let folder = files.folder.join("ctd");
        std::fs::create_dir(&folder)?;
        let config = folder.join("config.toml");
        std::fs::write(&config, configuration(&folder))?;
        let mut install = Command::new(&files.husk);
        install.args(["node", "install", "--bin"]).arg(folder.join("bin"));
        finish(install.arg("--config").arg(&config))?;
        let counting = counting(&folder)?;

        let group = Group::counted(&format!("{NAMESPACE}/containerd"))?;
        let clients = Group::counted(&format!("{NAMESPACE}/ctr"))?;
        let log = File::create(folder.join("log"))?;
        let mut command = Command::new(programs.join("containerd"));
        group.hold(&mut command)?;
        let path = std::env::var("PATH").unwrap_or_default();
        let daemon = command
            .arg("--config")
            .arg(&config)
            .env(
                "PATH",
                format!("{}:{PROGRAMS}:{path}:/usr/sbin", counting.display()),
            )
            .env("HUSK_RUNTIME_DIR", files.runtime.path())
            .env_remove("RUST_LOG")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start containerd")?;
        let mut containerd = Self {
            folder,
            daemon,
            group,
            clients,
            mounted: None,
            _around: Group::at(NAMESPACE),
        };
        containerd.until_it_answers()?;
        Ok(containerd)
    }

    fn until_it_answers(&mut self) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let Err(error) = self.ctr(&["version"]) else {
                return Ok(());
            };
            if self.daemon.try_wait()?.is_some() || Instant::now() > deadline {
                let log = std::fs::read_to_string(self.folder.join("log")).unwrap_or_default();
                return Err(error.context(format!("containerd does not answer; it says:\n{log}")));
            }
        }
    }

    /// Imports the image with `files`'s kernel and initrd, and sets those in the image as `files`'s.
    pub fn take(&mut self, files: &mut BenchFiles) -> Result<()> {
        let archive = image::pack(&self.folder, &files.kernel, &files.initrd)?;
        self.ctr(&["images".as_ref(), "import".as_ref(), archive.as_os_str()])?;
        std::fs::remove_file(&archive)?;
        let at = self.folder.join("image");
        std::fs::create_dir(&at)?;
        self.ctr(&[
            "images".as_ref(),
            "mount".as_ref(),
            image::NAME.as_ref(),
            at.as_os_str(),
        ])?;
        let inside = |path: &str| at.join(path.trim_start_matches('/'));
        (files.kernel, files.initrd) = (inside(image::KERNEL), inside(image::INITRD));
        self.mounted = Some(at);
        Ok(())
    }

    /// A command of `ctr`.
    pub fn command<S: AsRef<OsStr>>(&self, words: &[S]) -> Command {
        let mut command = Command::new(Path::new(PROGRAMS).join("ctr"));
        command
            .arg("--address")
            .arg(self.folder.join("sock"))
            .args(["--namespace", NAMESPACE])
            .args(words)
            .env("CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS", "1")
            .stdin(Stdio::null());
        command
    }

    /// Runs a command of `ctr` until it ends; returns its output.
    pub fn ctr<S: AsRef<OsStr>>(&self, words: &[S]) -> Result<String> {
        finish(&mut self.command(words))
    }

    /// Starts `command` in the clients' cgroup.
    pub fn count(&self, command: &mut Command) -> Result<()> {
        self.clients.hold(command)
    }

    /// CPU time that containerd and its clients have used.
    pub fn cpu(&self) -> Result<Duration> {
        Ok(self.group.cpu()? + self.clients.cpu()?)
    }

    /// Version of containerd.
    pub fn version() -> Result<String> {
        let said = finish(Command::new(Path::new(PROGRAMS).join("containerd")).arg("--version"))?;
        Ok(said.trim().to_owned())
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        let _ = self.group.kill();
        let _ = self.daemon.wait();
        if let Some(at) = &self.mounted {
            let _ = Command::new("umount").arg(at).status();
        }
    }
}

fn configuration(folder: &Path) -> String {
    let at = |name: &str| folder.join(name).display().to_string();
    format!(
        "version = 2\nroot = \"{}\"\nstate = \"{}\"\n\
         disabled_plugins = [\"io.containerd.internal.v1.opt\", \"io.containerd.nri.v1.nri\"]\n\
         [grpc]\n  address = \"{}\"\n[debug]\n  level = \"warn\"\n",
        at("root"),
        at("state"),
        at("sock"),
    )
}

/// The folder with the shim that containerd finds, a wrapper which moves the shim to its pod's cgroup.
fn counting(folder: &Path) -> Result<PathBuf> {
    let counting = folder.join("counting");
    std::fs::create_dir(&counting)?;
    let script = counting.join(SHIM);
    std::fs::write(
        &script,
        format!(
            "#!/bin/sh
# From its first byte on: memory stays charged to the group that it was charged to first.
for word; do
    [ \"$before\" = -id ] && id=$word
    before=$word
done
group=/sys/fs/cgroup/{NAMESPACE}/$id-shim/cgroup.procs
[ -w \"$group\" ] && echo $$ > \"$group\"
exec {} \"$@\"
",
            folder.join("bin").join(SHIM).display()
        ),
    )?;
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755))?;
    Ok(counting)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shim_gets_its_own_arguments() {
        let folder = tempfile::tempdir().expect("a folder");
        let bin = folder.path().join("bin");
        std::fs::create_dir(&bin).expect("made");
        std::os::unix::fs::symlink("/bin/echo", bin.join(SHIM)).expect("linked");
        let script = counting(folder.path()).expect("written").join(SHIM);
        let said = finish(Command::new(script).args(["-namespace", "n", "-id", "a b", "start"]));
        assert_eq!(said.expect("runs"), "-namespace n -id a b start\n");
    }
}
