//! `husk volume list`.

use husk_claims::{Claim, ClaimStore};

use crate::failure::{Failure, RUNTIME};
use crate::{output, vm_ref};

/// List the volumes of this machine
#[derive(Debug, clap::Args)]
#[command(visible_alias = "ls")]
pub(super) struct Args {
    /// Only volumes of this namespace
    #[arg(short, long, value_name = "NAMESPACE", value_parser = vm_ref::namespace)]
    namespace: Option<String>,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: VolumesFormat,
}

#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
enum VolumesFormat {
    /// Table
    #[default]
    Table,
    /// Array of objects; sizes are in bytes
    Json,
    /// One NAME or NAMESPACE/NAME per line
    Name,
}

pub(super) fn run(args: &Args, store: &ClaimStore) -> Result<(), Failure> {
    let (mut claims, mut done) = (Vec::new(), Ok(()));
    for claim in store.list()? {
        match claim {
            Ok(claim) => claims.push(claim),
            Err(error) => {
                Failure::from(error).report();
                done = Err(Failure::Ended(RUNTIME));
            }
        }
    }
    if let Some(namespace) = &args.namespace {
        claims.retain(|claim| claim.object.metadata.namespace == *namespace);
    }
    let text = match args.output {
        VolumesFormat::Json => output::json(&claims.iter().map(json).collect::<Vec<_>>())?,
        VolumesFormat::Name => claims.iter().map(|claim| format!("{}\n", claim.name())).collect(),
        VolumesFormat::Table if claims.is_empty() => {
            eprintln!("there is no volume");
            String::new()
        }
        VolumesFormat::Table => table(&claims),
    };
    output::print(&text)?;
    done
}

fn json(claim: &Claim) -> serde_json::Value {
    serde_json::json!({
        "namespace": claim.object.metadata.namespace,
        "name": claim.object.metadata.name,
        "sizeBytes": claim.size,
        "allocatedBytes": claim.allocated,
        "accessModes": modes(claim),
        "volumeMode": volume_mode(claim),
        "inUse": claim.in_use,
    })
}

fn table(claims: &[Claim]) -> String {
    let header = [
        "NAMESPACE",
        "NAME",
        "SIZE",
        "ALLOCATED",
        "MODE",
        "ACCESS",
        "IN USE",
    ];
    let mut rows = vec![header.map(String::from)];
    rows.extend(claims.iter().map(|claim| {
        [
            claim.object.metadata.namespace.clone(),
            claim.object.metadata.name.clone(),
            output::bytes(claim.size),
            format!("{}Mi", claim.allocated.div_ceil(1 << 20)),
            volume_mode(claim).into(),
            modes(claim).join(","),
            if claim.in_use { "yes" } else { "no" }.into(),
        ]
    }));
    output::table(&rows)
}

fn volume_mode(claim: &Claim) -> &'static str {
    claim.object.spec.volume_mode.name()
}

/// Access modes as `kubectl get pvc` shows them.
fn modes(claim: &Claim) -> Vec<&'static str> {
    let modes = claim.object.spec.access_modes.iter();
    modes.map(|mode| mode.short_name()).collect()
}
