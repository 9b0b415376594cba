//! `husk validate`.

use std::path::PathBuf;

use crate::failure::{Failure, USAGE, note, visible};
use crate::{manifest, output};

/// Check manifests without starting anything
///
/// Prints one line per wrong field, `FIELD: REASON` in KubeVirt's words, and one line `note: FIELD: …` for what would
/// be met differently, on stderr, and a line for each VM that could run on stdout. The file and the document come
/// first where there are several: `FILE: NAME: FIELD: …`. Nothing is opened but the manifests.
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
    for ignored_notes in manifest.ignored_notes() {
        note(&ignored_notes);
    }
    for vmi in &manifest.vmis {
        for text in husk_vmi::notes(vmi) {
            note(&format!("{}{text}", manifest.prefix_of(vmi)));
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
