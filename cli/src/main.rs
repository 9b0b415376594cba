//! `husk`: runs KubeVirt VirtualMachineInstance manifests as microVMs.

mod cli;
mod commands;
mod console;
mod doctor;
mod ending;
mod failure;
mod foreground;
mod log_file;
mod manifest;
mod output;
mod pod;
mod signals;
mod view;
mod vm_ref;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    cli::log_to_stderr(&cli);
    cli.command.run(cli.verbose)
}
