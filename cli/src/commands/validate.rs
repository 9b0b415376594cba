//! `husk validate`.

use std::path::PathBuf;

use crate::failure::{Failure, USAGE, print_warning, visible};
use crate::{manifest, output};

/// Check manifests without starting anything
///
/// Prints to stderr one line `FIELD: REASON` for each invalid field, in the form KubeVirt uses, and one line `warning:
/// FIELD: …` for each field that Husk ignores or implements differently. Prints to stdout one line for each valid VM.
/// With several files or documents the lines begin with `FILE: NAME:`. Only the manifests are opened, no volumes.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if every manifest is valid, 2 if not.

Examples:
  husk validate vm.yaml
  kubectl get vmi -A -o yaml | husk validate -")]
pub(crate) struct Args {
    /// Manifests to check; `-` reads from stdin
    #[arg(value_name = "FILE", required = true, value_hint = clap::ValueHint::FilePath)]
    files: Vec<PathBuf>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let several = args.files.len() > 1;
    let mut wrong = false;
    for file in &args.files {
        let source = file.to_string_lossy();
        if let Err(failure) = validate(&source, several) {
            wrong = true;
            failure.report();
        }
    }
    if wrong { Err(Failure::Ended(USAGE)) } else { Ok(()) }
}

fn validate(source: &str, several: bool) -> Result<(), Failure> {
    let manifest = manifest::read(source, several)?;
    let names = manifest.names()?;
    for text in manifest.warnings_of_ignored() {
        print_warning(&text);
    }
    for vmi in &manifest.vmis {
        for text in husk_vmi::warnings(vmi) {
            print_warning(&format!("{}{text}", manifest.prefix_of(vmi)));
        }
    }
    let prefix = if several {
        format!("{source}: ")
    } else {
        String::new()
    };
    for vm in names {
        output::print(&format!("{}{vm} is valid\n", visible(&prefix)))?;
    }
    Ok(())
}
