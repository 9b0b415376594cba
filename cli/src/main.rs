//! `husk`: runs KubeVirt VirtualMachineInstance manifests as microVMs.

/// Prints a line on stderr. Unlike the macro of the standard library, it does not panic when the write fails.
macro_rules! eprintln {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($words)*);
    }};
}

/// The same without the newline.
macro_rules! eprint {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = write!(std::io::stderr(), $($words)*);
    }};
}

mod aborted_start;
mod cli;
mod commands;
mod console;
mod doctor;
mod failure;
mod foreground;
mod host_warnings;
mod image_volumes;
mod import_program;
mod launch;
mod live_vm;
mod log_file;
mod machine;
mod manifest;
mod network;
mod output;
mod port_forward;
mod shutdown;
mod signals;
mod status;
mod step_bars;
mod vm_ref;
mod vm_view;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let cli = cli::Cli::of_run(words.into_iter()).unwrap_or_else(cli::Cli::parse);
    cli::log_to_stderr(&cli);
    cli.command.run(cli.verbose)
}
