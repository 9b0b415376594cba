//! `husk-monitor`: the monitor of one VM, which `husk run` or `husk restore` starts.
//!
//! It is a program of its own because each VM has one: whatever else is in it costs time at each start, and memory as
//! long as the VM runs.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

const USAGE: &str = "\
husk-monitor watches one VM. Do not start it by hand: `husk run` and `husk restore` start it, and give it the VM's
configuration on its standard input.

usage: husk-monitor [-v]...

  -v                 log more; twice for debug output
  --version, --help

Environment:
  HUSK_VMM           path of the VMM [default: husk-vmm beside husk-monitor, else on PATH]
  HUSK_KVM           path of the KVM device [default: /dev/kvm]
  RUST_LOG           log filter, such as debug or husk_monitor=trace

To run a VM: husk run FILE
";

/// Exit status of a wrong command line.
const USAGE_ERROR: u8 = 2;

#[derive(Debug, PartialEq, Eq)]
enum Invocation {
    /// Monitor a VM, with as many `-v`.
    Run(usize),
    Print(String),
}

fn parse(words: impl Iterator<Item = OsString>) -> Result<Invocation, String> {
    let mut verbose = 0;
    for word in words {
        match word.to_str() {
            Some("-v") => verbose += 1,
            Some("--version" | "-V") => {
                let version = concat!("husk-monitor ", env!("CARGO_PKG_VERSION"), "\n");
                return Ok(Invocation::Print(version.into()));
            }
            Some("--help" | "-h") => return Ok(Invocation::Print(USAGE.into())),
            _ => return Err(format!("unknown argument {word:?}")),
        }
    }
    Ok(Invocation::Run(verbose))
}

fn main() -> ExitCode {
    let verbose = match parse(std::env::args_os().skip(1)) {
        Ok(Invocation::Run(_)) if io::stdin().is_terminal() => {
            return refuse("a terminal is not a VM's configuration");
        }
        Ok(Invocation::Run(verbose)) => verbose,
        Ok(Invocation::Print(text)) => {
            return match io::stdout().write_all(text.as_bytes()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            };
        }
        Err(error) => return refuse(&error),
    };
    log_to_stderr(verbose);
    husk_monitor::monitor::serve()
}

/// Says what is wrong with the command line. Nothing can be done if that fails.
fn refuse(error: &str) -> ExitCode {
    let _ = write!(io::stderr(), "error: {error}\n\n{USAGE}");
    ExitCode::from(USAGE_ERROR)
}

/// Sets up the log on stderr, which becomes the VM's log file. `EnvFilter` would bring a regex engine into each monitor.
fn log_to_stderr(verbose: usize) {
    let filter = std::env::var("RUST_LOG")
        .ok()
        .and_then(|filter| filter.parse().ok());
    let filter: Targets = filter.unwrap_or_else(|| default_filter(verbose));
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        // Internal errors are written to stderr with a macro that panics on failure.
        .log_internal_errors(false);
    // Fails only when called twice in a process.
    let _ = tracing_subscriber::registry().with(filter).with(lines).try_init();
}

fn default_filter(verbose: usize) -> Targets {
    use tracing::level_filters::LevelFilter;
    let (all, own) = match verbose {
        0 => (LevelFilter::INFO, LevelFilter::INFO),
        1 => (LevelFilter::INFO, LevelFilter::DEBUG),
        _ => (LevelFilter::DEBUG, LevelFilter::TRACE),
    };
    Targets::new().with_default(all).with_target("husk", own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_has_levels_only() {
        let parsed = |words: &[&str]| parse(words.iter().map(OsString::from));
        assert_eq!(parsed(&[]), Ok(Invocation::Run(0)));
        assert_eq!(parsed(&["-v", "-v"]), Ok(Invocation::Run(2)));
        assert_eq!(parsed(&["-v", "-h"]), Ok(Invocation::Print(USAGE.into())));
        assert_eq!(parsed(&["vm.yaml"]), Err(r#"unknown argument "vm.yaml""#.into()));
    }

    #[test]
    fn levels_apply_to_husk_first() {
        use tracing::Level;
        for (verbose, own, other) in [
            (0, Level::INFO, Level::INFO),
            (1, Level::DEBUG, Level::INFO),
            (2, Level::TRACE, Level::DEBUG),
        ] {
            let filter = default_filter(verbose);
            for level in [Level::INFO, Level::DEBUG, Level::TRACE] {
                let shown = |target| filter.would_enable(target, &level);
                assert_eq!(shown("husk_monitor::monitor"), level <= own, "{verbose} {level}");
                assert_eq!(shown("h2"), level <= other, "{verbose} {level}");
            }
        }
    }
}
