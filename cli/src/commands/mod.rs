//! The subcommands, one file each.

use std::process::ExitCode;

use clap::Subcommand;

use crate::failure::Failure;

mod addinterface;
mod addvolume;
mod apply;
mod completions;
mod console;
mod delete;
mod diff;
mod doctor;
mod get;
mod guest;
mod images;
mod import_volume;
mod inspect;
mod link;
mod list;
mod logs;
mod node;
mod pause;
mod port_forward;
mod removeinterface;
mod removevolume;
mod reset;
mod restore;
mod resume;
mod rm;
mod run;
mod service;
mod snapshot;
mod soft_reboot;
mod ssh;
mod start;
mod stop;
mod sync;
mod validate;
mod volume;
mod vsock;

/// `husk run` alone, for a parser without the other commands.
#[derive(Debug, Subcommand)]
pub(crate) enum RunCommand {
    Run(run::Args),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(run::Args),
    Apply(apply::Args),
    Get(get::Args),
    Diff(diff::Args),
    Delete(delete::Args),
    Start(start::StartArgs),
    Restart(start::RestartArgs),
    List(list::Args),
    Console(console::Args),
    Logs(logs::Args),
    Ssh(ssh::Args),
    Guest(guest::Args),
    PortForward(port_forward::Args),
    Vsock(vsock::Args),
    Inspect(inspect::Args),
    Pause(pause::Args),
    Resume(resume::Args),
    Reset(reset::Args),
    SoftReboot(soft_reboot::Args),
    Snapshot(snapshot::Args),
    Restore(restore::Args),
    Addvolume(addvolume::Args),
    Removevolume(removevolume::Args),
    Addinterface(addinterface::Args),
    Removeinterface(removeinterface::Args),
    Link(link::Args),
    Sync(sync::Args),
    Stop(stop::Args),
    Rm(rm::Args),
    Images(images::Args),
    Volume(volume::Args),
    Validate(validate::Args),
    Doctor(doctor::Args),
    Node(node::Args),
    Completions(completions::Args),
    #[command(hide = true)]
    Service(service::Args),
    #[command(hide = true, name = "import-volume")]
    ImportVolume(import_volume::Args),
}

impl Command {
    /// Runs the command and returns its exit status.
    pub(crate) fn run(&self, verbose: u8) -> ExitCode {
        let done: Result<(), Failure> = match self {
            Self::Run(args) => run::run(args, verbose),
            Self::Apply(args) => apply::run(args),
            Self::Get(args) => get::run(args),
            Self::Diff(args) => diff::run(args),
            Self::Delete(args) => delete::run(args),
            Self::Start(args) => start::start(args),
            Self::Restart(args) => start::restart(args),
            Self::List(args) => list::run(args),
            Self::Console(args) => console::run(args),
            Self::Logs(args) => logs::run(args),
            Self::Ssh(args) => ssh::run(args),
            Self::Guest(args) => guest::run(args),
            Self::PortForward(args) => port_forward::run(args),
            Self::Vsock(args) => vsock::run(args),
            Self::Inspect(args) => inspect::run(args),
            Self::Pause(args) => pause::run(args),
            Self::Resume(args) => resume::run(args),
            Self::Reset(args) => reset::run(args),
            Self::SoftReboot(args) => soft_reboot::run(args),
            Self::Snapshot(args) => snapshot::run(args),
            Self::Restore(args) => restore::run(args, verbose),
            Self::Addvolume(args) => addvolume::run(args),
            Self::Removevolume(args) => removevolume::run(args),
            Self::Addinterface(args) => addinterface::run(args),
            Self::Removeinterface(args) => removeinterface::run(args),
            Self::Link(args) => link::run(args),
            Self::Sync(args) => sync::run(args),
            Self::Stop(args) => stop::run(args),
            Self::Rm(args) => rm::run(args),
            Self::Images(args) => images::run(args),
            Self::Volume(args) => volume::run(args),
            Self::Validate(args) => validate::run(args),
            Self::Doctor(args) => doctor::run(args),
            Self::Node(args) => node::run(args),
            Self::Completions(args) => completions::run(args),
            Self::Service(args) => service::run(args),
            Self::ImportVolume(args) => import_volume::run(args),
        };
        done.map_or_else(Failure::report, |()| ExitCode::SUCCESS)
    }
}
