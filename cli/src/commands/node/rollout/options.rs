//! Options of an installation for the running containerd.

use std::path::PathBuf;
use std::time::Duration;

/// Options for the host on which containerd runs, and for the directory of the programs.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Check the change by containerd's own configuration dump, and restart containerd if it needs it
    ///
    /// The programs are in a directory of their version below --versions: running pods keep theirs. If containerd does
    /// not answer with the change, its former configuration is restored.
    #[arg(long)]
    pub(super) restart: bool,

    /// Root directory of the node, for a container: /proc/1/root with the node's processes (hostPID)
    #[arg(long, value_name = "DIR", requires = "restart", value_hint = clap::ValueHint::DirPath)]
    pub(super) host_root: Option<PathBuf>,

    /// Directory for versions of the programs
    #[arg(long, value_name = "DIR", requires = "restart", default_value = "/opt/husk", value_hint = clap::ValueHint::DirPath)]
    pub(super) versions: PathBuf,

    /// Socket of containerd [default: for uninstall that of install, else /run/containerd/containerd.sock]
    #[arg(long, value_name = "SOCKET", requires = "restart")]
    pub(super) socket: Option<PathBuf>,

    /// Time for containerd to answer after a restart
    #[arg(long, value_name = "SECONDS", requires = "restart", default_value_t = 180)]
    pub(super) wait: u64,
}

impl Options {
    pub(crate) fn restart(&self) -> bool {
        self.restart
    }

    pub(super) fn wait(&self) -> Duration {
        Duration::from_secs(self.wait)
    }
}
