//! A Kubernetes cluster with KubeVirt's stock control plane: its programs are processes of this machine, its nodes are
//! labs, connected by a bridge.

mod certificates;
mod daemon;
mod guests;
mod images;
mod kubectl;
mod kubernetes;
mod kubevirt;
mod network;
mod node;
mod timeline;

use crate::binaries::{self, Profile};
use crate::exit_code;
use crate::packages::{self, Tool, tool};
use crate::progress::Progress;
use crate::{checkout, upstream};
use anyhow::{Context, Result, bail};
use clap::Subcommand;
use daemon::Record;
pub use kubectl::Kubectl;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
pub use timeline::Timeline;

const TOOLS: &[Tool] = &[
    tool("openssl", "openssl"),
    tool("ip", "iproute2"),
    tool("git", "git"),
    tool("gcc", "gcc"),
    tool("strip", "binutils"),
    tool("mke2fs", "e2fsprogs"),
];

/// Arguments of `cargo xtask cluster`.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Builds and starts the cluster, unless it runs; needs root
    Up {
        /// A checkout of KubeVirt 1.9, from which its control plane is built
        #[arg(long, value_name = "CHECKOUT")]
        kubevirt: PathBuf,
        /// Number of nodes, each of which is a lab
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
        nodes: u32,
        /// Use Husk's existing binaries
        #[arg(long)]
        no_build: bool,
    },
    /// Reports the cluster's processes and nodes; exits with 1 if one is missing
    Status,
    /// Runs kubectl as the cluster's administrator
    #[command(disable_help_flag = true)]
    Kubectl {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Runs virtctl as the cluster's administrator
    #[command(disable_help_flag = true)]
    Virtctl {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Kills a process of this machine, as `status` names it, and starts it again
    Restart {
        #[arg(value_name = "NAME")]
        process: String,
    },
    /// Ends the cluster and deletes its data
    Down,
}

/// Folder of the cluster's certificates, data and logs.
pub fn folder() -> Result<PathBuf> {
    checkout::folder(checkout::target().join("cluster"))
}

/// Runs `cargo xtask cluster`; returns the command's exit status.
pub fn run(args: Args) -> Result<ExitCode> {
    match args.action {
        Action::Up {
            kubevirt,
            nodes,
            no_build,
        } => up(
            &kubevirt,
            &Options {
                nodes,
                profile: Profile::EndToEnd,
                build: !no_build,
            },
        )?,
        Action::Status => return status(&folder()?),
        Action::Kubectl { arguments } => return Ok(client(&folder()?, "kubectl", &arguments)),
        Action::Virtctl { arguments } => return Ok(client(&folder()?, "virtctl", &arguments)),
        Action::Restart { process } => Record::read(&folder()?).restart(&process)?,
        Action::Down => down()?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The options of a cluster.
#[derive(Debug)]
pub struct Options {
    /// Number of nodes, each of which is a lab. Nodes that are not labs can be added.
    pub nodes: u32,
    /// Profile of Husk's binaries.
    pub profile: Profile,
    /// Build Husk first.
    pub build: bool,
}

/// Starts the cluster with KubeVirt from the checkout `source`, unless it runs.
///
/// # Errors
/// Fails if this is not root, or something does not start; then [`down`] ends the rest.
pub fn up(source: &Path, options: &Options) -> Result<()> {
    let nodes = options.nodes;
    need_root(&format!("cluster up --kubevirt {}", source.display()))?;
    let progress = Progress::on_stderr();
    packages::ensure(&progress, TOOLS)?;
    if options.build {
        binaries::build(options.profile, &progress)?;
    }
    let programs = Programs {
        peers: upstream::ensure(&progress)?,
        control_plane: upstream::ensure_control_plane(&progress)?,
        kubevirt: kubevirt::build(&progress, source)?,
        husk: options.profile.folder(),
    };
    let folder = folder()?;
    let mut record = Record::read(&folder);
    if record.runs() && record.nodes == nodes {
        eprintln!("the cluster runs already");
        return Ok(());
    }
    end(&record)?;
    let result = start(&folder, source, nodes, &programs, &mut record, &progress);
    if result.is_err() {
        eprintln!(
            "the cluster is incomplete, logs in {}: cargo xtask cluster down ends it",
            folder.join("logs").display()
        );
    }
    result
}

/// Folders of the programs that the cluster runs.
#[derive(Debug)]
struct Programs {
    /// containerd and the programs of Kubernetes that `cargo xtask test --peers` runs too.
    peers: PathBuf,
    /// The other programs of Kubernetes.
    control_plane: PathBuf,
    kubevirt: PathBuf,
    husk: PathBuf,
}

fn start(
    folder: &Path,
    source: &Path,
    nodes: u32,
    programs: &Programs,
    record: &mut Record,
    progress: &Progress,
) -> Result<()> {
    for part in ["logs", "etcd", "certificates", "tokens"] {
        let part = folder.join(part);
        let _ = std::fs::remove_dir_all(&part);
        checkout::folder(part)?;
    }
    // It has keys.
    std::fs::set_permissions(folder.join("certificates"), PermissionsExt::from_mode(0o700))?;
    record.begin(nodes)?;
    for program in [
        programs.peers.join("kubernetes/kubectl"),
        programs.kubevirt.join("virtctl"),
    ] {
        let link = folder.join(program.file_name().context("no name")?);
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(program, link)?;
    }
    certificates::make(progress, &folder.join("certificates"), nodes)?;
    network::add(nodes)?;
    let archives = match nodes {
        0 => Vec::new(),
        _ => images::make(progress, folder, source, programs)?,
    };
    kubernetes::start(progress, folder, programs, record)?;
    let kubectl = Kubectl::new(folder);
    kubevirt::install(progress, folder, source, programs, record, &kubectl)?;
    for number in 1..=nodes {
        node::start(progress, folder, programs, (number, nodes), &archives)?;
    }
    kubevirt::deploy_husk(progress, &kubectl, nodes)?;
    record.finish()
}

fn status(folder: &Path) -> Result<ExitCode> {
    let record = Record::read(folder);
    if record.daemons.is_empty() {
        println!("down");
        return Ok(ExitCode::FAILURE);
    }
    for daemon in &record.daemons {
        let state = if daemon.process.alive() {
            "runs"
        } else {
            "has ended"
        };
        println!("{:<26} {state}, pid {}", daemon.name, daemon.process.pid);
    }
    let nodes = Kubectl::new(folder).run(&["get", "nodes", "-o", "wide"]);
    print!("{}", nodes.as_deref().unwrap_or_default());
    Ok(exit_code(record.runs() && nodes.is_ok()))
}

/// Runs a client of the cluster with this process's input and output.
fn client(folder: &Path, name: &str, arguments: &[String]) -> ExitCode {
    use std::os::unix::process::CommandExt;
    let program = folder.join(name);
    if !program.exists() {
        eprintln!("error: there is no cluster: start one by cargo xtask cluster up --kubevirt CHECKOUT");
        return ExitCode::FAILURE;
    }
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let error = Kubectl::new(folder).client(name, &words).exec();
    eprintln!("error: cannot start {}: {error}", program.display());
    ExitCode::FAILURE
}

/// True if a cluster was started and not ended; it uses the labs.
pub fn exists() -> bool {
    let record = Record::read(&checkout::target().join("cluster"));
    record.daemons.iter().any(|daemon| daemon.process.alive())
}

/// True if the cluster's start was finished and all its processes run.
pub fn runs() -> bool {
    Record::read(&checkout::target().join("cluster")).runs()
}

/// Starts processes of this machine again that have ended, as the kubelet would if they were pods.
///
/// # Errors
/// Fails if one does not start.
pub fn restart_ended() -> Result<()> {
    let mut record = Record::read(&folder()?);
    record.ended().iter().try_for_each(|name| record.restart(name))
}

/// Starts a process that ends with the cluster.
///
/// # Errors
/// Fails if it does not start.
pub fn start_process(name: &str, command: &mut std::process::Command) -> Result<()> {
    Record::read(&folder()?).start(name, command)
}

/// The API server's log of requests.
pub fn audit_log() -> Result<PathBuf> {
    Ok(kubernetes::audit_log(&folder()?))
}

/// Ends the cluster and deletes its data.
///
/// # Errors
/// Fails if this is not root, or a lab cannot be ended.
pub fn down() -> Result<()> {
    need_root("cluster down")?;
    let folder = folder()?;
    end(&Record::read(&folder))?;
    std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))
}

/// Ends the processes, the nodes and the network of a cluster.
fn end(record: &Record) -> Result<()> {
    record.end();
    let nodes = (1..=record.nodes).map(node::end).collect::<Vec<_>>();
    network::remove();
    nodes.into_iter().collect()
}

/// Fails, with the command line to run, if this is not root: a bridge and taps need it.
pub fn need_root(words: &str) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("a cluster needs root: run {}", checkout::as_root(words));
    }
    Ok(())
}
