//! The VMM as a child process: its two inherited sockets, its log and its exit.
//!
//! The child runs `husk-vmm --control-fd 3 --fd-channel-fd 4 [--uid N --gid N]` with no other descriptor open but
//! standard error. It exits within a second when its control socket closes, so it cannot outlive this process.

mod error;
mod exit;
mod log;
mod placement;
#[cfg(feature = "testing")]
pub mod testing;

use std::env;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{self, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use command_fds::{CommandFdExt, FdMapping};
use husk_proto::fds::{self, FdSender};
use husk_proto::vmm::v1::vmm_client::VmmClient;
use hyper_util::rt::TokioIo;
use rustix::process::{
    Resource, Signal, getpid, getppid, getrlimit, set_parent_process_death_signal, setrlimit,
};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};

pub use error::SpawnError;
pub use exit::VmmExit;
use husk_network::TapOwner;
pub use placement::VmmPlacement;

use crate::program::Program;
use placement::CgroupProcs;

const CONTROL_FD: i32 = 3;
const FD_CHANNEL_FD: i32 = 4;
/// The user and group of a VMM whose monitor is root: KubeVirt's `qemu`.
const UNPRIVILEGED: u32 = 107;

/// A running VMM. Dropping it kills the process.
#[derive(Debug)]
pub struct VmmProcess {
    client: VmmClient<Channel>,
    fds: Arc<FdSender>,
    child: Child,
    log: Option<JoinHandle<Option<String>>>,
    last_error: Option<String>,
}

impl VmmProcess {
    /// Executes `program`. Must be called on a tokio runtime with I/O, and on a thread that outlives the VMM: the
    /// kernel kills the VMM when this thread ends.
    pub fn spawn(program: &Program, placement: &VmmPlacement) -> Result<VmmProcess, SpawnError> {
        let (control, control_theirs) = std::os::unix::net::UnixStream::pair()?;
        let (fd_channel, fd_channel_theirs) = fds::socketpair()?;
        let fds = Arc::new(FdSender::new(fd_channel)?);
        let procs_file = placement.procs_file().map_err(SpawnError::Cgroup)?;
        let mut command = command(program, control_theirs.into(), fd_channel_theirs, procs_file);
        let mut child = placement::in_new_pid_namespace(|| command.spawn())
            .map_err(|cause| program.not_started(cause))?;
        placement
            .set_oom_score_adj(child.id())
            .map_err(SpawnError::OomScoreAdj)?;
        let log = Some(tokio::spawn(log::relay(child.stderr.take())));
        let client = VmmClient::new(connect(control)?);
        Ok(VmmProcess {
            client,
            fds,
            child,
            log,
            last_error: None,
        })
    }

    /// Returns a client of the VMM's control service.
    #[must_use]
    pub fn client(&self) -> VmmClient<Channel> {
        self.client.clone()
    }

    /// The socket for descriptors to the VMM.
    #[must_use]
    pub fn fds(&self) -> &Arc<FdSender> {
        &self.fds
    }

    /// Returns its process id until [`VmmProcess::wait`] has completed.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Kills the process. [`VmmProcess::wait`] still returns its exit.
    pub fn kill(&mut self) {
        // It fails only if the process has exited.
        let _ = self.child.start_kill();
    }

    /// Waits for its exit. Cancel safe.
    pub async fn wait(&mut self) -> io::Result<VmmExit> {
        let status = self.child.wait().await?;
        if let Some(log) = &mut self.log {
            // The pipe closes with the process, unless another process holds it.
            if let Ok(Ok(last_error)) = timeout(Duration::from_secs(1), log).await {
                self.last_error = last_error;
            }
            self.log = None;
        }
        Ok(VmmExit::from_status(status, self.last_error.clone()))
    }
}

/// Returns the user and group of VMMs and their taps.
#[must_use]
pub fn owner() -> TapOwner {
    match rustix::process::geteuid() {
        root if root.is_root() => TapOwner {
            uid: UNPRIVILEGED,
            gid: UNPRIVILEGED,
        },
        user => TapOwner {
            uid: user.as_raw(),
            gid: rustix::process::getegid().as_raw(),
        },
    }
}

/// Builds the command of a VMM with its ends of the two socket pairs.
fn command(program: &Program, control: OwnedFd, fd_channel: OwnedFd, procs_file: CgroupProcs) -> Command {
    let mut command = process::Command::new(program.path());
    command.args([
        "--control-fd",
        &CONTROL_FD.to_string(),
        "--fd-channel-fd",
        &FD_CHANNEL_FD.to_string(),
    ]);
    if rustix::process::geteuid().is_root() {
        let TapOwner { uid, gid } = owner();
        command.args(["--uid", &uid.to_string(), "--gid", &gid.to_string()]);
    }
    command
        .env_clear()
        .envs(env::vars_os().filter(|(name, _)| name == "RUST_LOG" || name == "RUST_BACKTRACE"));
    command
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mappings = vec![
        FdMapping {
            parent_fd: control,
            child_fd: CONTROL_FD,
        },
        FdMapping {
            parent_fd: fd_channel,
            child_fd: FD_CHANNEL_FD,
        },
    ];
    // This fails only if two descriptors have the same number.
    let _ = command.fd_mappings(mappings);
    let parent = getpid();
    let first_unwanted = FD_CHANNEL_FD as libc::c_uint + 1;
    // SAFETY: the closure runs in the forked child before exec and makes only system calls; it neither allocates nor
    // takes a lock.
    unsafe {
        command.pre_exec(move || {
            // The VMM inherits no other descriptor of this process. The pipe of std works until exec.
            if libc::close_range(
                first_unwanted,
                libc::c_uint::MAX,
                libc::CLOSE_RANGE_CLOEXEC as libc::c_int,
            ) != 0
            {
                return Err(io::Error::last_os_error());
            }
            let mut files = getrlimit(Resource::Nofile);
            files.current = files.maximum;
            setrlimit(Resource::Nofile, files)?;
            procs_file.enter()?;
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before the line above. In a PID namespace of its own this process has no parent;
            // there it exits because its control socket closes with the parent.
            if getppid().is_some_and(|now| now != parent) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            Ok(())
        });
    }
    let mut command = Command::from(command);
    command.kill_on_drop(true);
    command
}

/// Creates a channel over one end of a socket pair. The first call connects it: if the VMM exits before that, its exit
/// status holds the cause. It cannot reconnect.
fn connect(control: std::os::unix::net::UnixStream) -> io::Result<Channel> {
    control.set_nonblocking(true)?;
    let stream = Mutex::new(Some(TokioIo::new(UnixStream::from_std(control)?)));
    let connector = tower::service_fn(move |_| {
        let stream = stream.lock().ok().and_then(|mut stream| stream.take());
        async move { stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)) }
    });
    Ok(Endpoint::from_static("http://vmm").connect_with_connector_lazy(connector))
}

#[cfg(test)]
mod tests;
