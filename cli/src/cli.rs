//! The command line.

use clap::{ArgAction, Parser};
use tracing_subscriber::EnvFilter;

use crate::commands::Command;

/// Run KubeVirt VirtualMachineInstance manifests as microVMs
///
/// A VM is named NAME or NAMESPACE/NAME; without a namespace it is in `default`.
#[derive(Debug, Parser)]
#[command(
    name = "husk",
    version,
    after_help = "\
Exit status: 0 done, 1 failed, 2 wrong command line or manifest; `husk run` has
more, see its --help.

Environment:
  HUSK_RUNTIME_DIR  state of VMs; else /run/husk or XDG_RUNTIME_DIR/husk
  HUSK_SCRATCH_DIR  emptyDisks, copies of images; else /var/tmp
  HUSK_VMM          the VMM; else husk-vmm beside husk or on PATH
  HUSK_KVM          the KVM device, taken as it is; else /dev/kvm
  RUST_LOG          log filter, such as debug or husk_monitor=trace
  NO_COLOR          never print colours"
)]
pub(crate) struct Cli {
    /// Log what is being done to stderr; twice for more
    #[arg(short, long, global = true, action = ArgAction::Count, display_order = 100)]
    pub verbose: u8,

    #[command(subcommand)]
    pub command: Command,
}

/// Sends logs to stderr: warnings, unless `-v` or RUST_LOG want more. A monitor's go to its VM's log and tell more.
pub(crate) fn log_to_stderr(cli: &Cli) {
    let level = match cli.verbose {
        0 if matches!(cli.command, Command::Monitor(_)) => "info",
        0 => "warn",
        1 => "info,husk=debug",
        _ => "debug,husk=trace",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    // Only the second call in a process can fail.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // They would go to stderr too, and panic.
        .log_internal_errors(false)
        .try_init();
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
