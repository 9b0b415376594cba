//! The command line.

use std::ffi::OsString;
use std::iter;

use clap::{ArgAction, Parser};
use tracing_subscriber::EnvFilter;

use crate::commands::{Command, RunCommand};

/// Run KubeVirt VirtualMachineInstance manifests as microVMs
///
/// A VM is named NAME or NAMESPACE/NAME; without a namespace it is in `default`.
#[derive(Debug, Parser)]
#[command(
    name = "husk",
    version,
    after_help = "\
Exit status: 0 success, 1 failure, 2 wrong command line or manifest.
`husk run` has more, see `husk run --help`.

Environment:
  HUSK_RUNTIME_DIR  directory for the state of running VMs
                    [default: /run/husk for root, else $XDG_RUNTIME_DIR/husk]
  HUSK_SCRATCH_DIR  directory for ephemeral data (emptyDisk, overlays, unpacked
                    images) [default: /var/tmp]
  HUSK_DATA_DIR     directory for what is kept: objects, images and volumes
                    [default: /var/lib/husk for root, else $XDG_DATA_HOME/husk]
  HUSK_VMM          path of the VMM
                    [default: husk-vmm beside its monitor, else on PATH]
  HUSK_MONITOR      path of the monitor of a VM of `husk run` or `husk restore`
                    [default: husk-monitor beside husk, else on PATH]
  HUSK_IMPORT       path of the program that pulls images and fills volumes
                    [default: husk-import beside husk, else on PATH]
  HUSK_KVM          path of the KVM device, used without checks
                    [default: /dev/kvm]
  RUST_LOG          log filter, such as debug or husk_monitor=trace
  NO_COLOR          disable colours"
)]
pub(crate) struct Cli {
    /// Log to stderr in more detail; repeat for debug output
    #[arg(short, long, global = true, action = ArgAction::Count, display_order = 100)]
    pub verbose: u8,

    #[command(subcommand)]
    pub command: Command,
}

/// The part of the parser for `husk run`.
#[derive(Debug, Parser)]
#[command(name = "husk")]
struct RunCli {
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,

    #[command(subcommand)]
    command: RunCommand,
}

impl Cli {
    /// The command line of `husk run`, or `None` for any other and for a wrong one, which the whole parser reports.
    /// This avoids that parser, which first builds all commands with their options: time that each start of a VM would
    /// wait for.
    pub(crate) fn of_run(words: impl Iterator<Item = OsString> + Clone) -> Option<Self> {
        (words.clone().next()? == "run").then_some(())?;
        let RunCli { verbose, command } =
            RunCli::try_parse_from(iter::once("husk".into()).chain(words)).ok()?;
        let RunCommand::Run(args) = command;
        let command = Command::Run(args);
        Some(Self { verbose, command })
    }
}

/// Sets up logging to stderr: warnings by default, more with `-v` or RUST_LOG. The processes that systemd
/// starts log at level info.
pub(crate) fn log_to_stderr(cli: &Cli) {
    let level = match cli.verbose {
        0 if matches!(cli.command, Command::Service(_) | Command::ImportVolume(_)) => "info",
        0 => "warn",
        1 => "info,husk=debug",
        _ => "debug,husk=trace",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    // Fails only when called twice in a process.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // Internal errors are written to stderr with a macro that panics on failure.
        .log_internal_errors(false)
        .try_init();
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_run_needs_a_part_of_the_parser_only() {
        let parsed = |words: &[&str]| format!("{:?}", Cli::parse_from(["husk"].iter().chain(words)));
        let cli = |words: &[&str]| Cli::of_run(words.iter().map(OsString::from));
        for words in [
            &["run", "vm.yaml"][..],
            &["run", "-v", "vm.yaml", "--detach", "--volume", "a=b", "-vv"],
            &["run", "-", "--kernel", "k", "--append", "a b", "-n", "here"],
        ] {
            assert_eq!(format!("{:?}", cli(words).unwrap()), parsed(words));
        }
        for other in [
            &["-v", "run", "vm.yaml"][..],
            &["run"],
            &["run", "--help"],
            &["run", "a", "--x"],
            &["list"],
        ] {
            assert!(cli(other).is_none(), "{other:?}");
        }
        RunCli::command().debug_assert();
    }
}
