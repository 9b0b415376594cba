//! A containerd for one case, with the runtime `husk` as `husk node install` adds it, and its client `ctr`.

pub mod image;
pub mod leftovers;

use super::context::{CommandResult, TestContext};
use super::cri::Cri;
use super::manifest::Manifest;
use super::processes;
use super::program::Session;
use super::{TIMEOUT, met, poll};
use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// A version of containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// The version in Debian 13.
    V1_7,
    /// The version in Debian 14.
    V2_1,
    /// The newest version that is a Go module: `cargo xtask test --peers` builds it.
    Newest,
}

/// The name of the runtime in the form that `ctr` expects.
pub const RUNTIME: &str = "io.containerd.husk.v2";
/// The namespace of `ctr` that cases use, which is also the name of a cgroup.
pub const NAMESPACE: &str = "husk-e2e";
/// The bridge of CRI's pods.
pub const BRIDGE: &str = "husk-e2e0";
/// Maximum time of a call that does not wait for a guest.
const CALL: Duration = Duration::from_secs(90);

impl Version {
    /// Folder of the version's programs.
    fn folder(self) -> Result<PathBuf> {
        let folder = match self {
            Self::V1_7 => PathBuf::from("/opt/containerd-1.7/usr/bin"),
            Self::V2_1 => PathBuf::from("/opt/containerd-2.1/usr/bin"),
            Self::Newest => peers()?.join("containerd"),
        };
        ensure!(
            folder.join("containerd").is_file(),
            "no containerd in {}: these cases run in the lab",
            folder.display()
        );
        Ok(folder)
    }
}

/// Folder of the programs built from Go modules.
pub fn peers() -> Result<PathBuf> {
    let peers = std::env::var_os("HUSK_PEERS").context("HUSK_PEERS is not set")?;
    Ok(peers.into())
}

/// A running containerd. It is killed when this is dropped, but its containers keep running.
#[derive(Debug)]
pub struct Containerd<'s> {
    ctx: &'s TestContext,
    programs: PathBuf,
    daemon: RefCell<Option<Session>>,
    /// Leftovers of an earlier case that failed.
    before: Vec<String>,
}

impl<'s> Containerd<'s> {
    /// Starts containerd and waits until it answers.
    pub fn start(ctx: &'s TestContext, version: Version) -> Result<Self> {
        ctx.needs_root()?;
        let mut containerd = Self {
            ctx,
            programs: version.folder()?,
            daemon: RefCell::new(None),
            before: Vec::new(),
        };
        containerd.before = containerd.leftovers()?;
        containerd.configure()?;
        containerd.launch(true)?;
        Ok(containerd)
    }

    /// The test context that it belongs to.
    pub fn ctx(&self) -> &'s TestContext {
        self.ctx
    }

    /// Path of containerd's socket.
    pub fn socket(&self) -> PathBuf {
        self.ctx.path("ctd/sock")
    }

    /// State folder of containerd.
    pub fn state(&self) -> PathBuf {
        self.ctx.path("ctd/state")
    }

    fn config(&self) -> PathBuf {
        self.ctx.path("config.toml")
    }

    /// A copy of the configuration, as it was without Husk.
    fn config_before(&self) -> PathBuf {
        self.ctx.path("config.before.toml")
    }

    fn bin(&self) -> PathBuf {
        self.ctx.path("bin")
    }

    fn configure(&self) -> Result<()> {
        let at = |name: &str| self.ctx.path(name).display().to_string();
        let (root, state, socket) = (at("ctd/root"), at("ctd/state"), at("ctd/sock"));
        let (networks, pause) = (at("cni"), image::PAUSE);
        std::fs::create_dir_all(&networks)?;
        std::fs::write(
            self.ctx.path("cni/10-husk.conflist"),
            network(&at("addresses")).to_string(),
        )?;
        let text = format!(
            "version = 2\nroot = \"{root}\"\nstate = \"{state}\"\n\
             disabled_plugins = [\"io.containerd.internal.v1.opt\", \"io.containerd.nri.v1.nri\"]\n\
             [grpc]\n  address = \"{socket}\"\n[debug]\n  level = \"warn\"\n\
             [plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = \"{pause}\"\n  \
             stream_server_address = \"127.0.0.1\"\n\
             [plugins.\"io.containerd.grpc.v1.cri\".cni]\n  bin_dir = \"/usr/lib/cni\"\n  conf_dir = \"{networks}\"\n"
        );
        std::fs::write(self.config(), &text)?;
        std::fs::write(self.config_before(), text)?;
        self.node("install")
    }

    /// Runs `husk node install` or `uninstall` for this containerd.
    fn node(&self, what: &str) -> Result<()> {
        let mut command = self.ctx.husk(&["node", what, "--bin"]);
        command.arg(self.bin()).arg("--config").arg(self.config());
        self.ctx.finish(command, CALL)?.ok()?;
        Ok(())
    }

    /// Uninstalls the runtime, and checks that everything is as before.
    pub fn uninstall(&self) -> Result<()> {
        self.node("uninstall")?;
        let [before, after] = [self.config_before(), self.config()].map(std::fs::read_to_string);
        ensure!(before? == after?, "containerd's configuration is not as it was");
        let left = std::fs::read_dir(self.bin())?.count();
        ensure!(left == 0, "{left} files are left in {}", self.bin().display());
        Ok(())
    }

    /// Starts containerd with the shim's folder in `PATH`, for `ctr`, or without it.
    fn launch(&self, in_path: bool) -> Result<()> {
        let mut command = Command::new(self.programs.join("containerd"));
        let others = std::env::var("PATH").unwrap_or_default();
        let mut path = format!("{}:{others}:/usr/sbin", self.programs.display());
        if in_path {
            path = format!("{}:{path}", self.bin().display());
        }
        command
            .args([OsStr::new("--config"), self.config().as_os_str()])
            .env("PATH", path)
            .env("HUSK_RUNTIME_DIR", self.ctx.runtime_dir())
            .env_remove("NOTIFY_SOCKET")
            .current_dir("/");
        let daemon = Session::piped(command, &self.ctx.log("containerd.log"))?;
        *self.daemon.borrow_mut() = Some(daemon);
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let answer = self.ctr(&["version"])?;
            if answer.status == 0 {
                return Ok(());
            }
            let ended = match &*self.daemon.borrow() {
                Some(daemon) => daemon.ended()?,
                None => None,
            };
            if let Some(ended) = ended {
                bail!("containerd ended with {}:\n{}", ended.status, ended.text);
            }
            ensure!(
                Instant::now() < deadline,
                "containerd does not answer: {}",
                answer.text
            );
        }
    }

    /// Kills containerd with SIGKILL; its containers keep running.
    pub fn kill(&self) -> Result<()> {
        match self.daemon.borrow_mut().take() {
            Some(daemon) => daemon.kill(),
            None => Ok(()),
        }
    }

    /// Calls `run` while containerd is stopped by SIGSTOP.
    pub fn while_stopped<T>(&self, run: impl FnOnce() -> Result<T>) -> Result<T> {
        let pid = self.daemon.borrow().as_ref().map(Session::pid);
        let pid = pid.context("containerd does not run")?;
        processes::kill(pid, Signal::STOP)?;
        let result = run();
        processes::kill(pid, Signal::CONT)?;
        result
    }

    /// Restarts containerd after [`Containerd::kill`].
    pub fn restart(&self) -> Result<()> {
        self.launch(true)
    }

    /// As [`Containerd::restart`]; only the handler's `runtime_path` names the shim.
    pub fn restart_without_path(&self) -> Result<()> {
        self.launch(false)
    }

    /// A client of containerd's Container Runtime Interface.
    pub fn cri(&self) -> Result<Cri> {
        Cri::connect(self.socket(), self.ctx.path("pods"))
    }

    /// A command of `ctr`.
    pub fn ctr_command<S: AsRef<OsStr>>(&self, words: &[S]) -> Command {
        let mut command = Command::new(self.programs.join("ctr"));
        command
            .arg("--address")
            .arg(self.socket())
            .args(["--namespace", NAMESPACE])
            .args(words)
            .env("CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS", "1");
        command
    }

    /// Runs a command of `ctr` until it ends.
    pub fn ctr<S: AsRef<OsStr>>(&self, words: &[S]) -> Result<CommandResult> {
        self.ctx.finish(self.ctr_command(words), CALL)
    }

    /// The arguments of `ctr run` for a VM: `options`, then the image and the container's name.
    pub fn run_words(&self, manifest: &Manifest, options: &[&str], image: &str, name: &str) -> Vec<String> {
        let mut words = vec!["run".to_owned(), "--runtime".to_owned(), RUNTIME.to_owned()];
        words.push("--annotation".to_owned());
        words.push(format!("husk.io/vmi={}", manifest.json()));
        words.extend(options.iter().map(|&word| word.to_owned()));
        words.extend([image::name(image), name.to_owned()]);
        words
    }

    /// Runs a VM until it ends, and deletes its container.
    pub fn run(
        &self,
        manifest: &Manifest,
        options: &[&str],
        image: &str,
        name: &str,
    ) -> Result<CommandResult> {
        let words = self.run_words(manifest, options, image, name);
        let answer = self.ctx.finish(self.ctr_command(&words), TIMEOUT);
        self.ctr(&["containers", "rm", name])?;
        answer
    }

    /// Starts a VM without an attached client.
    pub fn detached(&self, manifest: &Manifest, options: &[&str], image: &str, name: &str) -> Result<()> {
        let mut words = self.run_words(manifest, options, image, name);
        words.insert(1, "--detach".to_owned());
        self.ctr(&words)?.ok()?;
        Ok(())
    }

    /// A VM with a session on its console, which is a terminal.
    pub fn on_terminal(
        &self,
        manifest: &Manifest,
        options: &[&str],
        image: &str,
        name: &str,
    ) -> Result<Session> {
        let mut words = self.run_words(manifest, options, image, name);
        words.splice(1..1, ["--rm".to_owned(), "--tty".to_owned()]);
        Session::on_terminal(self.ctr_command(&words), &self.ctx.log(&format!("{name}.log")))
    }

    /// The process and the state of a task in the output of `ctr tasks ls`; nothing if there is no such task.
    pub fn task(&self, name: &str) -> Result<Option<(i32, String)>> {
        let listed = self.ctr(&["tasks", "ls"])?.ok()?;
        let mut lines = listed
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        Ok(lines
            .find(|words| words.first() == Some(&name))
            .and_then(|words| Some((words.get(1)?.parse().ok()?, (*words.get(2)?).to_owned()))))
    }

    /// Waits until a task is in `state`.
    pub fn until(&self, name: &str, state: &str, limit: Duration) -> Result<()> {
        poll(limit, Duration::from_millis(200), || {
            let seen = self.task(name)?;
            met(seen.as_ref().is_some_and(|(_, seen)| seen == state), || {
                format!("{name} is not {state} after {} s: {seen:?}", limit.as_secs())
            })
        })
    }

    /// Deletes a task that has ended and its container; returns the task's exit status.
    pub fn remove(&self, name: &str) -> Result<i32> {
        let said = self.ctr(&["tasks", "rm", name])?.text;
        self.ctr(&["containers", "rm", name])?.ok()?;
        // For a status other than 0 it only prints a warning.
        let status = said.split("non-zero exit code ").nth(1);
        let status = status.map(|rest| rest.chars().take_while(char::is_ascii_digit).collect::<String>());
        Ok(status.map_or(Ok(0), |status| status.parse())?)
    }

    /// The shim that serves the container or pod `id`.
    pub fn shim(&self, id: &str) -> Result<i32> {
        let wanted = format!(" -id {id} ");
        let shims = leftovers::called("containerd-shim-husk-v2")?;
        let found = shims
            .iter()
            .find(|shim| format!("{} ", shim.command).contains(&wanted));
        Ok(found
            .with_context(|| format!("no shim of {id} in {shims:?}"))?
            .pid)
    }
}

/// CNI configuration that puts CRI's pods on a bridge, with address leases in `state`.
fn network(state: &str) -> Value {
    json!({
        "cniVersion": "0.4.0",
        "name": "husk-e2e",
        "plugins": [{
            "type": "bridge",
            "bridge": BRIDGE,
            "isGateway": true,
            "ipam": {
                "type": "host-local",
                "dataDir": state,
                "ranges": [[{"subnet": "10.88.0.0/24"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }],
    })
}
