//! `husk`: runs KubeVirt VirtualMachineInstance manifests as microVMs.

mod cli;
mod commands;
mod doctor;
mod failure;
mod output;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    cli::log_to_stderr(cli.verbose);
    match cli.command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
