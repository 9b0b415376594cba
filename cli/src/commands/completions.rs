//! `husk completions`.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::cli::Cli;
use crate::failure::Failure;
use crate::output;

/// Print a shell completion script
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  husk completions bash > /etc/bash_completion.d/husk
  husk completions zsh > ~/.zfunc/_husk
  husk completions fish > ~/.config/fish/completions/husk.fish")]
pub(crate) struct Args {
    /// Shell to complete for
    shell: Shell,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "husk", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}
