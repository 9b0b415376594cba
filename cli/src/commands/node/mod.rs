//! `husk node`: making a machine a node whose containerd runs pods as VMs.

mod config;
mod files;

use std::path::{Path, PathBuf};

use clap::Subcommand;

use crate::doctor;
use crate::failure::Failure;
use crate::output;

use files::Done;

/// What a node needs in its path: the shim that containerd starts, the VMM that this starts, and this program.
const PROGRAMS: [&str; 3] = ["containerd-shim-husk-v2", "husk-vmm", "husk"];

/// Have this machine's containerd run pods as VMs
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Place the programs and add the runtime handler `husk` to containerd's configuration
    ///
    /// Does nothing twice. Says what it changed; containerd is to be restarted by whoever runs the node, which leaves
    /// pods running.
    #[command(after_help = "\
Afterwards:
  systemctl restart containerd
  kubectl apply -f deploy/runtimeclass.yaml")]
    Install(Places),
    /// Take both away again
    Uninstall(Places),
}

#[derive(Debug, clap::Args)]
struct Places {
    /// Where the programs go: a directory on containerd's PATH
    #[arg(long, value_name = "DIR", default_value = "/usr/local/bin", value_hint = clap::ValueHint::DirPath)]
    bin: PathBuf,

    /// containerd's configuration
    #[arg(long, value_name = "FILE", default_value = "/etc/containerd/config.toml", value_hint = clap::ValueHint::FilePath)]
    config: PathBuf,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    match &args.what {
        What::Install(places) => install(places),
        What::Uninstall(places) => uninstall(places),
    }
}

fn install(places: &Places) -> Result<(), Failure> {
    let own = std::env::current_exe().map_err(Failure::at("find this program"))?;
    let beside = own.parent().unwrap_or(Path::new("/"));
    // Before anything is changed.
    for program in PROGRAMS {
        let path = beside.join(program);
        if !path.is_file() {
            return Err(Failure::Runtime(format!(
                "{} is not there: keep {program} beside husk, as the build does",
                path.display()
            )));
        }
    }
    let bin = std::path::absolute(&places.bin).map_err(Failure::at(places.bin.display().to_string()))?;
    let before = files::text(&places.config)?;
    let after = config::with_husk(before.as_deref(), &bin.join(PROGRAMS[0]))
        .map_err(|why| Failure::Runtime(format!("{}: {why}", places.config.display())))?;
    for program in PROGRAMS {
        let to = bin.join(program);
        say(files::copy(&beside.join(program), &to)?, &to)?;
    }
    let configured = files::replace(&places.config, before.as_deref(), Some(&after))?;
    say(configured, &places.config)?;
    if configured != Done::Unchanged {
        output::print("restart containerd for it: systemctl restart containerd\n")?;
    }
    if let Some(obstacle) = doctor::obstacle() {
        output::print(&format!("no VM will run here yet: {obstacle}\n"))?;
    }
    Ok(())
}

fn uninstall(places: &Places) -> Result<(), Failure> {
    let before = files::text(&places.config)?;
    let after = before.as_deref().map(config::without_husk);
    let after = after.as_ref().and_then(|after| after.as_deref());
    let configured = files::replace(&places.config, before.as_deref(), after)?;
    say(configured, &places.config)?;
    for program in PROGRAMS {
        let path = places.bin.join(program);
        say(files::remove(&path)?, &path)?;
    }
    if configured != Done::Unchanged {
        output::print("restart containerd for it: systemctl restart containerd\n")?;
    }
    Ok(())
}

fn say(done: Done, path: &Path) -> Result<(), Failure> {
    let what = match done {
        Done::Made => "made",
        Done::Changed => "changed",
        Done::Removed => "removed",
        Done::Unchanged => "unchanged",
    };
    output::print(&format!("{what} {}\n", path.display()))
}
