//! `husk validate`.

use std::path::PathBuf;

use crate::failure::{Failure, USAGE};
use crate::{manifest, output};

/// Check manifests without starting anything
///
/// Prints one line per wrong field, `FIELD: REASON` in KubeVirt's words, and one line `note: FIELD: …` for what would
/// be met differently, on stderr, and a line for each VM that could run on stdout. Nothing is opened but the manifests.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if every manifest is valid, 2 if not.

Examples:
  husk validate vm.yaml
  kubectl get vmi -A -o yaml | husk validate -")]
pub(crate) struct Args {
    /// Manifests; `-` reads stdin
    #[arg(value_name = "FILE", required = true, value_hint = clap::ValueHint::FilePath)]
    files: Vec<PathBuf>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let mut wrong = false;
    for file in &args.files {
        let source = file.to_string_lossy();
        let prefix = if args.files.len() > 1 {
            format!("{source}: ")
        } else {
            String::new()
        };
        match manifest::read(&source) {
            Ok(manifest) => {
                for ignored in &manifest.ignored {
                    eprintln!("note: {prefix}{}", manifest::left_alone(ignored));
                }
                for note in manifest.vmis.iter().flat_map(husk_vmi::notes) {
                    eprintln!("note: {prefix}{note}");
                }
                for vm in manifest.names()? {
                    output::print(&format!("{prefix}{vm} is valid\n"))?;
                }
            }
            Err(Failure::Manifest(lines)) => {
                wrong = true;
                for line in lines {
                    eprintln!("{prefix}{line}");
                }
            }
            Err(failure) => {
                wrong = true;
                failure.report();
            }
        }
    }
    if wrong { Err(Failure::Ended(USAGE)) } else { Ok(()) }
}
